"""Text to ids and back: tokenizer, append-only chat rendering, call parsing, packed batches."""
