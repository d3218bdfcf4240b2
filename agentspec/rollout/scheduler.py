"""Who sits in which cache row and what the device does next. Pure host logic: no JAX, no asyncio.

In: tracks (sequences as the scheduler sees them) and requests to sample. Out: a ``Plan`` for one
pool: waves of row copies and prefills, then one decode call over all rows of the pool.

A fork is lazy: the child names its parent and how many of the parent's ids it shares, and copies
the parent's row when it first samples. Until then the parent's row stays, closed or not. A parent
that has no row yet is prefilled once and then copied. Agent tracks never descend from speculator
tracks, so agent rows never wait for speculator rows.

Nobody waits for ever for speculator rows that only wait themselves: a rowless parent is given a row
only together with its child; idle finished tracks lose theirs to those who need one; and when rows
are short a child takes its rowless parent's place, or its idle parent's row instead of a copy.

A row of keys and values holds every prefix of what it holds. A row with a recurrent state in it
(hybrid models, ``stateful``) holds exactly the tokens that it has read: it is of use to a child
only as long as it stands where the child begins, and a track taken back reads its ids anew.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from agentspec.types import Mode, SamplingParams


@dataclasses.dataclass(eq=False)
class Pool:
    """Cache rows of one mode, and the requests that use or await them."""

    mode: Mode
    n_rows: int
    evicts: bool  # may take the row of an idle, finished track when short of rows
    free: list[int] = dataclasses.field(default_factory=list)
    queue: list[Request] = dataclasses.field(default_factory=list)  # first in, first out
    active: list[Request] = dataclasses.field(default_factory=list)
    seated: list[Track] = dataclasses.field(default_factory=list)  # have a row; oldest first

    def __post_init__(self) -> None:
        self.free = list(range(self.n_rows))


@dataclasses.dataclass(eq=False)
class Track:
    """One sequence: host-side ids, and which of them the cache holds."""

    pool: Pool
    ids: list[int]
    seed: int
    parent: Track | None = None  # whose row holds our first ids until we have a row of our own
    shared: int = 0  # how many ids to take over from the parent's row
    cached: int = 0  # how many ids our own row holds; at most len(ids) - 1
    row: int | None = None
    fresh: int = 0  # ids appended since the last sample, inherited ones included
    waiting: list[Track] = dataclasses.field(default_factory=list)  # children yet to copy
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


@dataclasses.dataclass(frozen=True)
class Copy:
    """Copy row ``source_row`` of one pool over ``target_row`` of another or the same."""

    source: Pool
    source_row: int
    target: Pool
    target_row: int


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Put ``ids`` into a row from position ``start`` on."""

    pool: Pool
    row: int
    start: int
    ids: tuple[int, ...]


@dataclasses.dataclass
class Wave:
    """Device work whose parts do not depend on each other: first the copies, then the prefills."""

    copies: list[Copy] = dataclasses.field(default_factory=list)
    prefills: list[Prefill] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Plan:
    """Work for the device: the waves in order, then a decode call for ``requests``."""

    pool: Pool
    waves: list[Wave] = dataclasses.field(default_factory=list)
    requests: list[Request] = dataclasses.field(default_factory=list)
    decode_rows: list[int] = dataclasses.field(default_factory=list)  # of the requests
    ready: dict[Track, int] = dataclasses.field(default_factory=dict)  # wave that fills its row
    sources: dict[Track, int] = dataclasses.field(default_factory=dict)  # last wave that copies it
    vacated: list[tuple[Pool, int]] = dataclasses.field(default_factory=list)

    def wave(self, index: int) -> Wave:
        """The wave of that index, made when needed."""
        while len(self.waves) <= index:
            self.waves.append(Wave())
        return self.waves[index]


class Scheduler:
    """Rows, queues and lineage of the two pools."""

    def __init__(self, rows: int, speculator_rows: int, stateful: bool = False) -> None:
        """Makes the pools; ValueError for row counts that could never serve a request."""
        self.stateful = stateful
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        if speculator_rows == 1 or speculator_rows < 0:
            raise ValueError(
                f"speculator_rows must be 0 (no speculator) or at least 2, got {speculator_rows}: "
                "a suffix that is shared by several candidates needs a row beside theirs"
            )
        self.pools: dict[Mode, Pool] = {
            "agent": Pool("agent", rows, evicts=False),
            "speculator": Pool("speculator", speculator_rows, evicts=True),
        }

    def fork(self, parent: Track, pool: Pool, seed: int) -> Track:
        """A child that shares all of the parent's ids but the last, which it feeds itself."""
        if pool.mode == "agent" and parent.pool.mode == "speculator":
            raise ValueError("a speculator sequence cannot be forked in mode 'agent'")
        child = Track(pool, list(parent.ids), seed, fresh=parent.fresh)
        if len(parent.ids) > 1:
            child.parent, child.shared = parent, len(parent.ids) - 1
            parent.waiting.append(child)
        return child

    def rewind(self, track: Track, length: int) -> None:
        """Cuts the track to its first ``length`` ids; children keep theirs, and share less."""
        kept = max(length - 1, 0)
        track.fresh = max(0, track.fresh - (len(track.ids) - length))
        del track.ids[length:]
        track.cached = self._usable(track, kept)
        track.shared = min(track.shared, kept)
        for child in track.waiting:
            child.shared = min(child.shared, kept)

    def close(self, track: Track) -> None:
        """Ends a track: its row goes when no child waits for it."""
        track.closed = True
        if track.request is not None:
            self.withdraw(track.request)
            track.request = None
        self._leave(track, None)

    def withdraw(self, request: Request) -> None:
        """Takes a request out of its queue or out of the running batch."""
        pool = request.track.pool
        if self.stateful and (request.ids or request in pool.active):
            request.track.cached = 0  # its row went on beyond what it keeps
        for requests in (pool.queue, pool.active):
            if request in requests:
                requests.remove(request)

    def seated(self) -> list[Track]:
        """All tracks that hold a row."""
        return [track for pool in self.pools.values() for track in pool.seated]

    def plan(self, pool: Pool) -> Plan | None:
        """Seats queued requests as rows allow and returns the pool's next work; None: nothing.

        First in, first out, but a request that needs fewer rows (its parent has one already) may
        go before one that needs more: without that, parents could hold all rows for ever.
        """
        plan = Plan(pool)
        for request in list(pool.queue):
            if self._seat(request.track, plan):
                pool.queue.remove(request)
                pool.active.append(request)
        for owner, row in plan.vacated:  # only now: this plan's copies still read those rows
            owner.free.append(row)
        for request in pool.active:
            assert request.track.row is not None
            plan.requests.append(request)
            plan.decode_rows.append(request.track.row)
        return plan if plan.requests else None

    def _seat(self, track: Track, plan: Plan) -> bool:
        """Gives ``track`` a row with all its ids but the last; False when rows are short."""
        lineage = [track]  # from the track up to the first ancestor that has a row
        while lineage[-1].row is None:
            while _may_promote(lineage[-1]) and _is_spent(lineage[-1].parent):
                _promote(lineage[-1])
            parent = lineage[-1].parent
            if parent is None:
                break
            lineage.append(parent)
        needed = collections.Counter(t.pool for t in lineage if t.row is None)
        heir = lineage[-2] if len(lineage) > 1 else None
        takes_over = heir is not None and _may_take_over(heir, rows_short=False)
        victims = self._victims(needed, heir if takes_over else None, lineage, plan)
        if victims is None and heir is not None and _may_take_over(heir, rows_short=True):
            takes_over = True
            victims = self._victims(needed, heir, lineage, plan)
        if victims is None:
            promoted = next(filter(_may_promote, lineage), None)
            if promoted is None:
                return False
            _promote(promoted)
            return self._seat(track, plan)
        for victim in victims:
            assert victim.row is not None
            victim.pool.free.append(victim.row)
            _unseat(victim)
        for ancestor, child in zip(lineage[:0:-1], lineage[-2::-1], strict=True):
            self._fill(ancestor, child.shared, takes_over and ancestor is heir, plan)
        self._fill(track, len(track.ids) - 1, takes_over and track is heir, plan)
        return True

    def _victims(
        self, needed: Mapping[Pool, int], heir: Track | None, keep: list[Track], plan: Plan
    ) -> list[Track] | None:
        """Idle tracks to turn out so that the needed rows are free; None when they cannot be.

        ``heir`` needs no free row, since it takes its parent's.
        """
        victims: list[Track] = []
        for pool, n_rows in needed.items():
            missing = n_rows - len(pool.free) - (heir is not None and heir.pool is pool)
            idle = [
                track
                for track in pool.seated
                if pool.evicts
                and track.request is None
                and not track.waiting
                and not (track in keep or track in plan.sources or track in plan.ready)
            ]
            if missing > len(idle):
                return None
            victims += idle[: max(missing, 0)]
        return victims

    def _fill(self, track: Track, n_needed: int, takes_over: bool, plan: Plan) -> None:
        """Gives the track a row if it has none; plans what puts its first ``n_needed`` ids there.

        What is read at all is read up to the last id but one, so that a prompt is cut into the
        same chunks whether its owner or a child asked first.
        """
        wave = plan.ready.get(track, 0)
        if track.row is None:
            parent = track.parent
            if takes_over:
                _take_over(track, self._usable)
                wave = len(plan.waves)  # after every copy that reads this row
                plan.ready[track] = wave
            else:
                track.row = track.pool.free.pop(0)
                if parent is not None:
                    assert parent.row is not None
                    wave = plan.ready[parent] + 1 if parent in plan.ready else 0
                    copy = Copy(parent.pool, parent.row, track.pool, track.row)
                    track.cached = self._usable(parent, track.shared)
                    if track.cached or not self.stateful:
                        plan.wave(wave).copies.append(copy)
                        plan.sources[parent] = max(wave, plan.sources.get(parent, 0))
                        plan.ready[track] = wave
            track.pool.seated.append(track)
            self._leave(track, plan)
        assert track.row is not None
        target = len(track.ids) - 1
        if track.cached < min(n_needed, target):
            if self.stateful:  # reading on takes the row beyond what children still have to copy
                wave = max(wave, plan.sources.get(track, 0))
            ids = tuple(track.ids[track.cached : target])
            plan.wave(wave).prefills.append(Prefill(track.pool, track.row, track.cached, ids))
            plan.ready[track] = wave
            track.cached = target

    def _usable(self, track: Track, length: int) -> int:
        """How many of the first ``length`` ids the track's row can serve, to itself or a child."""
        request = track.request
        moved = request is not None and request.ids  # the row is beyond what ``cached`` says
        if self.stateful and (moved or track.cached != length):
            return 0
        return min(track.cached, length)

    def _leave(self, track: Track, plan: Plan | None) -> None:
        """Ends the tie to the parent if there is one to end, and frees what nobody needs."""
        if not track.waiting and track.closed and track.row is not None:
            if plan is None:
                track.pool.free.append(track.row)
            else:
                plan.vacated.append((track.pool, track.row))
            _unseat(track)
        gone = track.closed and not track.waiting
        parent = track.parent
        if parent is not None and (gone or track.row is not None):
            parent.waiting.remove(track)
            track.parent = None
            self._leave(parent, plan)


def _may_take_over(heir: Track, *, rows_short: bool) -> bool:
    """Whether the track may have its parent's row instead of a copy.

    Always when the parent is closed and has no other child. When rows are short, also with
    siblings (which then share the heir's row), and from an idle open parent where the pool evicts.
    """
    parent = heir.parent
    if parent is None or parent.row is None or parent.pool is not heir.pool:
        return False
    if parent.request is not None:
        return False
    if rows_short:
        return parent.closed or heir.pool.evicts
    return _is_spent(parent)


def _is_spent(track: Track | None) -> bool:
    """Whether a track is of use to one last child only."""
    return track is not None and track.closed and len(track.waiting) == 1


def _may_promote(track: Track) -> bool:
    """Whether the track may take its rowless parent's place.

    Not when the parent will be seated for a request of its own, nor across pools, whose shapes and
    so whose last bits differ.
    """
    parent = track.parent
    return (
        parent is not None
        and parent.row is None
        and parent.request is None
        and parent.pool is track.pool
    )


def _promote(track: Track) -> None:
    """Puts the track in the place of its parent, which has no row: one row fewer is needed.

    What the parent would have read for its children is read by the track, and its siblings share
    the track's row.
    """
    parent = track.parent
    assert parent is not None and parent.row is None
    for sibling in [child for child in parent.waiting if child is not track]:
        sibling.parent, sibling.shared = track, min(sibling.shared, track.shared)
        track.waiting.append(sibling)
    parent.waiting = []
    track.parent, track.shared = parent.parent, min(track.shared, parent.shared)
    if track.parent is not None:
        track.parent.waiting.append(track)
        if parent.closed:
            track.parent.waiting.remove(parent)
            parent.parent = None


def _take_over(heir: Track, usable: Callable[[Track, int], int]) -> None:
    """Moves the parent's row to ``heir``, and the ties of its other children with it."""
    parent = heir.parent
    assert parent is not None
    heir.row, heir.cached = parent.row, usable(parent, heir.shared)
    siblings = [child for child in parent.waiting if child is not heir]
    for sibling in siblings:
        sibling.parent, sibling.shared = heir, min(sibling.shared, heir.cached)
    heir.waiting += siblings
    heir.parent, parent.waiting = None, []
    _unseat(parent)


def _unseat(track: Track) -> None:
    """The track has no row any more; if it samples again it reads its ids anew."""
    track.pool.seated.remove(track)
    track.row, track.cached = None, 0
