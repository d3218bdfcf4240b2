"""An engine that remembers: each distinct sample is computed once, then served from memory.

A completion depends on (weights, ids, seed, position) alone, so it can be computed under one clock
and served under another. Evaluation samples all episodes in step (full device batches), then runs
the same episodes again under the simulated clock, with and without speculation, at modelled times.

In: any engine of the handle API. Out: the same API.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from agentspec.types import Completion, Mode, SamplingParams


class Latency(Protocol):
    """Modelled duration of one sample."""

    def generate_s(self, n_prefilled: int, n_sampled: int) -> float:
        """Seconds that prefilling and sampling so many tokens take."""
        ...


class RecordedEngine:
    """Serves remembered completions after ``latency``; what it does not know is sampled."""

    def __init__(self, engine: Any) -> None:
        """Wraps ``engine``; nothing is remembered yet."""
        self._engine = engine
        self._known: dict[tuple[Any, ...], Completion] = {}
        self.latency: Latency | None = None
        self.misses = 0

    def open(self, ids: list[int], seed: int = 0, mode: Mode = "agent") -> RecordedSequence:
        """A sequence that holds ``ids``."""
        return RecordedSequence(self, list(ids), 0, seed, mode)


class RecordedSequence:
    """A handle whose device sequence is opened only when a sample is not remembered."""

    def __init__(
        self,
        recorded: RecordedEngine,
        ids: list[int],
        cached: int,
        seed: int,
        mode: Mode,
    ) -> None:
        self._recorded = recorded
        self.ids, self._cached = ids, cached
        self.seed, self.mode = seed, mode
        self._real: Any = None
        self._synced = 0

    def extend(self, ids: list[int]) -> None:
        """Appends ids."""
        self.ids.extend(ids)

    def fork(self, seed: int = 0, mode: Mode | None = None) -> RecordedSequence:
        """A copy at the present length, with its own seed."""
        child = RecordedSequence(
            self._recorded, list(self.ids), self._cached, seed, mode or self.mode
        )
        if self._real is not None:  # the real fork now, before this sequence moves on
            self._sync()
            child._real, child._synced = self._real.fork(seed=seed, mode=mode), len(child.ids)
        return child

    async def sample(self, params: SamplingParams) -> Completion:
        """The completion of the present ids, remembered or sampled, after its modelled time."""
        key = (tuple(self.ids), self.seed, self.mode, params)
        known = self._recorded._known
        if key not in known:
            self._recorded.misses += 1
            if self._real is None:
                self._real = self._recorded._engine.open(
                    list(self.ids), seed=self.seed, mode=self.mode
                )
                self._synced = len(self.ids)
            self._sync()
            known[key] = await self._real.sample(params)
            self._synced += len(known[key].ids)
        completion = known[key]
        if self._recorded.latency is not None:
            prefilled = len(self.ids) - self._cached
            try:
                await asyncio.sleep(
                    self._recorded.latency.generate_s(prefilled, len(completion.ids))
                )
            except asyncio.CancelledError:
                self.close()  # the device sequence may hold ids that this one never got
                raise
        self.ids.extend(completion.ids)
        self._cached = len(self.ids)
        return completion

    def _sync(self) -> None:
        if self._synced < len(self.ids):
            self._real.extend(self.ids[self._synced :])
            self._synced = len(self.ids)

    def close(self) -> None:
        """Frees the device sequence, if there is one."""
        if self._real is not None:
            self._real.close()
            self._real = None
