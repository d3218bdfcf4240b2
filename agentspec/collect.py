"""Collects episodes: agent groups, speculator groups at turn starts of live episodes, experts'.

Lines 3 of Algorithm 1. In: a ``Job``, an engine with the current weights, tasks, a step. Out:
``Trajectory`` lists in the order (task, member), whatever the order in which they finished.
Everything runs on a simulated clock at zero latency: all episodes that wait are sampled together.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Sequence
from typing import Any

from agentspec import rng
from agentspec.envs.episode import run_scripted
from agentspec.envs.tools import ToolBox
from agentspec.job import Job
from agentspec.speculation.clock import run_simulated
from agentspec.speculation.runtime import Budget, run_episode
from agentspec.speculation.speculators.selfspec import SelfSpeculator
from agentspec.types import Candidate, SamplingParams, Task, Trajectory


@dataclasses.dataclass(frozen=True)
class ChosenTurns:
    """Speculates at turn starts drawn by seed, before any outcome is known, and at no other."""

    speculator: SelfSpeculator
    share: float
    seed: int

    async def propose(self, seq: Any, turn: int, seed: int) -> list[Candidate]:
        """The inner speculator's candidates, or none where the turn was not drawn."""
        drawn = rng.stream(self.seed, "prefix", turn) % 2**20 < self.share * 2**20
        return await self.speculator.propose(seq, turn, seed) if drawn else []


def run_all(jobs: Sequence[Awaitable[Trajectory]], at_once: int) -> list[Trajectory]:
    """Runs episode coroutines on a fresh simulated clock, ``at_once`` at a time; in given order."""

    async def main() -> list[Trajectory]:
        gate = asyncio.Semaphore(at_once)

        async def gated(job: Awaitable[Trajectory]) -> Trajectory:
            async with gate:
                return await job

        return list(await asyncio.gather(*(gated(job) for job in jobs)))

    return run_simulated(main())


def episodes(
    job: Job, engine: Any, tasks: Sequence[Task], name: str, temperature: float
) -> list[Trajectory]:
    """One episode a task with one greedy prediction a turn; seeds come from ``name``."""
    greedy = SelfSpeculator(job.chat, job.speculator_sampling(0.0))
    jobs = [
        _episode(job, engine, task, rng.stream(job.settings.seed, name, n), greedy, temperature)
        for n, task in enumerate(tasks)
    ]
    return run_all(jobs, job.settings.engine.rows)


def agent_groups(job: Job, engine: Any, tasks: Sequence[Task], step: int) -> list[list[Trajectory]]:
    """One group of ``agent.group_size`` episodes for each task.

    The first ``speculation.agent_block_members`` of each make one greedy prediction a turn, for
    metrics only.
    """
    s = job.settings
    greedy = SelfSpeculator(job.chat, job.speculator_sampling(0.0))
    t = s.agent.temperature
    jobs = [
        _episode(
            job,
            engine,
            task,
            rng.stream(s.seed, "agent", step, n, member),
            greedy if member < s.speculation.agent_block_members else None,
            t,
        )
        for n, task in enumerate(tasks)
        for member in range(s.agent.group_size)
    ]
    flat = run_all(jobs, s.engine.rows)
    size = s.agent.group_size
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def speculator_episodes(
    job: Job, engine: Any, tasks: Sequence[Task], step: int
) -> list[Trajectory]:
    """One episode a task; ``speculator.group_size`` predictions at the turn starts drawn."""
    s = job.settings
    sp = s.speculator
    share = sp.prefixes_per_step / (len(tasks) * sp.turns_per_episode)
    inner = SelfSpeculator(
        job.chat,
        job.speculator_sampling(sp.temperature),
        n_candidates=sp.group_size,
        greedy_first=False,
    )
    jobs = []
    for n, task in enumerate(tasks):
        seed = rng.stream(s.seed, "speculator", step, n)
        chosen = ChosenTurns(inner, share, seed)
        jobs.append(_episode(job, engine, task, seed, chosen, s.agent.temperature))
    return run_all(jobs, s.engine.rows)


def predict(
    job: Job,
    engine: Any,
    trajectories: Sequence[Trajectory],
    sampling: SamplingParams,
    n_candidates: int = 1,
    drawn_only: bool = False,
) -> list[Trajectory]:
    """The trajectories with the candidates that ``engine``'s speculator makes at their turn starts.

    Asked are the turns that carry candidates and, unless ``drawn_only``, all that make a call.
    This is how the speculator of one checkpoint meets the agent of another.
    """
    speculator = SelfSpeculator(
        job.chat, sampling, n_candidates=n_candidates, greedy_first=n_candidates == 1
    )

    async def one(trajectory: Trajectory) -> Trajectory:
        turns = []
        for u, turn in enumerate(trajectory.turns):
            if turn.candidates or (turn.calls and not drawn_only):
                seq = engine.open(trajectory.ids[: turn.start], seed=0, mode="speculator")
                try:
                    seed = rng.stream(trajectory.seed, "predict", u)
                    found = tuple(await speculator.propose(seq, u, seed))
                finally:
                    seq.close()
                turn = dataclasses.replace(turn, candidates=found)
            turns.append(turn)
        return dataclasses.replace(trajectory, turns=turns)

    at_once = max(1, job.settings.engine.speculator_rows // 2)
    return run_all([one(t) for t in trajectories], at_once)


def predict_calls(
    job: Job, engine: Any, trajectories: Sequence[Trajectory], sampling: SamplingParams
) -> list[Trajectory]:
    """The trajectories with one prediction before each call of each turn (``hit_at_1_calls``).

    The prefix ends inside the agent's turn, just before the call's opening tag: the paper's unit.
    Nothing here is trained on such cuts.
    """
    speculator = SelfSpeculator(job.chat, sampling)

    async def one(t: Trajectory) -> Trajectory:
        turns = []
        for u, turn in enumerate(t.turns):
            found: list[Candidate] = []
            cuts = job.chat.call_cuts(t.ids[turn.start : turn.end]) if turn.calls else []
            for cut in cuts:
                seq = engine.open(t.ids[: turn.start + cut], seed=0, mode="speculator")
                try:
                    found += await speculator.propose(seq, u, 0)
                finally:
                    seq.close()
            turns.append(dataclasses.replace(turn, call_candidates=tuple(found)))
        return dataclasses.replace(t, turns=turns)

    return run_all([one(t) for t in trajectories], max(1, job.settings.engine.speculator_rows // 2))


async def _episode(
    job: Job, engine: Any, task: Task, seed: int, speculator: Any, temperature: float
) -> Trajectory:
    world = job.worlds[task.world].new()
    return await run_episode(
        engine,
        world,
        task,
        job.chat,
        job.agent_sampling(temperature),
        job.limits,
        seed,
        toolbox=ToolBox(world),
        speculator=speculator,
        budget=Budget(calls_per_turn=0),
    )


def expert_episodes(job: Job, tasks: Sequence[Task], seed: int) -> list[Trajectory]:
    """The scripted experts' episodes of the tasks, rendered to ids as an agent's would be."""

    async def one(n: int, task: Task) -> Trajectory:
        source = job.worlds[task.world]
        expert_seed = rng.stream(seed, "expert", n)
        expert = source.expert(task, expert_seed)
        return await run_scripted(source.new(), task, job.chat, expert, job.limits, expert_seed)

    async def main() -> list[Trajectory]:
        return [await one(n, task) for n, task in enumerate(tasks)]

    return run_simulated(main())
