"""Which Hugging Face tensor each of our parameters is: one table, read in both directions.

In: a ``ModelConfig`` and the shapes of its parameters. Out: ``Tensor``s, the Hugging Face model's,
each with the ``Piece``s of our leaves that make up its rows. Qwen3.5 keeps the queries, keys and
values of a DeltaNet layer in one tensor; ours are three, so that each can be cut by heads. A leaf
stacked over layers (``scan``) is one piece of many tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from agentspec.model.config import ModelConfig

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TEXT_PREFIX = "model.language_model."  # of the text part in a multimodal folder; alone: "model."

_LAYER: dict[str, tuple[str, ...]] = {  # Hugging Face's within a layer -> ours, by rows
    "input_layernorm.weight": ("attention_norm.weight",),
    "self_attn.q_proj.weight": ("attention.q",),
    "self_attn.k_proj.weight": ("attention.k",),
    "self_attn.v_proj.weight": ("attention.v",),
    "self_attn.o_proj.weight": ("attention.o",),
    "self_attn.q_norm.weight": ("attention.q_norm.weight",),
    "self_attn.k_norm.weight": ("attention.k_norm.weight",),
    "linear_attn.in_proj_qkv.weight": ("deltanet.q", "deltanet.k", "deltanet.v"),
    "linear_attn.in_proj_z.weight": ("deltanet.z",),
    "linear_attn.in_proj_b.weight": ("deltanet.b",),
    "linear_attn.in_proj_a.weight": ("deltanet.a",),
    "linear_attn.conv1d.weight": ("deltanet.conv_q", "deltanet.conv_k", "deltanet.conv_v"),
    "linear_attn.dt_bias": ("deltanet.dt_bias",),
    "linear_attn.A_log": ("deltanet.A_log",),
    "linear_attn.norm.weight": ("deltanet.norm.weight",),
    "linear_attn.out_proj.weight": ("deltanet.out",),
    "post_attention_layernorm.weight": ("mlp_norm.weight",),
    "mlp.gate_proj.weight": ("mlp.gate",),
    "mlp.up_proj.weight": ("mlp.up",),
    "mlp.down_proj.weight": ("mlp.down",),
}
_NOT_TEXT = ("model.visual.", "mtp.")  # parts of Qwen3.5 that the text model does without

Shape = tuple[int, ...]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Piece:
    """One layer of one leaf, and the rows of a Hugging Face tensor that it is.

    ``entry`` is its place in a leaf stacked over layers, None in one that is not. ``shape`` is the
    layer's own, ``first_row`` where it begins in the tensor.
    """

    leaf: str
    entry: int | None
    shape: Shape
    first_row: int = 0

    @property
    def hf_shape(self) -> Shape:
        """Its shape in the tensor, where heads and head size are one dimension."""
        return tuple(math.prod(self.shape[d] for d in dims) for dims in self._merged)

    @property
    def _merged(self) -> list[tuple[int, ...]]:
        """For each of the tensor's dimensions, those of ours that it runs over."""
        kind = self.leaf.split(".")[-1]
        if kind.startswith("conv_"):
            return [(0, 1), (), (2,)]
        if kind in ("o", "out"):
            return [(0,), (1, 2)]
        if len(self.shape) == 3:
            return [(0, 1), (2,)]
        return [(d,) for d in range(len(self.shape))]

    def cut(self, index: Sequence[slice]) -> tuple[slice, ...]:
        """Returns where the part ``index`` of this piece lies in the tensor.

        Raises:
            ValueError: where a head's own rows are cut, which then lie apart in the tensor.
        """
        bounds = [cut.indices(size)[:2] for cut, size in zip(index, self.shape, strict=True)]
        found = []
        for dims in self._merged:
            if len(dims) == 2 and bounds[dims[1]] != (0, self.shape[dims[1]]):
                raise ValueError(f"{self.leaf}: dimension {dims[1]} (head size) cannot be cut")
            size = self.shape[dims[1]] if len(dims) == 2 else 1
            start, stop = bounds[dims[0]] if dims else (0, 1)
            found.append(slice(start * size, stop * size))
        rows = found[0]
        return (slice(rows.start + self.first_row, rows.stop + self.first_row), *found[1:])


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the Hugging Face model: its pieces follow each other by rows."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]


def leaf_names(tree: Any) -> dict[str, Any]:
    """Returns dotted name -> leaf of a tree of the parameters' form, in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def hf_tensors(config: ModelConfig, shapes: Mapping[str, Shape]) -> list[Tensor]:
    """Returns the tensors of the Hugging Face model, embedding and first layer first.

    ``shapes`` are those of the parameters, by dotted name.

    Raises:
        ValueError: naming parameters for which there is no tensor.
    """
    tensors = [_tensor(EMBEDDING, [("embedding", None, shapes["embedding"])])]
    for layer in range(config.n_layers):
        entry, j = divmod(layer, config.period)
        for name, ours in _LAYER.items():
            leaves = [f"layers.{j}.{kind}" for kind in ours]
            if leaves[0] not in shapes:
                continue  # a layer of the other kind
            parts = [
                (leaf, entry, shapes[leaf][1:]) if config.scan else (leaf, None, shapes[leaf])
                for leaf in leaves
            ]
            tensors.append(_tensor(f"model.layers.{layer}.{name}", parts))
    tensors.append(_tensor("model.norm.weight", [("norm.weight", None, shapes["norm.weight"])]))
    if "head" in shapes:
        tensors.append(_tensor(HEAD, [("head", None, shapes["head"])]))
    named = {piece.leaf for tensor in tensors for piece in tensor.pieces}
    if unknown := sorted(shapes.keys() - named):
        raise ValueError(f"no Hugging Face names for the parameters {', '.join(unknown)}")
    return tensors


def _tensor(name: str, parts: Iterable[tuple[str, int | None, Shape]]) -> Tensor:
    pieces: list[Piece] = []
    rows = 0
    for leaf, entry, shape in parts:
        pieces.append(Piece(leaf, entry, shape, rows))
        rows += pieces[-1].hf_shape[0]
    return Tensor(name, (rows, *pieces[0].hf_shape[1:]), tuple(pieces))


def text_part(config: ModelConfig, tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Returns a folder's tensors as (the text model's, the rest), the first under plain names.

    A multimodal Qwen3.5 folder has its text model under ``TEXT_PREFIX``; its vision tower, and the
    head that predicts further tokens, are the rest. Other families have no rest.
    """
    if config.family != "qwen3_5":
        return dict(tensors), {}
    text: dict[str, T] = {}
    rest: dict[str, T] = {}
    for name, tensor in tensors.items():
        if name.startswith(_NOT_TEXT):
            rest[name] = tensor
        elif name.startswith(TEXT_PREFIX):
            text["model." + name.removeprefix(TEXT_PREFIX)] = tensor
        else:
            text[name] = tensor
    return text, rest
