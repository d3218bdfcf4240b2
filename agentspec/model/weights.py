"""Weights from and to files: Hugging Face safetensors or a Llama GGUF in, Hugging Face out.

In: a folder with ``config.json`` and ``*.safetensors`` (single or sharded with an index), or a
``.gguf`` file. Out: ``Loaded``, the config with a plain dict of (possibly sharded) arrays. What is
missing, left over or misshapen is one error that lists it; nothing is filled in silently.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from agentspec.mesh import param_shardings
from agentspec.model.config import DTYPES, ModelConfig
from agentspec.model.transformer import LanguageModel, Params

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9

_NAMES = {  # ours within a layer -> Hugging Face's
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q": "self_attn.q_proj.weight",
    "attention.k": "self_attn.k_proj.weight",
    "attention.v": "self_attn.v_proj.weight",
    "attention.o": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}


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


def load_model(path: str | Path, mesh: Mesh | None = None, dtype: str | None = None) -> Loaded:
    """Returns the model at ``path``: a Hugging Face folder or a ``.gguf`` file.

    ``dtype`` None keeps the file's (float16 widens to float32; a GGUF is dequantised to float32).
    With a ``mesh`` each parameter is put on it as its logical axes say.

    Raises:
        FileNotFoundError: where there is nothing to read.
        ValueError: for damaged files, unsupported features, and missing, unexpected or misshapen
            tensors, all of them listed.
    """
    path = Path(path)
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}, allowed: {', '.join(DTYPES)}")
    if path.is_dir():
        config, tensors = _read_hf(path)
    elif not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    elif path.suffix == ".gguf":
        try:  # the package gguf is an extra, needed for these files only
            from agentspec.model.gguf_file import read_gguf
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{path}: reading it needs the package gguf") from error
        config, tensors = read_gguf(path)
    else:
        raise ValueError(f"{path}: expected a Hugging Face folder or a .gguf file")
    _resolve_tied(config, tensors, path)
    config = dataclasses.replace(config, dtype=dtype or _common_dtype(tensors))
    model = LanguageModel(config)
    return make_loaded(model, _to_params(model, tensors, mesh, path))


def save_hf(loaded: Loaded, path: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes ``config.json`` and safetensors (with an index where there is more than one file).

    Tensors keep the parameters' dtype and bits. The index is built from the keys found in the
    written files. ``path`` must hold no safetensors yet: a left-over shard would be read as ours.

    Raises:
        FileExistsError: where ``path`` has safetensors files already.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    old = sorted(file.name for file in path.glob("*.safetensors*"))
    if old:
        raise FileExistsError(f"{path} already holds {', '.join(old)}")
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, leaf in _hf_leaves(loaded.model, loaded.params):
        array = np.asarray(jax.device_get(leaf))
        used = sum(other.nbytes for other in shards[-1].values())
        if shards[-1] and used + array.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = np.ascontiguousarray(array.reshape(_flat_shape(name, array.shape)))
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, tensors in zip(files, shards, strict=True):
        save_file(tensors, path / file, metadata={"format": "pt"})
    if len(files) > 1:
        _write_index(path, files)
    text = json.dumps(loaded.config.to_hf(), indent=2)
    (path / "config.json").write_text(text + "\n", encoding="utf-8")


def _write_index(path: Path, files: list[str]) -> None:
    weight_map, total_bytes = {}, 0
    for file in files:
        for name, array in _read_safetensors(path / file).items():
            weight_map[name] = file
            total_bytes += array.nbytes
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _hf_leaves(model: LanguageModel, tree: Params) -> Iterator[tuple[str, Any]]:
    """Yields (Hugging Face name, leaf) of a tree of the parameters' form, in a fixed order."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield _hf_name(".".join(key.key for key in path)), leaf


def _hf_name(ours: str) -> str:
    top = {"embedding": EMBEDDING, "norm.weight": "model.norm.weight", "head": HEAD}
    if ours in top:
        return top[ours]
    _, layer, rest = ours.split(".", 2)
    return f"model.layers.{layer}.{_NAMES[rest]}"


def _flat_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the Hugging Face shape: heads and head size are one dimension there."""
    if len(shape) < 3:
        return shape
    if name.endswith("o_proj.weight"):
        return (shape[0], shape[1] * shape[2])
    return (shape[0] * shape[1], shape[2])


def _to_params(
    model: LanguageModel, tensors: dict[str, np.ndarray], mesh: Mesh | None, path: Path
) -> Params:
    wanted = dict(_hf_leaves(model, model.shapes))
    problems = []
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - wanted.keys())
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if unexpected:
        problems.append(f"unexpected: {', '.join(unexpected)}")
    for name in sorted(wanted.keys() & tensors.keys()):
        shape = _flat_shape(name, wanted[name].shape)
        if tensors[name].shape != shape:
            problems.append(f"{name} has shape {tensors[name].shape}, config says {shape}")
    if problems:
        raise ValueError(f"{path}: " + "; ".join(problems))
    shardings = None if mesh is None else param_shardings(model.logical_axes, model.shapes, mesh)
    placed = None if shardings is None else dict(_hf_leaves(model, shardings))

    def put(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        array = tensors[name].astype(like.dtype, copy=False).reshape(like.shape)
        if placed is None:
            return jnp.array(array)  # a copy: the file's memory map is not kept
        return jax.make_array_from_callback(like.shape, placed[name], lambda cut: array[cut])

    leaves = [put(name, like) for name, like in _hf_leaves(model, model.shapes)]
    return jax.tree.unflatten(jax.tree.structure(model.shapes), leaves)


def _resolve_tied(config: ModelConfig, tensors: dict[str, np.ndarray], path: Path) -> None:
    """Drops a redundant head of a tied model; an unequal or absent one is an error."""
    if config.tie_embeddings and HEAD in tensors:
        if EMBEDDING in tensors and not np.array_equal(tensors[HEAD], tensors[EMBEDDING]):
            raise ValueError(
                f"{path}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}"
            )
        del tensors[HEAD]
    elif not config.tie_embeddings and HEAD not in tensors:
        raise ValueError(f"{path}: tie_word_embeddings is false and {HEAD} is missing")


def _common_dtype(tensors: dict[str, np.ndarray]) -> str:
    kinds = {str(array.dtype) for array in tensors.values()}
    return "bfloat16" if kinds == {"bfloat16"} else "float32"  # float32 holds the others exactly


def _read_hf(folder: Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    config_file = folder / "config.json"
    if not config_file.exists():
        raise FileNotFoundError(f"no {config_file}")
    config = ModelConfig.from_hf(_read_json(config_file), str(config_file))
    if (folder / INDEX).exists():
        weight_map = _read_json(folder / INDEX).get("weight_map", {})
        files = sorted(set(weight_map.values()))
        absent = [file for file in files if not (folder / file).exists()]
        if absent:
            raise FileNotFoundError(f"{folder / INDEX} names absent files: {', '.join(absent)}")
    else:
        weight_map, files = None, ["model.safetensors"]
        if not (folder / files[0]).exists():
            raise FileNotFoundError(f"{folder} has neither model.safetensors nor {INDEX}")
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        tensors |= _read_safetensors(folder / file)
    lost = sorted((weight_map or {}).keys() - tensors.keys())
    if lost:
        raise ValueError(f"{folder / INDEX} lists tensors that no file holds: {', '.join(lost)}")
    return config, tensors


def _read_safetensors(file: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(file, framework="np") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
    odd = sorted(
        f"{name} ({array.dtype})"
        for name, array in tensors.items()
        if str(array.dtype) not in ("float32", "bfloat16", "float16")
    )
    if odd:
        raise ValueError(f"{file}: only float32, bfloat16 and float16 are read, got {odd}")
    return tensors


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content
