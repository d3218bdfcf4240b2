"""Saves and restores training states, atomically and in the background.

A checkpoint is a folder ``DIR/00000020`` with two Orbax items (``params``; ``rest``: optimizer
state and step), ``meta.json`` and ``manifest.json``: every array's shape and dtype, every file's
size and CRC-32. It is written as ``00000020.partial``, gets its manifest last and then its name, so
a folder of that name is complete, or damaged since, which the manifest shows. Older checkpoints are
deleted only after that. Arrays are stored under flat names (``params/layers/0/wq``); shapes and
shardings at restore are always the target's, never the saved ones.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from agentspec.state import TrainState

_STEP = re.compile(r"\d{8,}")
_CHUNK_BYTES = 1 << 24
_VANISHED = (
    "vanished while it was being read; a run deletes its older checkpoints: take the newest one, "
    "or a copy"
)
_CONCURRENCY = ("data_copy_concurrency", "file_io_concurrency")


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved or restored as asked; the message names folder or file."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are not what its manifest says."""


class Checkpointer:
    """The checkpoints of one folder. Use as a context manager, or call `close`."""

    def __init__(self, directory: epath.PathLike, keep: int = 2, checksum: bool = True) -> None:
        """``keep`` newest ones stay; ``checksum`` False compares sizes only (large models)."""
        if keep < 1:
            raise CheckpointError(f"checkpoint keep must be at least 1, got {keep}")
        self.directory = epath.Path(directory).resolve()
        self.keep, self.checksum = keep, checksum
        self._orbax: ocp.AsyncCheckpointer | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self.directory.exists():
            return []
        return sorted(int(p.name) for p in self.directory.iterdir() if _STEP.fullmatch(p.name))

    def recover(self) -> None:
        """Gives its name back to a checkpoint whose replacement a kill cut short.

        For the writer only: a reader beside it would undo a replacement under way.
        """
        for path in self.directory.glob("*.replaced") if self.directory.exists() else ():
            final = self.directory / path.name.removesuffix(".replaced")
            if not final.exists():
                path.rename(final)

    def latest(self) -> int | None:
        """The newest complete step, or None. A save still under way does not count."""
        return self.steps()[-1] if self.steps() else None

    def save(self, step: int, state: Any, meta: dict[str, Any], *, force: bool = False) -> None:
        """Starts to save; returns once the arrays are copied, so that they may be donated.

        ``state`` is a TrainState, or a dict with one under ``state`` and further trees. ``meta`` is
        kept as JSON. Raises what a save before failed with; CheckpointError for a step already
        there (unless ``force``) or one that differs from the state's; TypeError or ValueError for
        meta that is not JSON.
        """
        text = json.dumps(meta, indent=1, sort_keys=True, allow_nan=False)
        self.wait()
        items = _items(state)
        own = int(items["rest"]["step"])
        if own != step:
            raise CheckpointError(f"save(step={step}) of a state whose step is {own}")
        if not force and (self.directory / _name(step)).exists():
            raise CheckpointError(f"{self.directory / _name(step)} exists; force=True replaces it")
        partial = self.directory / f"{_name(step)}.partial"
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            if partial.exists():  # left by a run that was killed
                partial.rmtree()
            partial.mkdir()
            (partial / "meta.json").write_text(text)
        _sync("checkpoint folder")
        if self._orbax is None:
            self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        saves = {
            name: ocp.args.PyTreeSave(_owned(item), jax.tree.map(_chunks, item))
            for name, item in items.items()
        }
        self._orbax.save(partial / "state", args=ocp.args.Composite(**saves))
        self._pending = self._pool.submit(
            self._commit, step, partial, _manifest(step, state, items)
        )

    def wait(self) -> None:
        """Returns when the save under way is complete; raises what it failed with."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
            _sync("checkpoint complete")

    def close(self) -> None:
        """Waits, raises what the last save failed with, and frees the threads."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            if self._orbax is not None:
                self._orbax.close()

    def __enter__(self) -> Checkpointer:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def restore(self, target: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The state, laid out as ``target``, and its meta.

        ``target`` has the form that was saved, its leaves arrays or ShapeDtypeStructs with
        shardings (see `abstract`). Without ``step`` the newest sound checkpoint is taken; damaged
        ones are passed over with a warning that names the file. Raises DamagedCheckpoint where
        ``step`` is damaged or nothing sound is left, CheckpointError where there is none, where its
        arrays are not the target's, and for a target leaf without a sharding.
        """
        wanted = {
            item: {key: _placed(key, leaf) for key, leaf in leaves.items()}
            for item, leaves in _items(target).items()
        }
        path, manifest = self._choose(step)
        _compare(path, manifest["arrays"], _arrays(wanted))
        found = _read(path, wanted)
        leaves = [found[key] for key in _names_in_order(target)]
        return jax.tree.unflatten(jax.tree.structure(target), leaves), _meta(path)

    def restore_params(self, target: Any = None, step: int | None = None) -> Any:
        """The weights alone, laid out as ``target``, or as a nested dict on the first device."""
        path, manifest = self._choose(step)
        saved = {k: v for k, v in manifest["arrays"].items() if k.split("/")[0] == "params"}
        if target is None:
            one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            flat = {
                key: jax.ShapeDtypeStruct(shape, dtype, sharding=one)
                for key, (shape, dtype) in saved.items()
            }
            found = _read(path, {"params": flat})
            return _nested((manifest["paths"][key], array) for key, array in found.items())
        flat = {key: _placed(key, leaf) for key, leaf in _flat(target, "params").items()}
        _compare(path, saved, _arrays({"params": flat}))
        found = _read(path, {"params": flat})
        return jax.tree.unflatten(jax.tree.structure(target), [found[key] for key in flat])

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """The meta of the checkpoint that `restore` would take."""
        return _meta(self._choose(step)[0])

    def _commit(self, step: int, partial: epath.Path, manifest: dict[str, Any]) -> None:
        """Background: waits for Orbax, writes the manifest, gives the name, deletes the old."""
        assert self._orbax is not None
        self._orbax.wait_until_finished()
        if jax.process_index() != 0:
            return
        manifest["files"] = {
            str(p.relative_to(partial)): [p.stat().length, _crc(p)] for p in _files(partial)
        }
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
        final, replaced = self.directory / _name(step), self.directory / f"{_name(step)}.replaced"
        if final.exists():
            if replaced.exists():
                replaced.rmtree()
            final.rename(replaced)
        partial.rename(final)
        kept = {_name(s) for s in self.steps()[-self.keep :]} | {final.name}
        for path in self.directory.iterdir():
            if path.is_dir() and _STEP.match(path.name) and path.name not in kept:
                path.rmtree()

    def _choose(self, step: int | None) -> tuple[epath.Path, dict[str, Any]]:
        """Folder and manifest of ``step``, or of the newest sound checkpoint."""
        self.wait()
        there = self.steps()
        steps = there if step is None else [s for s in there if s == step]
        if not steps:
            raise CheckpointError(
                f"no checkpoint{'' if step is None else f' of step {step}'} in {self.directory}; "
                f"steps there: {there or 'none'}"
            )
        faults: list[str] = []
        for candidate in reversed(steps):
            path = self.directory / _name(candidate)
            try:
                manifest = self._verify(path)
            except DamagedCheckpoint as error:
                faults.append(str(error))
                continue
            if faults:
                text = f"{'; '.join(faults)}. Taking the checkpoint of step {candidate} instead."
                warnings.warn(text, stacklevel=3)
            return path, manifest
        raise DamagedCheckpoint(f"no sound checkpoint is left: {'; '.join(faults)}")

    def _verify(self, path: epath.Path) -> dict[str, Any]:
        """The manifest; raises DamagedCheckpoint naming the first file that disagrees with it."""
        file = path / "manifest.json"
        if not file.exists():
            raise DamagedCheckpoint(f"{file} is missing")
        try:
            manifest: dict[str, Any] = json.loads(file.read_text())
            files = {name: (size, crc) for name, (size, crc) in manifest["files"].items()}
            for key in manifest["paths"]:
                jax.ShapeDtypeStruct(*manifest["arrays"][key])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedCheckpoint(f"{file} is damaged: {error!r}") from error
        try:
            for name, (size, crc) in files.items():
                self._verify_file(path / name, size, crc)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{path} {_VANISHED}") from error
        return manifest

    def _verify_file(self, file: epath.Path, size: int, crc: int) -> None:
        if not file.exists():
            raise DamagedCheckpoint(f"{file} is missing")
        if (found := file.stat().length) != size:
            raise DamagedCheckpoint(f"{file} has {found} bytes, {size} were written")
        if self.checksum and _crc(file) != crc:
            raise DamagedCheckpoint(f"{file} is damaged: its checksum is not the one written")


def restore_params(where: epath.PathLike, target: Any = None) -> Any:
    """Weights from ``DIR`` (newest) or ``DIR:step``; see `Checkpointer.restore_params`."""
    directory, step = split_step(where)
    with Checkpointer(directory) as checkpointer:
        return checkpointer.restore_params(target, step)


@dataclasses.dataclass(frozen=True)
class SavedParams:
    """The weights of the checkpoint in folder ``path``, still in their files.

    ``arrays`` has their shapes and dtypes by dotted name (``layers.0.mlp.up``).
    """

    path: epath.Path
    arrays: dict[str, jax.ShapeDtypeStruct]
    flat_names: dict[str, str]
    context: ts.Context

    def blocks(self, name: str, entry: int | None = None) -> Iterator[np.ndarray]:
        """Array ``name``, or entry ``entry`` of its first dimension, some rows at a time.

        Nothing else is read, and no more at a time than about ``_CHUNK_BYTES`` or the rows that
        were stored as one piece. Raises DamagedCheckpoint, also where it was deleted meanwhile.
        """
        folder = str(self.path / "state" / "params")
        base = folder if "://" in folder else f"file://{folder}"
        store = {"driver": "ocdbt", "base": f"{base}/", "path": f"{self.flat_names[name]}/"}
        try:
            spec = {"driver": "zarr", "kvstore": store}
            array = ts.open(spec, context=self.context, read=True).result()
            piece = [size or 1 for size in array.chunk_layout.read_chunk.shape or ()]
            if entry is not None:
                array, piece = array[entry], piece[1:]
            if not array.rank:
                yield self._content(array)
                return
            piece_bytes = piece[0] * math.prod(array.shape[1:]) * array.dtype.numpy_dtype.itemsize
            step = piece[0] * max(1, _CHUNK_BYTES // max(1, piece_bytes))
            for row in range(0, array.shape[0], step):
                yield self._content(array[row : min(row + step, array.shape[0])])
        except (ValueError, FileNotFoundError) as error:
            if isinstance(error, FileNotFoundError) or str(error).startswith("NOT_FOUND"):
                raise DamagedCheckpoint(f"{self.path} {_VANISHED}") from error
            raise DamagedCheckpoint(f"{folder}: {self.flat_names[name]}: {error}") from error

    def _content(self, array: ts.TensorStore) -> np.ndarray:
        """All of it. Without the database's own manifest, absent pieces would be read as zeros."""
        content: np.ndarray = array.read().result()
        (self.path / "state" / "params" / "manifest.ocdbt").stat()
        return content


def open_params(where: epath.PathLike) -> SavedParams:
    """The weights of ``DIR`` (newest) or ``DIR:step``, checked as for a restore, but not read."""
    directory, step = split_step(where)
    with Checkpointer(directory) as checkpointer:
        path, manifest = checkpointer._choose(step)
    names = {key: ".".join(map(str, keys)) for key, keys in manifest["paths"].items()}
    arrays = {name: jax.ShapeDtypeStruct(*manifest["arrays"][key]) for key, name in names.items()}
    one = ts.Context({key: {"limit": 1} for key in _CONCURRENCY})  # each thread keeps some pieces
    return SavedParams(path, arrays, {name: key for key, name in names.items()}, one)


def split_step(where: epath.PathLike) -> tuple[epath.PathLike, int | None]:
    """``DIR`` or ``DIR:step`` as folder and step."""
    match = re.fullmatch(r"(.+):(\d+)", str(where))
    return (match[1], int(match[2])) if match else (where, None)


def abstract(tree: Any, sharding: Any = None) -> Any:
    """The tree as ShapeDtypeStructs, with ``sharding`` (one, or a tree of them) or its own.

    Shapes from ``jax.eval_shape`` have none of their own, so they need ``sharding``.
    """

    def one(leaf: Any, wanted: Any = sharding) -> jax.ShapeDtypeStruct:
        placed = getattr(leaf, "sharding", None) if wanted is None else wanted
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(one, tree)
    return jax.tree.map(one, tree, sharding)


def _name(step: int) -> str:
    return f"{step:08d}"


def _meta(path: epath.Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
    return meta


def _flat(tree: Any, root: str) -> dict[str, Any]:
    """Flat names to leaves, in leaf order; the root alone names a tree that is one leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join([root, *map(str, _keys(path))]): leaf for path, leaf in leaves}


def _keys(path: Any) -> list[str | int]:
    """Dict keys, indices and field names of a leaf's path."""
    return [getattr(k, "key", getattr(k, "idx", getattr(k, "name", str(k)))) for k in path]


def _trees(state: Any) -> tuple[TrainState, dict[str, Any]]:
    if isinstance(state, Mapping):
        return state["state"], {k: v for k, v in state.items() if k != "state"}
    return state, {}


def _items(state: Any) -> dict[str, dict[str, Any]]:
    """Flat names to leaves, by Orbax item."""
    own, more = _trees(state)
    rest = _flat(own.opt_state, "opt_state") | _flat(own.step, "step")
    for name, tree in more.items():
        rest |= _flat(tree, f"more/{name}")
    return {"params": _flat(own.params, "params"), "rest": rest}


def _names_in_order(state: Any) -> list[str]:
    """The flat names in the order of the state's own leaves."""
    own, more = _trees(state)
    items = _items(own)
    names = [*items["params"], *items["rest"]]
    trees = {name: list(_flat(tree, f"more/{name}")) for name, tree in more.items()}
    if isinstance(state, Mapping):  # dicts flatten by sorted key
        return [n for key in sorted(state) for n in (names if key == "state" else trees[key])]
    return names


def _arrays(items: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What a manifest says of each array: shape and dtype."""
    return {
        key: [list(leaf.shape), str(leaf.dtype)]
        for item in items.values()
        for key, leaf in item.items()
    }


def _manifest(step: int, state: Any, items: Mapping[str, Any]) -> dict[str, Any]:
    """All but the files: shapes, and where each weight belongs in the nested dict of weights."""
    leaves = jax.tree_util.tree_leaves_with_path(_trees(state)[0].params)
    paths = {name: _keys(path) for name, (path, _) in zip(items["params"], leaves, strict=True)}
    return {"step": step, "arrays": _arrays(items), "paths": paths}


def _nested(flat: Iterable[tuple[list[str | int], Any]]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, leaf in flat:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def _read(path: epath.Path, wanted: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Arrays by flat name, with the wanted shapes and shardings."""
    restores = {
        item: ocp.args.PyTreeRestore(
            item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
        )
        for item, tree in wanted.items()
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        found = reader.restore(path / "state", args=ocp.args.Composite(**restores))
    return {key: array for item in wanted for key, array in found[item].items()}


def _owned(item: dict[str, Any]) -> dict[str, Any]:
    """Copies on CPU devices: Orbax holds views there, which would keep JAX from donating."""
    if jax.process_count() > 1 or jax.default_backend() != "cpu":
        return item
    return {key: jax.device_put(np.array(x), x.sharding) for key, x in item.items()}


def _placed(key: str, leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        raise CheckpointError(
            f"restore target {key} has no sharding; say where it shall lie, for "
            "example with checkpoint.abstract(tree, sharding)"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _compare(path: epath.Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key in sorted(saved.keys() | wanted.keys()):
        old, new = saved.get(key, "nothing"), wanted.get(key, "nothing")
        if old != new:
            raise CheckpointError(
                f"{path}: array {key} was saved as {old} (shape, dtype), the target wants {new}; "
                "is it another model or optimizer?"
            )


def _files(path: epath.Path) -> list[epath.Path]:
    found: list[epath.Path] = []
    for part in sorted(path.iterdir()):
        found += _files(part) if part.is_dir() else [part]
    return found


def _crc(path: epath.Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def _chunks(leaf: Any) -> ocp.SaveArgs:
    """Pieces in which a large array is stored: what is stacked first, so that one can be read."""
    large = leaf.size * leaf.dtype.itemsize > _CHUNK_BYTES
    return ocp.SaveArgs(
        chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,) if large and leaf.ndim > 2 else ()
    )


def _sync(name: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
