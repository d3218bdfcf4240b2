"""Evaluates checkpoints: task success, Hit@1 and its ceiling, and what speculation saves.

    python -m agentspec.evaluate --config=configs/tiny.py --workdir=DIR
        all stages of a run, the crossing of agents and speculators, results.json
    python -m agentspec.evaluate --config=configs/tiny.py --checkpoint=DIR[:step]
        [--speculator_checkpoint=DIR[:step]]  one agent, with its own or another's speculator

Every episode is sampled once, all in step, and then played again on a simulated clock at the stated
speeds (``evaluate.token_s``, ``evaluate.tool_s``), without and with speculation; the three must be
the same trajectory, which is checked.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from agentspec import collect, entry, rng
from agentspec.checkpoint import Checkpointer, CheckpointError, abstract, restore_params
from agentspec.configuration import settings_from
from agentspec.envs import episode
from agentspec.envs.tools import ToolBox, ToolLatency
from agentspec.job import Job, build_job
from agentspec.progress import say
from agentspec.rollout.recorded import RecordedEngine
from agentspec.settings import Settings
from agentspec.speculation import runtime
from agentspec.speculation.candidates import hit_report
from agentspec.speculation.clock import LatencyModel
from agentspec.speculation.events import time_account
from agentspec.speculation.speculators.selfspec import SelfSpeculator
from agentspec.tasks.jsonlines import DataError
from agentspec.types import Task, Trajectory
from agentspec.workdir import RunError, check, read_object

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Played:
    """The same episodes three times: in step, serial, and speculated on the simulated clock."""

    measured: list[Trajectory]
    serial: list[Trajectory]
    speculated: list[Trajectory]


def play(job: Job, params: Any, tasks: Sequence[Task], temperature: float) -> Played:
    """Plays ``tasks``; raises AssertionError if speculation changed any trajectory.

    The timed runs are served what the first one sampled; a few episodes are therefore sampled once
    more by an engine beside which nothing speculates.
    """
    s = job.settings
    engine = job.engine(params)
    recorded = RecordedEngine(engine)
    speculator = SelfSpeculator(job.chat, job.speculator_sampling(0.0))
    sampling = job.agent_sampling(temperature)
    latency = ToolLatency(default_s=s.evaluate.tool_s, spread=s.evaluate.tool_spread)

    def run(speculate: bool, timed: bool, agreement: int = 0) -> list[Trajectory]:
        recorded.latency = (
            LatencyModel(s.evaluate.token_s, s.evaluate.prefill_token_s) if timed else None
        )
        jobs = []
        for task in tasks:
            world = job.worlds[task.world].new()
            box = ToolBox(world, latency=latency if timed else None)
            seed = rng.stream(s.seed, "evaluate", task.id)
            args = (recorded, world, task, job.chat, sampling, job.limits, seed)
            if not speculate:
                jobs.append(episode.run_episode(*args, toolbox=box))
                continue
            budget = runtime.Budget(
                s.speculation.calls_per_turn if timed else 0, s.speculation.calls_per_episode
            )
            jobs.append(
                runtime.run_episode(
                    *args, toolbox=box, speculator=speculator, budget=budget, agreement=agreement
                )
            )
        return collect.run_all(jobs, len(jobs) if timed else s.engine.rows)

    agreement = s.evaluate.agreement if temperature > 0 else 0
    played = Played(run(True, False, agreement), run(False, True), run(True, True))
    for a, b, c in zip(played.measured, played.serial, played.speculated, strict=True):
        same_trajectory(a, b)
        same_trajectory(b, c)
    some = tasks[:: max(1, len(tasks) // 16)]  # sampled once more, by an engine that never forks
    alone, jobs = job.engine(params), []
    for task in some:
        world, seed = job.worlds[task.world].new(), rng.stream(s.seed, "evaluate", task.id)
        jobs.append(episode.run_episode(alone, world, task, job.chat, sampling, job.limits, seed))
    by_task = {t.task_id: t for t in played.measured}
    for plain in collect.run_all(jobs, s.engine.rows):
        same_trajectory(plain, by_task[plain.task_id])
    if temperature == s.evaluate.temperatures[0]:
        greedy = job.speculator_sampling(0.0)
        measured = collect.predict_calls(job, engine, played.measured, greedy)
        played = dataclasses.replace(played, measured=measured)
    return played


def same_trajectory(a: Trajectory, b: Trajectory) -> None:
    """Raises AssertionError naming the field in which two runs of one episode differ."""
    for field in ("ids", "mask", "logps", "calls", "score", "final_state", "finish"):
        if getattr(a, field) != getattr(b, field):
            raise AssertionError(f"task {a.task_id}: speculation changed the episode's {field}")
    for u, (x, y) in enumerate(zip(a.turns, b.turns, strict=True)):
        if x.observations != y.observations:
            raise AssertionError(f"task {a.task_id}, turn {u}: speculation changed an observation")


def row_numbers(job: Job, worlds: Sequence[str], played: Played) -> Row:
    """The table's numbers over the episodes of ``worlds``; shares 0 to 1, None where undefined.

    Tasks that a do-nothing agent would pass are left out and reported apart (``vacuous_*``).
    """

    def of(trajectories: list[Trajectory]) -> list[Trajectory]:
        return [t for t in trajectories if t.world in worlds and not _vacuous(t)]

    measured = of(played.measured)
    idle = [t for t in played.measured if t.world in worlds and _vacuous(t)]
    specs = {name: spec for world in worlds for name, spec in job.specs(world).items()}
    report = hit_report(measured, specs)
    account = time_account(of(played.speculated))
    serial = of(played.serial)
    sampled = [e for t in measured for e, m in zip(t.entropies, t.mask, strict=True) if m]
    tools = {k.split("/")[1]: v for k, v in report.items() if k.startswith("hit_at_1/")}
    row: Row = {k: v for k, v in report.items() if "/" not in k}
    row |= {
        "hit_at_1_by_tool": tools,
        "calling_turns_by_tool": {
            k.split("/")[1]: v for k, v in report.items() if k.startswith("calling_turns/")
        },
        "parse_failure_frac": row.pop("parse_failure"),
        "entropy": _mean(sampled),
        "serial_s": _mean([t.total_s for t in serial]),
        "speculated_s": _mean([t.total_s for t in of(played.speculated)]),
        "hidden_tool_frac": account["hidden_frac"],
        "ready_share": account["ready_share"],
        "n_tasks": len(measured),
        "n_vacuous": len(idle),
        "vacuous_success": _mean([t.score.success for t in idle]),
        "n_calls": sum(len(t.calls) for t in measured),
        "turns": _mean([len(t.turns) for t in measured]),
    }
    return _plain(row)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def evaluate_stage(
    job: Job, name: str, params: Any, temperature: float
) -> tuple[list[Row], Played]:
    """A row for each world and one for all of them."""
    n = job.settings.evaluate.tasks_per_world
    tasks = [task for world in job.worlds.values() for task in world.tasks("test")[:n]]
    played = play(job, params, tasks, temperature)
    head = {"row": name, "temperature": temperature}
    rows = [
        head | {"world": world} | row_numbers(job, [world], played)
        for world in (*job.worlds, "all")
        if world != "all"
    ]
    rows.append(head | {"world": "all"} | row_numbers(job, list(job.worlds), played))
    return rows, played


def cross(job: Job, agents: dict[str, list[Trajectory]], params: dict[str, Any]) -> dict[str, Any]:
    """Hit@1 of each checkpoint's speculator on each checkpoint's agent, ``[agent][speculator]``."""
    names = list(agents)
    specs = {name: spec for world in job.worlds for name, spec in job.specs(world).items()}
    table: dict[str, dict[str, float]] = {agent: {} for agent in names}
    for speculator in names:
        engine = job.engine(params[speculator])
        for agent in names:
            say(f"[evaluate] speculator {speculator} on agent {agent}")
            bare = [_without_candidates(t) for t in agents[agent]]  # without vacuous tasks
            guessed = collect.predict(job, engine, bare, job.speculator_sampling(0.0))
            table[agent][speculator] = hit_report(guessed, specs)["hit_at_1"]
    return _plain(
        {
            "agents": names,
            "speculators": names,
            "hit_at_1": [[table[a][s] for s in names] for a in names],
            "n_tasks": len(next(iter(agents.values()), [])),
        }
    )


def _job(settings: Settings) -> Job:
    with entry.reading("model.path", settings.model.path):
        return build_job(settings)


def params_of(job: Job, where: str | Path) -> Any:
    """The weights of ``DIR[:step]``, which must be those of the config's model."""
    return restore_params(where, abstract(job.model.shapes, job.param_shardings))


def evaluate_run(settings: Settings, workdir: Path) -> dict[str, Any]:
    """Evaluates every stage of a run and writes ``results.json`` after each, resuming there."""
    steps = {name: _finished(workdir / "checkpoints" / name) for name in settings.stages}
    missing = [name for name, step in steps.items() if step is None]
    if missing:
        raise RunError(
            f"{workdir} holds no finished checkpoints of {', '.join(missing)}; train it first"
        )
    check(workdir, settings)
    file = workdir / "results.json"
    results = read_object(file) if file.exists() else {}
    job = _job(settings)
    key = _plain(
        {
            "evaluate": dataclasses.asdict(settings.evaluate),
            "seed": settings.seed,
            "steps": steps,
        }
    )
    if results.get("key") != key:
        results = {"key": key, "rows": [], "rows_other_temperatures": []}
    results |= {
        "config": settings.name,
        "seed": settings.seed,
        "latency_model": {
            "token_s": settings.evaluate.token_s,
            "prefill_token_s": settings.evaluate.prefill_token_s,
            "tool_s": settings.evaluate.tool_s,
            "tool_spread": settings.evaluate.tool_spread,
        },
    }
    first, *others = settings.evaluate.temperatures
    shown = "joint" if "joint" in settings.stages else settings.stages[-1]
    params: dict[str, Any] = {}
    agents: dict[str, list[Trajectory]] = {}
    for name in settings.stages:
        for temperature in (first, *others):
            where = results["rows" if temperature == first else "rows_other_temperatures"]
            crossed = name in settings.evaluate.crossing and temperature == first
            ready = any(r["row"] == name and r["temperature"] == temperature for r in where)
            if ready and not (crossed and "crossing" not in results):
                continue
            say(f"[evaluate] {name} at temperature {temperature:g}")
            params[name] = params_of(job, workdir / "checkpoints" / name)
            rows, played = evaluate_stage(job, name, params[name], temperature)
            where[:] = [r for r in where if (r["row"], r["temperature"]) != (name, temperature)]
            where += rows
            if crossed:
                real = [t for t in played.measured if not _vacuous(t)]
                agents[name] = _share(real, settings.evaluate.crossing_tasks)
            if temperature == first and name == shown:
                results["timeline"] = {"stage": name, "temperature": first} | timeline(played)
            _write(file, results)
    if "crossing" not in results and agents:
        results["crossing"] = cross(job, agents, params)
    order = {name: i for i, name in enumerate(settings.stages)}
    results["rows"].sort(key=lambda r: order[r["row"]])
    _write(file, results)
    return results


def _finished(folder: Path) -> int | None:
    """The last step of a finished stage; None for one that is not finished or not there."""
    if not folder.is_dir():
        return None
    with Checkpointer(folder) as checkpointer:
        meta = checkpointer.read_meta()
    return int(meta["step"]) if meta["done"] else None


def timeline(played: Played) -> dict[str, Any]:
    """The events of the episode in which speculation hid most, without and with it."""
    saved = [a.total_s - b.total_s for a, b in zip(played.serial, played.speculated, strict=True)]
    best = max(range(len(saved)), key=saved.__getitem__)
    return {
        "task": played.serial[best].task_id,
        "plain": [dataclasses.asdict(e) for e in played.serial[best].events],
        "speculated": [dataclasses.asdict(e) for e in played.speculated[best].events],
    }


def _vacuous(t: Trajectory) -> bool:
    return bool(t.score.details.get("vacuous"))


def _share(trajectories: list[Trajectory], per_world: int) -> list[Trajectory]:
    worlds: dict[str, list[Trajectory]] = {}
    for t in trajectories:
        worlds.setdefault(t.world, []).append(t)
    return [t for ts in worlds.values() for t in ts[:per_world]]


def _without_candidates(t: Trajectory) -> Trajectory:
    return dataclasses.replace(t, turns=[dataclasses.replace(u, candidates=()) for u in t.turns])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _write(file: Path, results: dict[str, Any]) -> None:
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(results, indent=1))
    partial.replace(file)


def evaluate_checkpoint(settings: Settings, agent: str, speculator: str | None) -> dict[str, Any]:
    """One checkpoint's rows; with ``speculator``, also that one's Hit@1 on this agent."""
    job = _job(settings)
    params = params_of(job, agent)
    temperature = settings.evaluate.temperatures[0]
    rows, played = evaluate_stage(job, Path(agent.split(":")[0]).name, params, temperature)
    results: dict[str, Any] = {"rows": rows}
    if speculator is not None:
        engine = job.engine(params_of(job, speculator))
        bare = [_without_candidates(t) for t in played.measured if not _vacuous(t)]
        guessed = collect.predict(job, engine, bare, job.speculator_sampling(0.0))
        specs = {name: spec for world in job.worlds for name, spec in job.specs(world).items()}
        results["crossed"] = {"speculator": speculator} | _plain(hit_report(guessed, specs))
    return results


def main(_: Sequence[str]) -> None:
    """Entry point."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of every save
    given = flags.FLAGS
    if bool(given.workdir) == bool(given.checkpoint):
        raise app.UsageError("give either --workdir or --checkpoint")
    if given.speculator_checkpoint and not given.checkpoint:
        raise app.UsageError("--speculator_checkpoint needs --checkpoint, the agent's")
    settings = settings_from(given.config)
    if given.workdir:
        evaluate_run(settings, Path(given.workdir))
        say(f"[evaluate] wrote {Path(given.workdir) / 'results.json'}")
    else:
        results = evaluate_checkpoint(settings, given.checkpoint, given.speculator_checkpoint)
        print(json.dumps(results))


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The experiment's config file.")
    flags.DEFINE_string("workdir", None, "A run's folder: evaluate all its stages.")
    flags.DEFINE_string("checkpoint", None, "A stage's folder DIR[:step] to evaluate.")
    flags.DEFINE_string(
        "speculator_checkpoint", None, "Take the speculator from this DIR[:step] instead."
    )
    entry.run(main, ["config"], errors=(CheckpointError, DataError))
