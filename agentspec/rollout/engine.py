"""The rollout engine: many sequences sampled at once on one device (design, ideas 1 and 2).

In: token ids and ``SamplingParams`` through ``Sequence`` handles. Out: ``Completion`` records. One
paged cache for all sequences; agent rows and speculator rows are separate device calls, each of one
shape, so a completion depends on (weights, ids, seed, position) alone and an agent's never on
speculation. A sequence takes a row for one device call only, so that any number may be open.

Drivers: ``step`` by hand; an idle hook under a loop that has ``add_idle_hook`` (simulated time:
everything that waits is computed at once, then delivered after ``latency.generate_s``); else a task
that runs device calls on one thread, the two modes in turn.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Iterable
from typing import Any

from agentspec.rollout.decode import Sampled
from agentspec.rollout.device import MAX_STOP_IDS, Device, default_pages, n_states
from agentspec.rollout.sampling import check_sampling, check_seed
from agentspec.rollout.scheduler import Scheduler
from agentspec.rollout.tracks import Plan, Request, Track
from agentspec.types import Completion, Mode, SamplingParams, SequenceDropped


class SequenceTooLong(ValueError):
    """The ids do not fit the cache."""


class SequenceClosed(RuntimeError):
    """The sequence was closed, before the call or while it was sampling."""


class Sequence:
    """A handle on one sequence; made by ``Engine.open`` and ``fork``."""

    def __init__(self, engine: Engine, track: Track) -> None:
        """Not for callers: see ``Engine.open``."""
        self._engine = engine
        self._track = track

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids so far, sampled and appended."""
        return tuple(self._track.ids)

    @property
    def mode(self) -> Mode:
        """Whose rows the sequence uses."""
        return self._track.mode

    @property
    def room(self) -> int:
        """How many more ids fit."""
        return self._engine.cache_tokens - len(self._track.ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Appends ids and computes nothing. SequenceTooLong, and no change, if they do not fit."""
        self._check_idle("extend")
        new = self._engine._checked_ids(ids, len(self._track.ids))
        self._track.ids += new
        self._track.fresh += len(new)

    async def sample(self, params: SamplingParams) -> Completion:
        """Samples one segment, appends it to ``ids`` and returns it.

        Waits for a row and for pages, first come, first served. ``finish`` is ``length`` when
        ``max_tokens`` or the cache's end came before a stop id. Cancelling leaves the sequence as
        it was. SequenceDropped, in speculator mode only, when pages ran out: the ids stay.
        """
        self._check_idle("sample")
        return await self._engine._sample(self._track, params)

    def fork(self, seed: int, mode: Mode | None = None) -> Sequence:
        """A sequence with the same ids, its own seed, and this mode unless another is given.

        Costs nothing until it samples. While this sequence samples, the fork has the ids before.
        """
        self._check_open("fork")
        mode = self._engine._checked_mode(mode or self.mode)
        track = self._engine._scheduler.fork(self._track, mode, check_seed(seed))
        return Sequence(self._engine, track)

    def rewind(self, length: int) -> None:
        """Drops all ids but the first ``length``; what the cache holds of those stays in use."""
        self._check_idle("rewind")
        if not 0 <= length <= len(self._track.ids):
            raise ValueError(f"rewind to {length}: the sequence has {len(self._track.ids)} ids")
        self._engine._scheduler.rewind(self._track, length)

    def close(self) -> None:
        """Gives its pages back; a ``sample`` under way raises SequenceClosed. Twice is harmless."""
        if not self._track.closed:
            self._engine._close(self._track)

    def _check_open(self, what: str) -> None:
        if self._track.closed:
            raise SequenceClosed(f"{what} on a closed sequence of {len(self._track.ids)} ids")

    def _check_idle(self, what: str) -> None:
        self._check_open(what)
        if self._track.request is not None:
            raise RuntimeError(f"{what} while the sequence is sampling; await or cancel that first")


class Engine:
    """Samples for many sequences with one set of weights."""

    def __init__(
        self,
        model: Any,
        params: Any,
        *,
        rows: int,
        speculator_rows: int,
        cache_tokens: int,
        prefill_chunk: int = 32,
        tokens_per_call: int = 16,
        latency: Any = None,
        page_tokens: int = 64,
        pages: int = 0,
    ) -> None:
        """Allocates the cache.

        Args:
            model: a ``LanguageModel`` (``init_pages``, ``apply_paged``, ``unembed``).
            params: its weights.
            rows: agent sequences that a device call samples for.
            speculator_rows: the same for speculator mode; 0 for none.
            cache_tokens: longest sequence, prompt and samples together.
            prefill_chunk: ids of one span; a segment is read in spans of so many.
            tokens_per_call: most tokens sampled per row in one device call.
            latency: None or a ``LatencyModel``; waited for under simulated time only.
            page_tokens: ids that a page holds.
            pages: the cache's size; 0: see `default_pages`.
        """
        for name, value, least in (
            ("rows", rows, 1),
            ("speculator_rows", speculator_rows, 0),
            ("cache_tokens", cache_tokens, 1),
            ("prefill_chunk", prefill_chunk, 1),
            ("tokens_per_call", tokens_per_call, 1),
            ("page_tokens", page_tokens, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        width = -(-cache_tokens // page_tokens)  # pages of the longest sequence
        n_pages = pages or default_pages(rows, speculator_rows, width)
        if n_pages < 2 * width + 4:
            raise ValueError(
                f"pages={pages} of {page_tokens} tokens are too few: sequences of "
                f"cache_tokens={cache_tokens} need at least {2 * width + 4}"
            )
        self.cache_tokens = cache_tokens
        self.version = 0
        self.latency = latency
        self._rows: dict[Mode, int] = {"agent": rows}
        if speculator_rows:
            self._rows["speculator"] = speculator_rows
        stateful = "linear" in getattr(model.config, "kinds", ())
        self._scheduler = Scheduler(
            rows=self._rows,
            pages=n_pages,
            page_tokens=page_tokens,
            states=n_states(rows, speculator_rows) if stateful else 0,
            span_tokens=prefill_chunk,
            step_tokens=tokens_per_call,
            on_drop=_drop,
        )
        self._device = Device(
            model,
            params,
            rows=self._rows,
            width=width,
            pages=n_pages,
            page_tokens=page_tokens,
            states=self._scheduler.states.n,
            chunk=prefill_chunk,
            tokens_per_call=tokens_per_call,
        )
        self._turn = 0  # whose turn it is, live
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: asyncio.Task[None] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "engine")

    @property
    def params(self) -> Any:
        """The weights that it samples with."""
        return self._device.params

    @property
    def counters(self) -> dict[str, int]:
        """Device calls and tokens by mode since the start, and what is held now.

        ``pages_used`` and ``pages_shared``, ``states_used``, ``waiting/..``, ``active/..`` are
        present values. ``compiled/..``: shapes compiled so far; engines on the same model object
        share programs, and so these.
        """
        s = self._scheduler
        now = {
            "pages": s.pages.n,
            "pages_used": s.pages.n_used,
            "pages_shared": s.pages.n_shared,
            "states_used": s.states.n_used,
        }
        for mode in self._rows:
            now |= {f"waiting/{mode}": len(s.queue[mode]), f"active/{mode}": len(s.active[mode])}
        compiled = {f"compiled/{name}": n for name, n in self._device.programs.traces.items()}
        return dict(self._device.counts) | dict(s.counts) | now | compiled

    def open(self, ids: Iterable[int], seed: int = 0, mode: Mode = "agent") -> Sequence:
        """A sequence that starts with ``ids``. SequenceTooLong when they do not fit the cache."""
        checked = self._checked_ids(ids, 0)
        track = self._scheduler.open(self._checked_mode(mode), checked, check_seed(seed))
        return Sequence(self, track)

    def load(self, params: Any, version: int) -> None:
        """Swaps the weights; later completions carry ``version``.

        Open sequences keep their ids and read them anew. RuntimeError while any is sampling.
        """
        sampling = sum(len(requests) for requests in self._scheduler.active.values())
        sampling += sum(len(requests) for requests in self._scheduler.queue.values())
        if sampling:
            raise RuntimeError(
                f"load(version={version}) while {sampling} sequences are sampling with version "
                f"{self.version}; await or cancel them first"
            )
        self._scheduler.forget_all()
        self._device.params, self.version = params, version

    def forget(self) -> None:
        """Gives up the prompts that are kept for reuse."""
        self._scheduler.forget_prefixes()

    def step(self) -> bool:
        """Reads and samples once for each mode with work; False when there was none."""
        did = False
        for mode in self._rows:
            plan = self._scheduler.plan(mode)
            if plan is not None:
                self._apply(plan, self._device.execute(plan))
                did = True
        return did

    # -- between handle and scheduler ------------------------------------------------------------

    def _checked_mode(self, mode: Mode) -> Mode:
        if mode not in self._rows:
            raise ValueError(f"no rows for mode {mode!r}; this engine has {list(self._rows)}")
        return mode

    def _checked_ids(self, ids: Iterable[int], n_before: int) -> list[int]:
        new = [int(token) for token in ids]
        if n_before + len(new) > self.cache_tokens:
            raise SequenceTooLong(
                f"{n_before + len(new)} ids do not fit cache_tokens={self.cache_tokens}"
            )
        return new

    async def _sample(self, track: Track, params: SamplingParams) -> Completion:
        check_sampling(params, MAX_STOP_IDS)
        if not track.ids:
            raise ValueError("sample needs at least one id to continue from")
        budget = min(params.max_tokens, self.cache_tokens - len(track.ids))
        if budget == 0:
            return Completion((), (), "length", self.version)
        loop = asyncio.get_running_loop()
        request = Request(track, params, budget, loop.create_future())
        track.request = request
        self._scheduler.queue[track.mode].append(request)
        done = False
        try:
            self._wake(loop)
            await request.future
            if self.latency is not None and hasattr(loop, "add_idle_hook"):
                await asyncio.sleep(self.latency.generate_s(track.fresh, len(request.ids)))
            if track.closed:
                raise SequenceClosed("the sequence was closed while it was sampling")
            done = True
        finally:
            track.request = None
            if not done and not track.closed:
                self._scheduler.withdraw(request)
        self._scheduler.finish(request)
        stopped = request.ids[-1] in params.stop_ids
        return Completion(
            ids=tuple(request.ids),
            logps=tuple(request.logps),
            finish="stop" if stopped else "length",
            version=self.version,
            entropies=tuple(request.entropies),
        )

    def _close(self, track: Track) -> None:
        request = track.request
        self._scheduler.close(track)
        if request is not None and not request.future.done():
            request.future.set_exception(
                SequenceClosed("the sequence was closed while it was sampling")
            )
        if self._loop is not None and self._loop.is_running():
            self._wake(self._loop)  # somebody may have waited for these pages

    # -- drivers ---------------------------------------------------------------------------------

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        new_loop = loop is not self._loop
        self._loop = loop
        if hasattr(loop, "add_idle_hook"):
            if new_loop:
                loop.add_idle_hook(self._run_until_idle)
            return
        if self._scheduler.busy() and (new_loop or self._driver is None or self._driver.done()):
            self._driver = loop.create_task(self._drive(loop), name="engine")
            self._driver.add_done_callback(self._driver_ended)

    def _run_until_idle(self) -> bool:
        did = False
        while self.step():
            did = True
        return did

    async def _drive(self, loop: asyncio.AbstractEventLoop) -> None:
        """Live: one device call at a time on the engine's thread, pools in turn, until no work."""
        while True:
            await asyncio.sleep(0)  # callers that just got results may ask again: batch them
            modes = list(self._rows)
            modes = modes[self._turn :] + modes[: self._turn]
            plan = next((plan for mode in modes if (plan := self._scheduler.plan(mode))), None)
            if plan is None:
                return
            self._turn = (list(self._rows).index(plan.mode) + 1) % len(modes)
            sampled = await loop.run_in_executor(self._thread, self._device.execute, plan)
            self._apply(plan, sampled)

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        """Hands a failure of the device calls to everybody who waits for one."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        for mode in self._rows:
            for request in self._scheduler.queue[mode] + self._scheduler.active[mode]:
                if not request.future.done():
                    request.future.set_exception(error)

    def _apply(self, plan: Plan, sampled: Sampled | None) -> None:
        """Books the new tokens and tells the requests that are done."""
        if sampled is None:
            return
        for r, row in enumerate(plan.rows):
            request = row.request
            if request not in self._scheduler.active[plan.mode] or request.future.done():
                continue  # withdrawn meanwhile
            n = int(sampled.counts_R[r])
            request.ids += sampled.ids_RN[r, :n].tolist()
            request.logps += sampled.logps_RN[r, :n].tolist()
            request.entropies += sampled.entropies_RN[r, :n].tolist()
            if request.ids[-1] in request.params.stop_ids or len(request.ids) == request.budget:
                self._scheduler.complete(request)
                request.future.set_result(None)


def _drop(request: Request) -> None:
    if not request.future.done():
        request.future.set_exception(
            SequenceDropped("the speculator's sample was given up: the cache ran out of pages")
        )
