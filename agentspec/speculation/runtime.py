"""The speculated episode loop: while the agent thinks, predicted read-only calls already run.

In: what ``envs.episode.run_episode`` takes, a speculator and a budget. Out: the same trajectory,
bit for bit, but for times, candidates, hits and events. "Speculate while you reason", section on
asynchronous pre-execution; for the exact meaning of match, hit and time see ``preexecute`` and
``events``. Nothing that runs beside the agent can change what it samples or sees: forks sample with
seeds of their own, and only calls declared read-only and repeatable run ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from typing import Any

from agentspec import rng
from agentspec.envs.base import World
from agentspec.envs.episode import EpisodeBuilder, EpisodeLimits, toolbox_for
from agentspec.envs.tools import ToolBox
from agentspec.rewards.calls import same_call
from agentspec.speculation.candidates import Speculator, StreamingSpeculator
from agentspec.speculation.preexecute import Budget, PreExecutor
from agentspec.types import (
    Candidate,
    SamplingParams,
    SequenceDropped,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)

__all__ = ["Budget", "run_episode"]

log = logging.getLogger(__name__)


async def run_episode(
    engine: Any,
    world: World,
    task: Task,
    chat: Any,
    sampling: SamplingParams,
    limits: EpisodeLimits,
    seed: int,
    *,
    toolbox: ToolBox | None = None,
    speculator: Speculator | None = None,
    budget: Budget | None = None,
    measure_late: bool = True,
    agreement: int = 0,
) -> Trajectory:
    """Plays one task, pre-executing predicted calls, and returns its trajectory.

    ``measure_late`` lets a prediction that the agent overtook finish, so that Hit@1 counts it; the
    agent does not wait for it, and it is not in ``total_s``. ``agreement`` more continuations of
    each turn's prefix are sampled for self-agreement, as the agent would, on speculator rows.
    """
    clock = asyncio.get_running_loop()
    toolbox = toolbox_for(world, toolbox)
    budget = budget or Budget()
    builder = EpisodeBuilder(world, task, chat, limits, seed)
    beside: list[_Beside] = []
    seq = engine.open(list(builder.ids), seed=seed)
    try:
        while not builder.finish:
            version, turn_s, index = world.state_version, clock.time(), len(builder.turns)
            params = builder.turn_sampling(sampling)
            spent = sum(len(b.ahead.entries) for b in beside)
            now = _Beside(PreExecutor(toolbox, budget, index, spent), index, turn_s)
            beside.append(now)
            if speculator is not None:
                now.speculate(speculator, seq, seed)
            now.continuations = [
                asyncio.create_task(_first_call(seq, s, params, builder))
                for s in (rng.stream(seed, "agreement", index, i) for i in range(agreement))
            ]
            await asyncio.sleep(0)  # they fork here, before the agent samples on
            completion = await seq.sample(params)
            turn, parsed = builder.add_turn(completion, version)
            called_s = clock.time()
            turn.generate_s = called_s - turn_s
            builder.note("generate", index, turn_s, called_s)
            now.agent_called(turn.calls, measure_late)
            if turn.calls:
                results = await toolbox.run_turn(turn.calls, index, now.ahead.serve)
                hits = [now.ahead.gave(result) for result in results]
                waited_s = builder.add_results(results, called_s, hits)
                turn.tool_s = toolbox.serial_s(turn.calls, results)
                turn.hidden_s = max(0.0, turn.tool_s - waited_s)
            builder.check(seq.ids)
            seq.extend(await builder.respond(parsed))
        trajectory = builder.trajectory()
        for one, turn in zip(beside, builder.turns, strict=True):
            await one.finish(turn, builder)
    finally:
        seq.close()
        for one in beside:
            one.cancel()
        for one in beside:
            await one.ended()
    trajectory.events = builder.sorted_events()
    return trajectory


async def _first_call(
    seq: Any, seed: int, params: SamplingParams, builder: EpisodeBuilder
) -> ToolCall | None:
    """The first call of another continuation of the same prefix; None if it makes none."""
    fork = seq.fork(seed=seed, mode="speculator")
    try:
        completion = await fork.sample(params)
    except SequenceDropped:
        return None
    finally:
        fork.close()
    parsed = builder.chat.parse(list(completion.ids), builder.world.tools)
    return parsed.calls[0] if parsed.calls else None


class _Beside:
    """Everything that runs beside one turn of the agent."""

    def __init__(self, ahead: PreExecutor, index: int, start_s: float) -> None:
        self.ahead = ahead
        self.continuations: list[asyncio.Task[ToolCall | None]] = []
        self._index, self._start_s = index, start_s
        self._found: list[Candidate] = []
        self._task: asyncio.Task[None] | None = None

    def speculate(self, speculator: Speculator, seq: Any, seed: int) -> None:
        """Starts the speculator; each candidate is offered to pre-execution as it arrives."""

        async def work() -> None:
            if isinstance(speculator, StreamingSpeculator):
                async with contextlib.aclosing(
                    speculator.stream(seq, self._index, seed)
                ) as candidates:
                    async for candidate in candidates:
                        self._take(candidate)
            else:
                for candidate in await speculator.propose(seq, self._index, seed):
                    self._take(candidate)

        self._task = asyncio.create_task(work())

    def _take(self, candidate: Candidate) -> None:
        self._found.append(candidate)
        self.ahead.offer(candidate)

    def agent_called(self, calls: tuple[ToolCall, ...], measure_late: bool) -> None:
        """The agent's calls are known: what cannot serve them stops."""
        self.ahead.settle(calls)
        if self._task is not None and not measure_late:
            self._task.cancel()

    async def finish(self, turn: Turn, builder: EpisodeBuilder) -> None:
        """Waits for what still runs, then notes candidates, agreement and events."""
        if self._task is not None:
            await asyncio.wait({self._task})
            self._note_failure(self._task, builder)
        for rank, candidate in enumerate(self._found):
            status = self._status(rank, turn.calls)
            builder.note(
                "speculate", self._index, self._start_s, candidate.ready_s, str(rank), status
            )
        for entry in self.ahead.entries:
            await asyncio.wait({entry.task})
            builder.note(
                "preexecute", self._index, entry.start_s, entry.end_s, entry.call.name, entry.status
            )
        turn.candidates = tuple(
            dataclasses.replace(c, ready_s=c.ready_s - builder.start_s) for c in self._found
        )
        turn.agreement_calls = tuple([await task for task in self.continuations])

    def _note_failure(self, task: asyncio.Task[None], builder: EpisodeBuilder) -> None:
        """A speculator that gave nothing leaves a candidate that says why."""
        problem = "cut off by the agent's call"
        if not task.cancelled():
            error = task.exception()
            if error is None:
                return
            problem = f"the speculator failed: {error!r}"
            log.warning("turn %d: %s", self._index, problem)
            builder.note("speculate", self._index, self._start_s, self._start_s, problem, "error")
        if not self._found:
            self._found.append(Candidate((), (), None, (problem,), self._start_s))

    def _status(self, rank: int, calls: tuple[ToolCall, ...]) -> str:
        """See ``events`` for the words."""
        call = self._found[rank].call
        if call is None:
            return "none"
        spec = self.ahead.spec(call)
        if any(c.call and same_call(c.call, call, spec) for c in self._found[:rank]):
            return "repeat"
        entry = self.ahead.entry(call)
        if entry is not None:
            return entry.status
        if not any(same_call(call, other, spec) for other in calls):
            return "miss"
        return "late" if self.ahead.allowed(call) else "match"

    def cancel(self) -> None:
        """Stops everything; ``ended`` waits for it."""
        for task in (self._task, *self.continuations):
            if task is not None:
                task.cancel()

    async def ended(self) -> None:
        """Returns when no task is left."""
        tasks = [task for task in (self._task, *self.continuations) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.ahead.close()
