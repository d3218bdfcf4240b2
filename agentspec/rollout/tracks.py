"""The scheduler's records: tracks, requests, what is shared, and plans of device work.

Pure host records, made and changed by ``scheduler``; ``device`` reads the plans.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from agentspec.types import Mode, SamplingParams

Key = bytes
ROOT = b"root"


@dataclasses.dataclass(eq=False)
class Prefix:
    """What was read up to the end of a segment: pages of the first ``n`` ids, and the state."""

    key: Key
    n: int
    pages: list[int]
    state: int | None
    users: int = 0
    root: bool = False  # kept for later opens of the same prompt
    reader: Any = None  # the track that read it


@dataclasses.dataclass(eq=False)
class Saved:
    """A track's part of the cache on the host: ``box`` is filled as the device work is done."""

    box: dict[str, Any]
    n_pages: int
    has: tuple[str, ...]  # of "state", "base", "prefix": which states are in the box
    prefix: tuple[Key, int, bool] | None  # key, n, root


@dataclasses.dataclass(eq=False)
class Track:
    """One sequence: host-side ids, and which of them the cache holds."""

    mode: Mode
    ids: list[int]
    seed: int
    born: int
    fresh: int = 0  # ids appended since the last sample, inherited ones included
    borders: list[int] = dataclasses.field(default_factory=list)  # where reading is cut by forks
    cached: int = 0  # how many ids the pages hold; at most len(ids) - 1 between samples
    pages: list[int] = dataclasses.field(default_factory=list)
    state: int | None = None
    key: Key = ROOT  # of the first ``cached`` ids; empty: like no other
    prefix: Prefix | None = None
    shared: int = 0  # whole pages that a family reads together
    saved: Saved | None = None  # instead of places
    request: Request | None = None
    closed: bool = False


@dataclasses.dataclass(eq=False)
class Request:
    """One ``sample``: what to draw, how far it has come, and whom to tell."""

    track: Track
    params: SamplingParams
    budget: int
    future: Any
    ids: list[int] = dataclasses.field(default_factory=list)
    logps: list[float] = dataclasses.field(default_factory=list)
    entropies: list[float] = dataclasses.field(default_factory=list)
    base: int | None = None  # the state before the first token, while it samples
    started: bool = False


@dataclasses.dataclass(frozen=True)
class Span:
    """Read ``ids`` of a track from position ``start`` on; slots of its state before and after."""

    pages: tuple[int, ...]
    start: int
    ids: tuple[int, ...]
    source: int
    target: int


@dataclasses.dataclass(eq=False)
class Row:
    """One row of a decode call."""

    request: Request
    pages: tuple[int, ...]
    family: tuple[int, ...]  # the pages that are read together
    source: int
    target: int


@dataclasses.dataclass
class Plan:
    """Device work in order: ``work`` is (what, arguments); then a decode call for ``rows``.

    While it is made, ``reads`` (spans by track) and then ``copies`` wait to become work.
    """

    mode: Mode
    work: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    rows: list[Row] = dataclasses.field(default_factory=list)
    ready: list[Request] = dataclasses.field(default_factory=list)
    reads: dict[Track, list[Span]] = dataclasses.field(default_factory=dict)
    copies: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    pinned: list[int] = dataclasses.field(default_factory=list)  # places to give back when made
    pinned_states: list[int] = dataclasses.field(default_factory=list)

    def flush(self) -> None:
        """What is to be read and copied so far comes before what follows."""
        if self.reads:
            self.work.append(("read", list(self.reads.values())))
        if self.copies:
            self.work.append(("copy", self.copies))
        self.reads, self.copies = {}, []


def history(before: Key, how: str, ids: Sequence[int]) -> Key:
    """Names a history: what was before, and these ids read as a segment or sampled."""
    if not before:
        return b""
    packed = struct.pack(f"<{len(ids)}I", *ids)
    return hashlib.blake2b(before + how[:1].encode() + packed, digest_size=16).digest()
