"""Reads a Llama-architecture GGUF file (quantised or not) under Hugging Face's names.

In: a ``.gguf`` path. Out: ``ModelConfig`` and float32 arrays named and ordered as in the Hugging
Face model. llama.cpp stores the rows of q and k for rotary pairs (2i, 2i+1); ours, as Hugging
Face's, are (i, i + E/2), so these rows are put back: a model read without that is exact at position
0 and wrong everywhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from agentspec.model.config import ModelConfig

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def half_split_rows(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Returns q or k rows moved from interleaved pairs (2i, 2i+1) to halves (i, i + E/2)."""
    rows, columns = weight.shape
    pairs = weight.reshape(n_heads, rows // n_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def read_gguf(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Returns config and float32 tensors of a Llama GGUF, under Hugging Face names.

    Raises:
        ValueError: for another architecture, a truncated file, missing metadata or rope scaling.
    """
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} is truncated or not a GGUF file: {error}") from error
    names = {tensor.name for tensor in reader.tensors}
    config = _config(fields, names, path)
    tensors = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            array = half_split_rows(array, config.n_heads)
        elif tensor.name.endswith("attn_k.weight"):
            array = half_split_rows(array, config.n_kv_heads)
        tensors[_hf_name(tensor.name)] = array
    return config, tensors


def _hf_name(name: str) -> str:
    """Returns the Hugging Face name; an unknown name stays, to be listed as unexpected."""
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.partition(".")
    number, _, kind = rest.partition(".")
    if block == "blk" and kind in _LAYER:
        return f"model.layers.{number}.{_LAYER[kind]}"
    return name


def _config(fields: dict[str, Any], names: set[str], path: Path) -> ModelConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: GGUF architecture {architecture!r}, allowed: 'llama'")
    keys = (
        "block_count embedding_length feed_forward_length attention.head_count rope.freq_base "
        "attention.layer_norm_rms_epsilon context_length"
    ).split()
    missing = [f"llama.{key}" for key in keys if f"llama.{key}" not in fields]
    if "token_embd.weight" not in names:
        missing.append("token_embd.weight")
    if missing:
        raise ValueError(f"{path}: missing {', '.join(missing)}")
    layers, width, ffn, heads, theta, eps, context = (fields[f"llama.{key}"] for key in keys)
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        raise ValueError(f"{path}: rope scaling in a GGUF file ({scaling!r}) is not supported")
    head_dim = int(fields.get("llama.attention.key_length", width // heads))
    rotated = int(fields.get("llama.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise ValueError(f"{path}: llama.rope.dimension_count={rotated}, expected {head_dim}")
    eos, tokens = fields.get("tokenizer.ggml.eos_token_id"), fields.get("tokenizer.ggml.tokens")
    vocab_size = fields.get("llama.vocab_size", None if tokens is None else len(tokens))
    if vocab_size is None:
        raise ValueError(f"{path}: missing llama.vocab_size and tokenizer.ggml.tokens")
    return ModelConfig(
        vocab_size=int(vocab_size),
        d_model=int(width),
        n_layers=int(layers),
        n_heads=int(heads),
        n_kv_heads=int(fields.get("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        d_ff=int(ffn),
        rope_theta=float(theta),
        norm_eps=float(eps),
        tie_embeddings="output.weight" not in names,
        qk_norm=False,
        max_positions=int(context),
        bos_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_ids=() if eos is None else (int(eos),),
        pad_id=fields.get("tokenizer.ggml.padding_token_id"),
    )
