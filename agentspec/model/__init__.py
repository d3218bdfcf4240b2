"""The decoder-only transformer (Flax NNX) and its weights: Hugging Face or GGUF in, HF out."""
