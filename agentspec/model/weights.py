"""Weights from and to files: Hugging Face safetensors or a Llama GGUF in, Hugging Face out.

In: a folder with ``config.json`` and ``*.safetensors`` (single or sharded with an index), or a
``.gguf`` file. Out: ``Loaded``, the config with a plain dict of (possibly sharded) arrays. Both
ways go tensor by tensor between files and devices, so that a host needs memory for one tensor, not
for the model; of each it reads only what its own devices hold. What is missing, left over or
misshapen is one error that lists it; nothing is filled in silently.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from agentspec.model.config import DTYPES, ModelConfig
from agentspec.model.hf_config import config_from_hf, config_to_hf
from agentspec.model.hf_names import (
    EMBEDDING,
    HEAD,
    Piece,
    Tensor,
    hf_tensors,
    leaf_names,
    text_part,
)
from agentspec.model.placing import place
from agentspec.model.safetensors_files import (
    MAX_SHARD_BYTES,
    Outgoing,
    Readable,
    Stored,
    read_folder,
    read_json,
    write_folder,
)
from agentspec.model.transformer import LanguageModel, Params

# how a model is computed: the caller's choice, where all else is the file's
CHOICES = ("param_dtype", "remat", "scan", "attention", "chunk")


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """A model with its weights. ``params`` is a plain nested dict of arrays."""

    config: ModelConfig
    params: Params
    model: LanguageModel
    _apply: Callable[..., jax.Array]

    def apply(
        self,
        params: Params,
        ids_BT: Any,
        positions_BT: Any = None,
        segment_ids_BT: Any = None,
    ) -> jax.Array:
        """Returns float32 logits [B, T, V]: jitted, uncached, full forward pass."""
        return self._apply(params, ids_BT, positions_BT, segment_ids_BT)


def make_loaded(model: LanguageModel, params: Params) -> Loaded:
    """Returns ``model`` and ``params`` as if they had been read from a file."""
    return Loaded(model.config, params, model, jax.jit(model.apply))


def load_model(
    path: str | Path, mesh: Mesh | None = None, dtype: str | None = None, **choices: Any
) -> Loaded:
    """Returns the model at ``path``: a Hugging Face folder or a ``.gguf`` file.

    ``dtype`` None keeps the one that most of the file's bytes have (float16 widens to float32; a
    GGUF is dequantised to float32). With a ``mesh`` each parameter is put on it as its logical axes
    say. ``choices`` are fields of the config named in ``CHOICES``. Of a multimodal folder only the
    text model is read, with a warning that says what was left out.

    Raises:
        FileNotFoundError: where there is nothing to read.
        ValueError: for damaged files, unsupported features, and missing, unexpected or misshapen
            tensors, all of them listed.
    """
    path = Path(path)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}, allowed: {', '.join(DTYPES)}")
    if unknown := sorted(choices.keys() - set(CHOICES)):
        raise ValueError(f"load_model cannot set {unknown}, allowed: {', '.join(CHOICES)}")
    config, stored = _open(path)
    stored = _without_tied_head(config, stored, path)
    config = dataclasses.replace(config, dtype=dtype or _main_dtype(stored), **choices)
    model = LanguageModel(config, mesh)
    tensors = hf_tensors(
        config, {name: like.shape for name, like in leaf_names(model.shapes).items()}
    )
    _check(tensors, stored, path)
    return make_loaded(model, place(model, tensors, stored, mesh))


def read_hf(folder: Path) -> tuple[ModelConfig, dict[str, Stored], dict[str, Stored]]:
    """Returns a folder's config, its text model's tensors by plain name, and its other tensors."""
    config_file = folder / "config.json"
    if not config_file.exists():
        raise FileNotFoundError(f"no {config_file}")
    config = config_from_hf(read_json(config_file), str(config_file))
    return (config, *text_part(config, read_folder(folder)))


def save_hf(loaded: Loaded, path: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes ``config.json`` and safetensors (with an index where there is more than one file).

    Tensors keep the parameters' dtype and bits. ``path`` must hold no safetensors yet: a left-over
    shard would be read as ours. All shards of the parameters must be on this host's devices.

    Raises:
        FileExistsError: where ``path`` has safetensors files already.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    old = sorted(file.name for file in path.glob("*.safetensors*"))
    if old:
        raise FileExistsError(f"{path} already holds {', '.join(old)}")
    leaves = leaf_names(loaded.params)

    def rows(piece: Piece) -> list[np.ndarray]:
        leaf = leaves[piece.leaf]
        return [np.asarray(leaf if piece.entry is None else _entry(leaf, np.int32(piece.entry)))]

    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    tensors = hf_tensors(loaded.config, shapes)
    dtypes = {name: np.dtype(leaf.dtype) for name, leaf in leaves.items()}
    write_folder(path, [outgoing(tensor, dtypes, rows) for tensor in tensors], max_shard_bytes)
    text = json.dumps(config_to_hf(loaded.config), indent=2)
    (path / "config.json").write_text(text + "\n", encoding="utf-8")


def outgoing(
    tensor: Tensor,
    dtypes: Mapping[str, np.dtype],
    rows: Callable[[Piece], Iterable[np.ndarray]],
) -> Outgoing:
    """Returns ``tensor`` to be written in the dtype of its leaves; ``rows`` gives each piece's."""
    dtype = dtypes[tensor.pieces[0].leaf]

    def blocks() -> Iterator[np.ndarray]:
        for piece in tensor.pieces:
            for block in rows(piece):
                yield block.astype(dtype, copy=False)

    return Outgoing(tensor.name, dtype, tensor.shape, blocks)


@jax.jit
def _entry(stack: jax.Array, entry: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(stack, entry, keepdims=False)


def _open(path: Path) -> tuple[ModelConfig, Mapping[str, Readable]]:
    if path.is_dir():
        config, stored, rest = read_hf(path)
        if rest:
            kinds = sorted({name.removeprefix("model.").split(".")[0] for name in rest})
            warnings.warn(
                f"{path}: left out {len(rest)} tensors that are not of the text model "
                f"({', '.join(kinds)}), {sum(one.nbytes for one in rest.values()):,} bytes",
                stacklevel=3,
            )
        return config, stored
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    if path.suffix == ".gguf":
        try:  # the package gguf is an extra, needed for these files only
            from agentspec.model.gguf_file import read_gguf
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{path}: reading it needs the package gguf") from error
        return read_gguf(path)
    raise ValueError(f"{path}: expected a Hugging Face folder or a .gguf file")


def _without_tied_head(
    config: ModelConfig, stored: Mapping[str, Readable], path: Path
) -> Mapping[str, Readable]:
    """Leaves out a redundant head of a tied model; an unequal or absent one is an error."""
    if config.tie_embeddings and HEAD in stored:
        if EMBEDDING in stored and not _equal(stored[HEAD], stored[EMBEDDING]):
            raise ValueError(
                f"{path}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}"
            )
    elif not config.tie_embeddings and HEAD not in stored:
        raise ValueError(f"{path}: tie_word_embeddings is false and {HEAD} is missing")
    return {n: t for n, t in stored.items() if n != HEAD or not config.tie_embeddings}


def _equal(one: Readable, other: Readable, rows: int = 4096) -> bool:
    """Whether two matrices hold the same values; compared some rows at a time."""
    if one.shape != other.shape:
        return False
    cuts = [[slice(row, row + rows)] for row in range(0, one.shape[0], rows)]
    return all(np.array_equal(one.read(cut), other.read(cut)) for cut in cuts)


def _main_dtype(stored: Mapping[str, Readable]) -> str:
    """bfloat16 where most bytes are (Qwen3.5 has some vectors in float32), or else float32."""
    n_bytes = {True: 0, False: 0}
    for tensor in stored.values():
        size = int(np.prod(tensor.shape)) * tensor.dtype.itemsize
        n_bytes[tensor.dtype.name == "bfloat16"] += size
    return "bfloat16" if n_bytes[True] > n_bytes[False] else "float32"


def _check(tensors: list[Tensor], stored: Mapping[str, Readable], path: Path) -> None:
    wanted = {tensor.name: tensor.shape for tensor in tensors}
    problems = []
    if missing := sorted(wanted.keys() - stored.keys()):
        problems.append(f"missing: {', '.join(missing)}")
    if unexpected := sorted(stored.keys() - wanted.keys()):
        problems.append(f"unexpected: {', '.join(unexpected)}")
    for name in sorted(wanted.keys() & stored.keys()):
        if stored[name].shape != wanted[name]:
            problems.append(f"{name} has shape {stored[name].shape}, config says {wanted[name]}")
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
