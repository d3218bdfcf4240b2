"""Safetensors folders, one tensor at a time: what is in them, parts of them, and new ones.

In: a folder with ``model.safetensors``, or shards and their index. Out: ``Stored`` tensors, read
when asked and only as far as asked; and the other way round, folders written from blocks of rows.
Neither ever holds more than one block, or one tensor's wanted part, in memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
BLOCK_BYTES = 1 << 25

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Readable(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape there."""

    @property
    def dtype(self) -> np.dtype:
        """Its dtype there."""

    def read(self, cut: Sequence[slice] = (), dtype: Any = None) -> np.ndarray:
        """Returns the part ``cut`` of it (all where a dimension is not named) as ``dtype``."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, its bytes beginning at ``offset``."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, cut: Sequence[slice] = (), dtype: Any = None) -> np.ndarray:
        """Returns the part ``cut`` of it, cast to ``dtype``, through a map of a block at a time.

        Mapped pages count as this process's memory for as long as the map is open, so no map is
        larger than a block of rows, and each is closed before the next.
        """
        shape = self.shape or (1,)
        cuts = (*cut, *(slice(None),) * (len(shape) - len(cut)))
        ranges = [range(*one.indices(size)) for one, size in zip(cuts, shape, strict=True)]
        out = np.empty([len(part) for part in ranges], self.dtype if dtype is None else dtype)
        if out.size:
            row_bytes = math.prod(shape[1:]) * self.dtype.itemsize
            step, first = max(1, BLOCK_BYTES // row_bytes), ranges[0].start
            for row in range(first, ranges[0].stop, step):
                n_rows = min(step, ranges[0].stop - row)
                at = self.offset + row * row_bytes
                block = np.memmap(self.file, np.uint8, "r", at, (n_rows * row_bytes,))
                rows = block.view(self.dtype).reshape(n_rows, *shape[1:])
                out[row - first : row - first + n_rows] = rows[(slice(None), *cuts[1:])]
        return out if self.shape else out.reshape(())

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields its rows in order, a block at a time."""
        if not self.shape:
            yield self.read()
            return
        step = max(1, BLOCK_BYTES // max(1, math.prod(self.shape[1:]) * self.dtype.itemsize))
        for row in range(0, self.shape[0], step):
            yield self.read([slice(row, row + step)])


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A tensor to be written; ``blocks()`` yields its rows in order, in arrays of its dtype."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, Stored]:
    """Returns what ``file`` holds, by name, having read its header only.

    Raises:
        ValueError: naming a file that is damaged, and tensors of a dtype that is not read.
    """
    try:
        with safe_open(file, framework="np"):
            pass  # checks header and length
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    odd = sorted(f"{n} ({e['dtype']})" for n, e in header.items() if e["dtype"] not in _DTYPES)
    if odd:
        raise ValueError(f"{file}: only {', '.join(_DTYPES)} are read, got {', '.join(odd)}")
    return {
        name: Stored(
            file,
            _DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            8 + size + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def read_folder(folder: Path) -> dict[str, Stored]:
    """Returns the tensors of a folder, by name: of its index's files, or of its only one.

    Raises:
        FileNotFoundError: where there are none, or the index names a file that is not there.
        ValueError: for damaged files, for tensors that lie elsewhere than the index says, or in
            more than one file.
    """
    weight_map, files = {}, ["model.safetensors"]
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map", {})
        named = weight_map.values() if isinstance(weight_map, dict) else [weight_map]
        if odd := [file for file in named if type(file) is not str or Path(file).name != file]:
            raise ValueError(f"{folder / INDEX}: weight_map names {odd[0]!r}, not a file beside it")
        files = sorted(set(named))
        absent = [file for file in files if not (folder / file).is_file()]
        if absent:
            raise FileNotFoundError(f"{folder / INDEX} names absent files: {', '.join(absent)}")
    elif not (folder / files[0]).is_file():
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor {INDEX}")
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_header(folder / file).items():
            if weight_map.get(name, file) != file or name in tensors:
                where = weight_map.get(name, "another file")
                raise ValueError(f"{folder / file} holds {name}, which belongs to {where}")
            tensors[name] = stored
    lost = sorted(weight_map.keys() - tensors.keys())
    if lost:
        raise ValueError(f"{folder / INDEX} lists tensors that no file holds: {', '.join(lost)}")
    return tensors


def write_folder(
    folder: Path,
    tensors: Sequence[Outgoing],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    written: Callable[[int], None] = lambda _: None,
) -> None:
    """Writes ``tensors``, in shards of up to ``max_shard_bytes``, with an index if more than one.

    The index is built from the headers of the finished files. ``written`` is told how many tensors
    are done.
    """
    shards: list[list[Outgoing]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    done = 0
    for file, shard in zip(files, shards, strict=True):
        for _ in _write(folder / file, shard):
            done += 1
            written(done)
    if len(files) > 1:
        found = [stored for file in files for stored in read_header(folder / file).items()]
        index = {
            "metadata": {"total_size": sum(stored.nbytes for _, stored in found)},
            "weight_map": {name: stored.file.name for name, stored in found},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(file: Path, tensors: Sequence[Outgoing]) -> Iterator[str]:
    """Writes one file, header first; yields each tensor's name when it is in it."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # so each lies aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            n_bytes = 0
            for block in tensor.blocks():
                assert block.dtype == tensor.dtype, f"{tensor.name}: {block.dtype}"
                rows = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
                n_bytes += opened.write(rows.data)
            assert n_bytes == tensor.nbytes, f"{tensor.name}: {n_bytes} of {tensor.nbytes} bytes"
            yield tensor.name
    partial.replace(file)


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in ``file``; raises ValueError naming it for anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content
