"""Reads a Llama-architecture GGUF file (quantised or not) under Hugging Face's names.

In: a ``.gguf`` path. Out: ``ModelConfig`` and tensors, named and ordered as in the Hugging Face
model and dequantised to float32 one by one. llama.cpp stores the rows of q and k for rotary pairs
(2i, 2i+1); ours, as Hugging Face's, are (i, i + E/2), so these rows are put back: a model read
without that is exact at position 0 and wrong everywhere else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
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


@dataclasses.dataclass(frozen=True, eq=False)
class Quantised:
    """A tensor in a GGUF file, dequantised when it is read. ``n_heads`` are q's or k's, else 0."""

    tensor: gguf.ReaderTensor
    n_heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; a GGUF file names the dimensions from last to first."""
        return tuple(int(size) for size in reversed(self.tensor.shape))

    @property
    def dtype(self) -> np.dtype:
        """What it is dequantised to: float32."""
        return np.dtype(np.float32)

    def read(self, cut: Sequence[slice] = (), dtype: Any = None) -> np.ndarray:
        """Returns the part ``cut`` of it, rows in our order, cast to ``dtype``."""
        return _values(self)[tuple(cut)].astype(dtype or self.dtype, copy=False)


@functools.lru_cache(maxsize=1)  # a tensor cut over devices is read once for each of them
def _values(stored: Quantised) -> np.ndarray:
    array = gguf.dequantize(stored.tensor.data, stored.tensor.tensor_type)
    return half_split_rows(array, stored.n_heads) if stored.n_heads else array


def read_gguf(path: Path) -> tuple[ModelConfig, dict[str, Quantised]]:
    """Returns config and tensors of a Llama GGUF, under Hugging Face names.

    Raises:
        ValueError: for another architecture, a truncated file, missing metadata or rope scaling.
    """
    reader, fields = _open(path)
    names = {tensor.name for tensor in reader.tensors}
    config = _config(fields, names, path)
    heads = {"attn_q.weight": config.n_heads, "attn_k.weight": config.n_kv_heads}
    tensors = {}
    for tensor in reader.tensors:
        n_heads = heads.get(tensor.name.split(".", 2)[-1], 0)
        tensors[_hf_name(tensor.name)] = Quantised(tensor, n_heads)
    return config, tensors


def read_chat_template(path: Path) -> str | None:
    """Returns the chat template in the file, a Jinja text; None where it has none."""
    template = _open(path)[1].get("tokenizer.chat_template")
    return None if template is None else str(template)


def _open(path: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    try:
        reader = gguf.GGUFReader(path)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} is truncated or not a GGUF file: {error}") from error


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
        family="llama",
        max_positions=int(context),
        bos_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_ids=() if eos is None else (int(eos),),
        pad_id=fields.get("tokenizer.ggml.padding_token_id"),
    )
