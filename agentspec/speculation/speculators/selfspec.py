"""The agent as its own speculator: the same weights, asked by the fixed speculation suffix.

In: the agent's handle at the start of a turn. Out: candidates. "Speculate while you reason",
self-speculation; forks share the agent's prefix, the suffix is read once for all candidates.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from agentspec import rng
from agentspec.speculation.candidates import candidate_from
from agentspec.types import Candidate, SamplingParams, SequenceDropped, ToolSpec


class SelfSpeculator:
    """Samples ``n_candidates`` predictions; the first is greedy with ``greedy_first``."""

    def __init__(
        self,
        chat: Any,
        sampling: SamplingParams,
        n_candidates: int = 1,
        greedy_first: bool = True,
        tools: Sequence[ToolSpec] = (),
    ) -> None:
        """``tools`` are needed by styles whose values are typed by the tool's schema."""
        if n_candidates < 1:
            raise ValueError(f"n_candidates must be at least 1, got {n_candidates}")
        self._chat, self._tools = chat, tuple(tools)
        greedy = dataclasses.replace(sampling, temperature=0.0)
        self._samplings = [sampling] * n_candidates
        if greedy_first:
            self._samplings[0] = greedy

    async def propose(self, seq: Any, turn_index: int, seed: int) -> list[Candidate]:
        """The candidates in rank order; every fork is closed, also on cancellation."""
        async with contextlib.aclosing(self.stream(seq, turn_index, seed)) as stream:
            return [candidate async for candidate in stream]

    async def stream(self, seq: Any, turn_index: int, seed: int) -> AsyncGenerator[Candidate, None]:
        """The candidates in rank order, each as soon as it and those before it are complete."""
        seeds = [rng.stream(seed, "speculator", turn_index, i) for i in range(len(self._samplings))]
        trunk = seq.fork(seed=seeds[0], mode="speculator")
        handles, tasks = [trunk], []
        try:
            trunk.extend(self._chat.suffix_ids())
            handles += [trunk.fork(seed=s) for s in seeds[1:]]
            for handle, sampling in zip(handles, self._samplings, strict=True):
                tasks.append(asyncio.create_task(self._predict(handle, sampling)))
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for handle in handles:
                handle.close()

    async def _predict(self, handle: Any, sampling: SamplingParams) -> Candidate:
        try:
            completion = await handle.sample(sampling)
        except SequenceDropped as dropped:
            return Candidate((), (), None, (str(dropped),), asyncio.get_running_loop().time())
        parsed = self._chat.parse(list(completion.ids), self._tools)
        return candidate_from(completion, parsed, asyncio.get_running_loop().time())
