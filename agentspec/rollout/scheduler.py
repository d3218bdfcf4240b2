"""Which sequence holds which pages, and what the device does next. Pure host logic: no JAX.

In: tracks (sequences as the scheduler sees them) and requests to sample. Out: a ``Plan`` for one
mode: device work in order. Tracks hold pages, not rows: a row is taken for one device call.

A fork shares its parent's pages and copies the last, partly filled one before it writes there. What
the parent has yet to read is read once: tracks with the same history that read the same ids next
share the result (`Prefix`), and so do prompts that are opened anew. A history is what determines a
cache bit for bit: ids, and which of them were read as which segment or sampled.

When pages run out: prompts kept for reuse go first, then idle speculator sequences are saved on the
host, the youngest sampling one is dropped, and agent sequences are saved, idle ones first, the
youngest first. A saved track goes on with the same bits. New work waits.

A recurrent state (hybrid models) cannot be cut back. A call reads one slot and writes another, so
what is shared stays; a track that goes back starts from the last segment it read, or from nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from agentspec.rollout.pages import Places
from agentspec.rollout.tracks import (
    ROOT,
    Key,
    Plan,
    Prefix,
    Request,
    Row,
    Saved,
    Span,
    Track,
    history,
)
from agentspec.types import Mode


class Scheduler:
    """Pages, states, queues and histories."""

    def __init__(
        self,
        *,
        rows: dict[Mode, int],
        pages: int,
        page_tokens: int,
        states: int,
        span_tokens: int,
        step_tokens: int,
        on_drop: Callable[[Request], None],
    ) -> None:
        """``states`` 0: no recurrent state. ``on_drop`` hears of a request that was dropped."""
        self.rows, self.page_tokens = rows, page_tokens
        self.pages, self.states = Places(pages), Places(states)
        self.stateful = states > 0
        self.span_tokens, self.step_tokens = span_tokens, step_tokens
        self.queue: dict[Mode, list[Request]] = {mode: [] for mode in rows}
        self.active: dict[Mode, list[Request]] = {mode: [] for mode in rows}
        self.counts: collections.Counter[str] = collections.Counter()
        self._tracks: dict[int, Track] = {}  # open ones, by age
        self._prefixes: collections.OrderedDict[Key, Prefix] = collections.OrderedDict()
        self._born, self._on_drop = 0, on_drop

    # -- tracks ----------------------------------------------------------------------------------

    def open(self, mode: Mode, ids: Sequence[int], seed: int) -> Track:
        """A track that holds nothing yet."""
        track = Track(mode, list(ids), seed, self._born, fresh=len(ids))
        self._tracks[self._born] = track
        self._born += 1
        return track

    def fork(self, parent: Track, mode: Mode, seed: int) -> Track:
        """A child with the parent's ids (those before a sample under way) and its pages."""
        if mode == "agent" and parent.mode == "speculator":
            raise ValueError("a speculator sequence cannot be forked in mode 'agent'")
        child = self.open(mode, parent.ids, seed)
        child.fresh, n = parent.fresh, max(len(parent.ids) - 1, 0)
        child.borders = [b for b in parent.borders if b > parent.cached] + [n]
        if mode == "speculator":
            child.shared = parent.shared or n // self.page_tokens
        child.saved = parent.saved
        request = parent.request
        cached, state = min(parent.cached, n), parent.state
        if self.stateful and request is not None and request.started:
            state = request.base
        child.cached, child.key = cached, parent.key
        child.pages = parent.pages[: -(-cached // self.page_tokens)]
        self.pages.share(child.pages)
        if state is not None and cached:
            self.states.share([state])
            child.state = state
        self._use(child, parent.prefix)
        return child

    def rewind(self, track: Track, length: int) -> None:
        """Cuts the track to its first ``length`` ids."""
        n = max(length - 1, 0)
        track.fresh = max(0, track.fresh - (len(track.ids) - length))
        del track.ids[length:]
        track.borders = [b for b in track.borders if b < n]
        track.shared = min(track.shared, n // self.page_tokens)
        if n >= track.cached:
            return
        prefix = track.prefix
        if self.stateful:
            known = track.saved.prefix if track.saved is not None else None
            if prefix is not None and prefix.n <= n:
                self._adopt(track, prefix)
            elif known is not None and known[1] <= n:
                track.key, track.cached = known[:2]
            else:
                self._forget(track)
            return
        if track.saved is not None:
            track.cached = n
        else:
            self._cut(track, n)
        track.key = prefix.key if prefix is not None and prefix.n == n else b""
        if prefix is not None and prefix.n > n:
            self._use(track, None)
        if n == 0:
            track.key = ROOT

    def close(self, track: Track) -> None:
        """Ends a track and gives its places back."""
        if track.request is not None:
            self.withdraw(track.request)
            track.request = None
        track.closed = True
        self._forget(track)
        del self._tracks[track.born]

    def withdraw(self, request: Request) -> None:
        """Takes a request out; its track is as it was before it."""
        mode, track = request.track.mode, request.track
        for requests in (self.queue[mode], self.active[mode]):
            if request in requests:
                requests.remove(request)
        if self.stateful and request.started and track.saved is None:
            self._set_state(track, request.base)
            request.base = None
        request.started = False
        if track.saved is None:
            self._cut(track, track.cached)

    def complete(self, request: Request) -> None:
        """A request has all its tokens and needs no row any more."""
        self.active[request.track.mode].remove(request)

    def finish(self, request: Request) -> None:
        """Books the tokens of a complete request."""
        track = request.track
        if request.base is not None:
            self.states.give_back([request.base])
            request.base = None
        if track.saved is not None:
            kept = tuple(name for name in track.saved.has if name != "base")
            track.saved = dataclasses.replace(track.saved, has=kept)
        request.started = False
        key = history(track.key, "sampled", track.ids[track.cached :] + request.ids[:-1])
        track.ids += request.ids
        track.cached, track.key = len(track.ids) - 1, key
        track.borders, track.fresh = [], 0

    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return any(self.queue[mode] or self.active[mode] for mode in self.rows)

    def forget_prefixes(self) -> None:
        """Prompts kept for reuse go."""
        for prefix in list(self._prefixes.values()):
            if not prefix.users:
                self._drop_prefix(prefix)

    def forget_all(self) -> None:
        """No track holds anything any more: other weights. No request may be under way."""
        for track in self._tracks.values():
            self._forget(track)
        self.forget_prefixes()

    # -- planning --------------------------------------------------------------------------------

    def plan(self, mode: Mode) -> Plan | None:
        """The mode's next device work; None when there is none, or no page for it."""
        plan, active, queue = Plan(mode), self.active[mode], self.queue[mode]
        while queue and len(active) < self.rows[mode]:
            active.append(queue.pop(0))
        for request in sorted(active, key=lambda r: r.track.born):
            if request in active and self._ready(request, plan):
                plan.ready.append(request)
        plan.flush()
        self.pages.give_back(plan.pinned)
        self.states.give_back(plan.pinned_states)
        plan.rows = [self._row(request) for request in active if request in plan.ready]
        plan.rows.sort(key=lambda row: len(row.pages))  # neighbours read about as many pages
        for request in [r for r in active[::-1] if r not in plan.ready]:  # first in line again
            active.remove(request)
            queue.insert(0, request)
        return plan if plan.rows or plan.work else None

    def _ready(self, request: Request, plan: Plan) -> bool:
        """Plans all that the request needs before the decode call; False: it has to wait."""
        track, P = request.track, self.page_tokens
        n_ids = len(track.ids) + len(request.ids)
        steps = min(self.step_tokens, request.budget - len(request.ids))
        wanted = (n_ids + steps - 2) // P + 1
        # One more for each copy; states: after each segment, to write to, and three saved ones.
        segments = self._segments(track)
        held = track.saved.n_pages if track.saved is not None else 0  # may be more, after a rewind
        missing = max(wanted, held) - len(track.pages) + len(segments) + 1
        if not self._make_room(track, missing, 4 + len(segments), plan):
            return False
        if track.saved is not None:
            self._restore(track, plan)
        for ids in segments:
            self._read(track, ids, plan)
        self._own_last(track, plan)
        while len(track.pages) < wanted:
            track.pages.append(self.pages.take(track))
        return True

    def _segments(self, track: Track) -> list[list[int]]:
        """The ids that are still to be read, cut at the borders."""
        target = len(track.ids) - 1
        ends = sorted({b for b in track.borders if track.cached < b < target} | {target})
        starts = [track.cached, *ends[:-1]]
        return [track.ids[a:b] for a, b in zip(starts, ends, strict=True) if b > a]

    def _read(self, track: Track, ids: list[int], plan: Plan) -> None:
        """Reads a segment, or takes it from whoever has read it after the same history."""
        root = not track.cached
        key = history(track.key, "read", ids) if track.key else b""
        known = self._prefixes.get(key) if key else None
        reader = track.prefix.reader if track.prefix is not None else None
        if self.stateful and reader is not track and reader in plan.reads:
            plan.flush()  # the state to go on from has yet to be made
        self.counts["prefix_tokens_wanted"] += len(ids)
        if known is not None:
            self.counts["prefix_tokens_hit"] += len(ids)
            self._prefixes.move_to_end(key)
            self._adopt(track, known)
            return
        if self._own_last(track, plan):
            plan.flush()  # the copy comes first
        end, P = track.cached + len(ids), self.page_tokens
        while len(track.pages) * P < end:
            track.pages.append(self.pages.take(track))
        source, target = self._next_state(track)
        spans = []
        for i in range(0, len(ids), self.span_tokens):
            part = tuple(ids[i : i + self.span_tokens])
            spans.append(
                Span(tuple(track.pages), track.cached + i, part, target if i else source, target)
            )
        plan.reads.setdefault(track, []).extend(spans)
        if self.stateful:
            if track.state is not None:
                plan.pinned_states.append(track.state)
            track.state = target
        track.cached, track.key = end, key
        held = list(track.pages[: -(-end // P)])
        prefix = Prefix(key, end, held, track.state, root=root, reader=track)
        # Once more until the plan is made: nobody may take what is still to be written.
        self.pages.share(held + held)
        plan.pinned += held
        if prefix.state is not None:
            self.states.share([prefix.state, prefix.state])
            plan.pinned_states.append(prefix.state)
        if key:
            self._prefixes[key] = prefix
        self._use(track, prefix)

    def _next_state(self, track: Track) -> tuple[int, int]:
        """Slots to read the state from and to write it to; (0, 0) without states."""
        if not self.stateful:
            return 0, 0
        target = self.states.take(track)
        return (target if track.state is None else track.state), target

    def _row(self, request: Request) -> Row:
        track = request.track
        if self.stateful and not request.started:
            request.base = track.state
            if track.state is not None:
                self.states.share([track.state])
        source = target = 0
        if self.stateful:
            if request.started and track.state is not None:
                source = target = track.state
            else:
                source, target = self._next_state(track)
                self._set_state(track, target)
        request.started = True
        shared = track.shared if track.mode == "speculator" else 0
        return Row(request, tuple(track.pages), tuple(track.pages[:shared]), source, target)

    def _own_last(self, track: Track, plan: Plan) -> bool:
        """The page that the track writes to next becomes its own; True where by a copy."""
        at = track.cached + (len(track.request.ids) if track.request is not None else 0)
        index = at // self.page_tokens
        if index >= len(track.pages) or self.pages.may_write(track.pages[index], track):
            return False
        page, track.pages[index] = track.pages[index], self.pages.take(track)
        if at % self.page_tokens == 0:
            self.pages.give_back([page])
            return False
        plan.copies.append((page, track.pages[index]))
        plan.pinned.append(page)  # nobody may take it before the copy is made
        self.counts["copied_pages"] += 1
        return True

    # -- room ------------------------------------------------------------------------------------

    def _make_room(self, track: Track, pages: int, states: int, plan: Plan) -> bool:
        """Frees places until the track can have so many; False when it has to wait."""
        states = states if self.stateful else 0
        while self.pages.n_free < pages or self.states.n_free < states:
            if not self._relieve(track, plan):
                return False
        return True

    def _relieve(self, track: Track, plan: Plan) -> bool:
        """Frees something that counts less than the track; False when there is nothing."""
        for prefix in list(self._prefixes.values()):
            if not prefix.users:
                self._drop_prefix(prefix)
                return True
        in_plan = {request.track for request in plan.ready} | {track}
        holding = [t for t in self._tracks.values() if t.pages and t not in in_plan]
        holding.sort(key=lambda t: -t.born)

        def sampling(t: Track) -> bool:
            request = t.request
            return request is not None and request.started and request in self.active[t.mode]

        for mode, is_sampling in (("speculator", False), ("speculator", True), ("agent", False)):
            for t in holding:
                if t.mode != mode or sampling(t) != is_sampling:
                    continue
                if is_sampling and track.mode == "speculator" and t.born < track.born:
                    continue
                if mode == "agent" and track.mode == "speculator" and self.active["agent"]:
                    continue
                if is_sampling:
                    self._drop(t)
                else:
                    self._save(t, plan)
                return True
        for t in holding:
            if t.mode == "agent" and track.mode == "agent" and t.born > track.born:
                self._pause(t, plan)
                return True
        if track.pages and any(self.active.values()):
            self._pause(track, plan)
        return False

    def _drop(self, track: Track) -> None:
        request = track.request
        assert request is not None
        self.counts["drops"] += 1
        self.withdraw(request)
        self._on_drop(request)
        self._forget(track)

    def _pause(self, track: Track, plan: Plan) -> None:
        """Saves a track that samples; its request waits, first in line."""
        self.counts["pauses"] += 1
        request = track.request
        self._save(track, plan)
        if request is not None and request in self.active[track.mode]:
            self.active[track.mode].remove(request)
            self.queue[track.mode].insert(0, request)

    def _save(self, track: Track, plan: Plan) -> None:
        """Takes a track's part of the cache to the host."""
        request, prefix = track.request, track.prefix
        slots = {"state": track.state, "base": None if request is None else request.base}
        slots["prefix"] = None if prefix is None else prefix.state
        held = {name: slot for name, slot in slots.items() if slot is not None}
        known = (prefix.key, prefix.n, prefix.root) if prefix is not None else None
        track.saved = Saved({}, len(track.pages), tuple(held), known if self.stateful else None)
        plan.work.insert(0, ("save", (tuple(track.pages), held, track.saved.box)))
        self.counts["saved_pages"] += len(track.pages)
        self.pages.give_back(track.pages)
        track.pages = []
        self._use(track, None)
        self._set_state(track, None)
        if request is not None and request.base is not None:
            self.states.give_back([request.base])
            request.base = None

    def _restore(self, track: Track, plan: Plan) -> None:
        """Puts back what was saved, or what a track that went back or was forked needs of it."""
        saved, request = track.saved, track.request
        assert saved is not None
        track.pages, track.saved = [self.pages.take(track) for _ in range(saved.n_pages)], None
        started = request is not None and request.started
        slots: dict[str, int] = {}
        prefix = saved.prefix
        if prefix is not None and "prefix" in saved.has:
            slots["prefix"] = self.states.take(track)
            held = Prefix(prefix[0], prefix[1], [], slots["prefix"], root=prefix[2])
            held.pages = track.pages[: -(-held.n // self.page_tokens)]
            self.pages.share(held.pages)
            if held.key and held.key not in self._prefixes:
                self._prefixes[held.key] = held
            self._use(track, held)
        if prefix is not None and track.cached == prefix[1] and not started and track.key:
            self.states.share([slots["prefix"]])
            track.state = slots["prefix"]
        elif saved.has:
            if started and "base" in saved.has:
                slots["base"] = self.states.take(track)
                assert request is not None
                request.base = slots["base"]
            which = "base" if "base" in saved.has and not started else "state"
            if which in saved.has:
                slots[which] = track.state = self.states.take(track)
        plan.work.append(("load", (tuple(track.pages), slots, saved.box)))

    # -- places ----------------------------------------------------------------------------------

    def _adopt(self, track: Track, prefix: Prefix) -> None:
        """The track's first ``prefix.n`` ids are those of the prefix."""
        self.pages.share(prefix.pages)
        if prefix.state is not None:
            self.states.share([prefix.state])
        self.pages.give_back(track.pages)
        track.pages = list(prefix.pages)
        self._set_state(track, prefix.state)
        track.cached, track.key = prefix.n, prefix.key
        if prefix.n % self.page_tokens:  # its own page, after a rewind: forks may see more of it
            self.pages.disown(track.pages[-1], track)
        self._use(track, prefix)

    def _use(self, track: Track, prefix: Prefix | None) -> None:
        """The track's last prefix is this one; a prefix that nobody uses goes, prompts aside."""
        old = track.prefix
        if prefix is not None:
            prefix.users += 1
        track.prefix = prefix
        if old is not None:
            old.users -= 1
            kept = old.root and self._prefixes.get(old.key) is old
            if not old.users and not kept:
                self._drop_prefix(old)

    def _drop_prefix(self, prefix: Prefix) -> None:
        if self._prefixes.get(prefix.key) is prefix:  # a saved one may stand beside another's
            del self._prefixes[prefix.key]
        self.pages.give_back(prefix.pages)
        if prefix.state is not None:
            self.states.give_back([prefix.state])
        prefix.pages, prefix.state = [], None

    def _set_state(self, track: Track, slot: int | None) -> None:
        """The track holds this slot (already counted for it) and no other."""
        if track.state is not None:
            self.states.give_back([track.state])
        track.state = slot

    def _cut(self, track: Track, n: int) -> None:
        """Gives back the pages behind the first ``n`` ids."""
        keep = -(-n // self.page_tokens)
        self.pages.give_back(track.pages[keep:])
        del track.pages[keep:]
        track.cached = n
        if n % self.page_tokens and track.pages:
            self.pages.disown(track.pages[-1], track)

    def _forget(self, track: Track) -> None:
        """The track holds nothing any more."""
        self.pages.give_back(track.pages)
        track.pages, track.saved = [], None
        self._set_state(track, None)
        self._use(track, None)
        track.cached, track.key = 0, ROOT
