"""Live wall time of the same episodes with speculation off and on, in paired runs.

    python -m benchmarks.live_speculation --config=configs/tiny.py --checkpoint=DIR[:step]
        [--tasks=20] [--at_once=4] [--tool_s=0.3] [--pairs=3]

Tools really wait ``tool_s``; the model really samples. Off and on take turns in going first; each
pair must give the same trajectories. Prints the ratio on/off of each pair and its median, the share
of tool time hidden, and the share that the hits allow; the last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from agentspec import rng
from agentspec.configuration import settings_from
from agentspec.envs import episode
from agentspec.envs.tools import ToolBox, ToolLatency
from agentspec.evaluate import params_of, same_trajectory
from agentspec.job import Job, build_job
from agentspec.speculation import runtime
from agentspec.speculation.candidates import hit_report
from agentspec.speculation.events import time_account
from agentspec.speculation.speculators.selfspec import SelfSpeculator
from agentspec.types import Trajectory

_CONFIG = config_flags.DEFINE_config_file("config", "configs/tiny.py", "The config file.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "DIR[:step] of a stage.", required=True)
_TASKS = flags.DEFINE_integer("tasks", 20, "Episodes of each world.")
_AT_ONCE = flags.DEFINE_integer("at_once", 4, "Episodes in flight.")
_TOOL_S = flags.DEFINE_float("tool_s", 0.3, "Seconds that each tool call waits.")
_PAIRS = flags.DEFINE_integer("pairs", 3, "Paired runs, off and on in turn.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "The agent's temperature.")


def run(job: Job, engine, world: str, speculate: bool) -> tuple[float, list[Trajectory]]:
    """Wall seconds of all episodes of one world, and the episodes."""
    tasks = job.worlds[world].tasks("test")[: _TASKS.value]
    speculator = SelfSpeculator(job.chat, job.speculator_sampling(0.0))
    s = job.settings.speculation
    budget = runtime.Budget(s.calls_per_turn, s.calls_per_episode)

    async def main() -> list[Trajectory]:
        gate = asyncio.Semaphore(_AT_ONCE.value)

        async def one(task) -> Trajectory:
            async with gate:
                w = job.worlds[world].new()
                box = ToolBox(w, latency=ToolLatency(default_s=_TOOL_S.value))
                sampling = job.agent_sampling(_TEMPERATURE.value)
                seed = rng.stream(job.settings.seed, "live", task.id)
                args = (engine, w, task, job.chat, sampling, job.limits, seed)
                if not speculate:
                    return await episode.run_episode(*args, toolbox=box)
                return await runtime.run_episode(
                    *args, toolbox=box, speculator=speculator, budget=budget, measure_late=False
                )

        return list(await asyncio.gather(*(one(task) for task in tasks)))

    start_s = time.perf_counter()
    trajectories = asyncio.run(main())
    return time.perf_counter() - start_s, trajectories


def allowed_hidden_frac(plain: list[Trajectory], speculated: list[Trajectory]) -> float:
    """Share of tool time hidden if each hit had been launched at its turn's start.

    A hit then hides min(tool time, time of the agent's turn), both as in the plain run.
    """
    allowed_s = sum(
        min(a.tool_s, a.generate_s)
        for x, y in zip(plain, speculated, strict=True)
        for a, b in zip(x.turns, y.turns, strict=True)
        if any(b.hits)
    )
    tool_s = sum(turn.tool_s for t in plain for turn in t.turns)
    return allowed_s / tool_s if tool_s else 0.0


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    del argv
    logging.set_verbosity(logging.WARNING)
    settings = settings_from(_CONFIG.value)
    job = build_job(settings)
    engine = job.engine(params_of(job, _CHECKPOINT.value))
    print(f"{os.cpu_count()} cores, {platform.machine()}, jax {jax.__version__}; ", end="")
    print(f"{_TASKS.value} tasks a world, {_AT_ONCE.value} at once, tools wait {_TOOL_S.value} s")
    report = {}
    for world in job.worlds:
        run(job, engine, world, True)  # compiles
        ratios, off_s, on_s = [], [], []
        for pair in range(_PAIRS.value):
            order = (False, True) if pair % 2 == 0 else (True, False)
            both = {speculate: run(job, engine, world, speculate) for speculate in order}
            (plain_s, plain), (speculated_s, last) = both[False], both[True]
            for a, b in zip(plain, last, strict=True):
                same_trajectory(a, b)
            off_s.append(plain_s)
            on_s.append(speculated_s)
            ratios.append(speculated_s / plain_s)
        account = time_account(last)
        hits = hit_report(last, job.specs(world))
        report[world] = {
            "off_s": statistics.median(off_s),
            "on_s": statistics.median(on_s),
            "on_over_off": statistics.median(ratios),
            "ratios": ratios,
            "hidden_tool_frac": account["hidden_frac"],
            "hit_in_time": hits["hit_at_1"],  # a prediction that the agent overtook is a miss
            "allowed_hidden_frac": allowed_hidden_frac(plain, last),
            "ready_share": account["ready_share"],
            "episodes": len(last),
        }
        print(world, json.dumps(report[world]))
    print(json.dumps({"tool_s": _TOOL_S.value, "at_once": _AT_ONCE.value, "worlds": report}))


if __name__ == "__main__":
    app.run(main)
