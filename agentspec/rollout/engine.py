"""The rollout engine: many sequences sampled at once on one device (design, ideas 1 and 2).

In: token ids and ``SamplingParams`` through ``Sequence`` handles. Out: ``Completion`` records. Two
static caches, one for agent rows and one for speculator rows, each driven by calls of one shape, so
a completion depends on (weights, ids, seed, position) alone and an agent's never on speculation.
This is the plain engine: one contiguous cache row per live sequence. A fork costs a row copy.

Drivers: ``step`` by hand; an idle hook under a loop that has ``add_idle_hook`` (simulated time:
everything that waits is computed at once, then delivered after ``latency.generate_s``); else a task
that runs device calls on one thread, the two pools in turn.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentspec.rollout.decode import DecodeRows, Sampled, programs
from agentspec.rollout.sampling import check_seed
from agentspec.rollout.scheduler import Plan, Pool, Prefill, Request, Scheduler, Track
from agentspec.types import Completion, Mode, SamplingParams

MAX_STOP_IDS = 8  # width of the stop table, part of the decode call's shape
PREFILL_ROWS = 16  # rows per prefill call


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
        """Which pool's rows the sequence uses."""
        return self._track.pool.mode

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

        Waits for a free row, first come, first served. ``finish`` is ``length`` when
        ``max_tokens`` or the cache's end came before a stop id. Cancelling leaves the sequence as
        it was.
        """
        self._check_idle("sample")
        return await self._engine._sample(self._track, params)

    def fork(self, seed: int, mode: Mode | None = None) -> Sequence:
        """A sequence with the same ids, its own seed, and this mode unless another is given.

        Costs nothing until it samples. While this sequence samples, the fork has the ids before.
        """
        self._check_open("fork")
        pool = self._engine._pool(mode or self.mode)
        track = self._engine._scheduler.fork(self._track, pool, check_seed(seed))
        return Sequence(self._engine, track)

    def rewind(self, length: int) -> None:
        """Drops all ids but the first ``length``; what the cache holds of those stays in use."""
        self._check_idle("rewind")
        if not 0 <= length <= len(self._track.ids):
            raise ValueError(f"rewind to {length}: the sequence has {len(self._track.ids)} ids")
        self._engine._scheduler.rewind(self._track, length)

    def close(self) -> None:
        """Gives the row back; a ``sample`` under way raises SequenceClosed. Twice is harmless."""
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
    ) -> None:
        """Allocates both caches.

        Args:
            model: a ``LanguageModel`` (``init_cache``, ``apply_cached``, ``unembed``).
            params: its weights.
            rows: agent sequences that can be live at once.
            speculator_rows: the same for speculator mode; 0 for none, else at least 2.
            cache_tokens: longest sequence, prompt and samples together.
            prefill_chunk: ids read per row and model call.
            tokens_per_call: most tokens sampled per row in one device call.
            latency: None or a ``LatencyModel``; waited for under simulated time only.
        """
        for name, value in (
            ("cache_tokens", cache_tokens),
            ("prefill_chunk", prefill_chunk),
            ("tokens_per_call", tokens_per_call),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.cache_tokens = cache_tokens
        self.params = params
        self.version = 0
        self.latency = latency
        self._programs = programs(model, prefill_chunk, tokens_per_call)
        self._prefill_width = -(-cache_tokens // prefill_chunk) * prefill_chunk
        stateful = "linear" in getattr(model.config, "kinds", ())
        self._scheduler = Scheduler(rows, speculator_rows, stateful)
        self._caches = {
            mode: model.init_cache(pool.n_rows, cache_tokens)
            for mode, pool in self._scheduler.pools.items()
            if pool.n_rows
        }
        self._counts: collections.Counter[str] = collections.Counter()
        self._turn = 0  # whose pool's turn it is, live
        self._loop: asyncio.AbstractEventLoop | None = None
        self._driver: asyncio.Task[None] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "engine")

    @property
    def counters(self) -> dict[str, int]:
        """Device calls and tokens by mode since the start; ``compiled/..``: shapes compiled so far.

        Engines on the same model object share programs, and so these last counts.
        """
        compiled = {f"compiled/{name}": n for name, n in self._programs.traces.items()}
        return dict(self._counts) | compiled

    def open(self, ids: Iterable[int], seed: int = 0, mode: Mode = "agent") -> Sequence:
        """A sequence that starts with ``ids``. SequenceTooLong when they do not fit the cache."""
        checked = self._checked_ids(ids, 0)
        track = Track(self._pool(mode), checked, check_seed(seed), fresh=len(checked))
        return Sequence(self, track)

    def load(self, params: Any, version: int) -> None:
        """Swaps the weights; later completions carry ``version``.

        RuntimeError while sequences hold keys and values of the old weights: close them first.
        """
        seated = self._scheduler.seated()
        if seated:
            sampling = sum(track.request is not None for track in seated)
            raise RuntimeError(
                f"load(version={version}) while {len(seated)} sequences hold cached tokens of "
                f"version {self.version} ({sampling} of them sampling); close them first"
            )
        self.params, self.version = params, version

    def step(self) -> bool:
        """Seats, prefills and decodes once for each pool with work; False when there was none."""
        plans = (self._plan(pool) for pool in self._scheduler.pools.values())
        did = False
        for plan in plans:
            if plan is not None:
                self._apply(plan[0], self._execute(*plan))
                did = True
        return did

    # -- between handle and scheduler ------------------------------------------------------------

    def _pool(self, mode: Mode) -> Pool:
        pool = self._scheduler.pools.get(mode)
        if pool is None or not pool.n_rows:
            have = [name for name, pool in self._scheduler.pools.items() if pool.n_rows]
            raise ValueError(f"no rows for mode {mode!r}; this engine has {have}")
        return pool

    def _checked_ids(self, ids: Iterable[int], n_before: int) -> list[int]:
        new = [int(token) for token in ids]
        if n_before + len(new) > self.cache_tokens:
            raise SequenceTooLong(
                f"{n_before + len(new)} ids do not fit cache_tokens={self.cache_tokens}"
            )
        return new

    async def _sample(self, track: Track, params: SamplingParams) -> Completion:
        _check_sampling(params)
        if not track.ids:
            raise ValueError("sample needs at least one id to continue from")
        budget = min(params.max_tokens, self.cache_tokens - len(track.ids))
        if budget == 0:
            return Completion((), (), "length", self.version)
        loop = asyncio.get_running_loop()
        request = Request(track, params, budget, loop.create_future())
        track.request = request
        track.pool.queue.append(request)
        try:
            self._wake(loop)
            await request.future
            if self.latency is not None and hasattr(loop, "add_idle_hook"):
                await asyncio.sleep(self.latency.generate_s(track.fresh, len(request.ids)))
            if track.closed:
                raise SequenceClosed("the sequence was closed while it was sampling")
        finally:
            track.request = None
            self._scheduler.withdraw(request)
        track.ids += request.ids
        track.cached = len(track.ids) - 1
        track.fresh = 0
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
            self._wake(self._loop)  # somebody may have waited for this row

    # -- drivers ---------------------------------------------------------------------------------

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        new_loop = loop is not self._loop
        self._loop = loop
        if hasattr(loop, "add_idle_hook"):
            if new_loop:
                loop.add_idle_hook(self._run_until_idle)
            return
        has_work = any(pool.queue or pool.active for pool in self._scheduler.pools.values())
        if has_work and (new_loop or self._driver is None or self._driver.done()):
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
            pools = list(self._scheduler.pools.values())
            pools = pools[self._turn :] + pools[: self._turn]
            plan = next((plan for pool in pools if (plan := self._plan(pool))), None)
            if plan is None:
                return
            self._turn = (list(self._scheduler.pools.values()).index(plan[0].pool) + 1) % len(pools)
            sampled = await loop.run_in_executor(self._thread, self._execute, *plan)
            self._apply(plan[0], sampled)

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        """Hands a failure of the device calls to everybody who waits for one."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        for pool in self._scheduler.pools.values():
            for request in pool.queue + pool.active:
                if not request.future.done():
                    request.future.set_exception(error)

    # -- one plan: made and applied on the caller's thread, executed on any ----------------------

    def _plan(self, pool: Pool) -> tuple[Plan, DecodeRows] | None:
        plan = self._scheduler.plan(pool)
        if plan is None:
            return None
        n_rows = pool.n_rows
        rows = DecodeRows(
            ids_R=np.zeros(n_rows, np.int32),
            positions_R=np.zeros(n_rows, np.int32),
            budget_R=np.zeros(n_rows, np.int32),
            seeds_R=np.zeros(n_rows, np.uint32),
            temperature_R=np.ones(n_rows, np.float32),
            stop_RK=np.full((n_rows, MAX_STOP_IDS), -1, np.int32),
        )
        for request, r in zip(plan.requests, plan.decode_rows, strict=True):
            track, params = request.track, request.params
            rows.ids_R[r] = (request.ids or track.ids)[-1]
            rows.positions_R[r] = len(track.ids) + len(request.ids) - 1
            rows.budget_R[r] = request.budget - len(request.ids)
            rows.seeds_R[r] = track.seed
            rows.temperature_R[r] = params.temperature
            rows.stop_RK[r, : len(params.stop_ids)] = params.stop_ids
        return plan, rows

    def _execute(self, plan: Plan, rows: DecodeRows) -> Sampled:
        """Runs a plan on the device and returns host arrays."""
        for wave in plan.waves:
            for copy in wave.copies:
                source, target = copy.source.mode, copy.target.mode
                at = (jnp.int32(copy.source_row), jnp.int32(copy.target_row))
                if source == target:
                    self._caches[target] = self._programs.copy_within(self._caches[target], *at)
                else:
                    self._caches[target] = self._programs.copy_across(
                        self._caches[target], self._caches[source], *at
                    )
                self._counts[f"copies/{target}"] += 1
            for pool in self._scheduler.pools.values():
                prefills = [prefill for prefill in wave.prefills if prefill.pool is pool]
                for i in range(0, len(prefills), PREFILL_ROWS):
                    self._prefill(pool, prefills[i : i + PREFILL_ROWS])
        mode = plan.pool.mode
        self._caches[mode], sampled = self._programs.decode(self.params, self._caches[mode], rows)
        sampled = jax.device_get(sampled)
        self._counts[f"decode_calls/{mode}"] += 1
        self._counts[f"decode_steps/{mode}"] += int(sampled.counts_R.max())
        self._counts[f"sampled_tokens/{mode}"] += int(sampled.counts_R.sum())
        return sampled

    def _prefill(self, pool: Pool, prefills: list[Prefill]) -> None:
        width = min(pool.n_rows, PREFILL_ROWS)
        rows_P = np.full(width, pool.n_rows, np.int32)
        ids_PS = np.zeros((width, self._prefill_width), np.int32)
        start_P, length_P = np.zeros(width, np.int32), np.zeros(width, np.int32)
        for i, prefill in enumerate(prefills):
            rows_P[i], start_P[i], length_P[i] = prefill.row, prefill.start, len(prefill.ids)
            ids_PS[i, : len(prefill.ids)] = prefill.ids
        self._caches[pool.mode] = self._programs.prefill(
            self.params, self._caches[pool.mode], rows_P, ids_PS, start_P, length_P
        )
        self._counts[f"prefill_calls/{pool.mode}"] += 1
        self._counts[f"prefilled_tokens/{pool.mode}"] += int(length_P.sum())

    def _apply(self, plan: Plan, sampled: Sampled) -> None:
        """Books the new tokens and completes the requests that are done."""
        for request, r in zip(plan.requests, plan.decode_rows, strict=True):
            if request not in plan.pool.active:
                continue  # withdrawn meanwhile
            n = int(sampled.counts_R[r])
            request.ids += sampled.ids_RN[r, :n].tolist()
            request.logps += sampled.logps_RN[r, :n].tolist()
            request.entropies += sampled.entropies_RN[r, :n].tolist()
            if request.ids[-1] in request.params.stop_ids or len(request.ids) == request.budget:
                plan.pool.active.remove(request)
                request.future.set_result(None)


def _check_sampling(params: SamplingParams) -> None:
    if not 0 <= params.temperature < float("inf"):
        raise ValueError(f"temperature must be finite and at least 0, got {params.temperature}")
    if params.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {params.max_tokens}")
    if len(params.stop_ids) > MAX_STOP_IDS:
        raise ValueError(f"at most {MAX_STOP_IDS} stop ids, got {len(params.stop_ids)}")
