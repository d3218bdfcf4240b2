"""Trains all stages of a job: imitation first, then joint agent-speculator RL (Algorithm 1).

    python -m agentspec.train --config=configs/tiny.py --workdir=DIR [--config.x=y]

Running it again on the same workdir goes on where it stopped; a run that was killed ends with the
same parameters, bit for bit, as one that was not.

Deviations from the paper, each a config key: cut at the turn's start [speculation.cut]; uniform
groups leave the denominator [loss.drop_uniform_groups]; equal prefixes share a group
[speculator.merge_equal_prefixes]; speculator updates sample fresh episodes of their own, one a task
[speculator.tasks_per_step]; the repeat penalty holds in every world [reward.repeat_penalty].
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags, logging
from ml_collections import config_flags

from agentspec import collect, entry, scoring
from agentspec.checkpoint import CheckpointError
from agentspec.configuration import settings_from
from agentspec.imitate import run_imitation
from agentspec.job import Job, build_job
from agentspec.metrics import CollapseMonitor, Writer
from agentspec.phases import Schedule
from agentspec.progress import StageProgress, say
from agentspec.settings import Settings
from agentspec.stage import Stage, open_stage
from agentspec.tasks.jsonlines import DataError
from agentspec.tasks.stream import TaskStream
from agentspec.types import Task, TreeRow
from agentspec.workdir import RunError, check, claim


def train(settings: Settings, workdir: Path) -> None:
    """Runs every stage of ``settings.stages`` that ``workdir`` does not hold finished already."""
    check(workdir, settings)
    with entry.reading("model.path", settings.model.path):
        job = build_job(settings)
    lock = claim(workdir, settings)  # only now: a first try with a wrong path leaves no trace
    idle = len(jax.devices()) - 1 if job.model.mesh is None else 0
    for name, world in job.worlds.items():
        report = getattr(world, "report", None)
        if report is not None:
            say(f"[{name}] {report()}")
    for name in settings.stages:
        with open_stage(job, workdir, name) as stage:
            if stage.done:
                say(f"[{name}] finished before, at step {stage.step}")
                continue
            if idle:
                say(f"[{name}] {idle} more devices stand idle: set mesh.fsdp (or data, tensor)")
            runner = run_rl if stage.settings.kind == "rl" else run_imitation
            runner(job, stage, _writer(workdir, stage))
            stage.finish()
    lock.close()


def _writer(workdir: Path, stage: Stage) -> Writer:
    file = workdir / "metrics.jsonl"
    try:
        return Writer(file, stage=stage.name, step=stage.step)
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error) if str(file) in str(error) else f"{file}: {error!r}"
        raise RunError(f"{reason}; mend or move the file, checkpoints are untouched") from error


def run_rl(job: Job, stage: Stage, writer: Writer) -> None:
    """Joint agent-speculator GRPO; the numbers are the lines of Algorithm 1."""
    s = job.settings
    phases = Schedule(s.schedule.agent_steps, s.schedule.speculator_steps)
    stream = TaskStream(_training_tasks(job), seed=s.seed)
    update = stage.make_update("policy")
    engine = job.engine(stage.state.params, version=stage.step)
    frozen = (
        job.engine(stage.start_params()) if s.speculator.targets == "frozen_sft" else None
    )
    monitor = CollapseMonitor()
    writer.replay(monitor.observe)
    total = stage.settings.steps
    with StageProgress(stage.name, stage.step, total) as progress:
        for step in range(stage.step, total):
            began_s = time.monotonic()
            phase = phases.at(step)  # 1
            if phase.switched and s.schedule.reset:
                stage.state = stage.optimizer.reset(stage.state)  # 2
            rows, numbers = _episodes(job, engine, frozen, stream, stage, phase.mode)  # 3, 4
            collected_s = time.monotonic() - began_s
            batches = job.pack(rows)  # 5
            heat = (s.agent if phase.mode == "agent" else s.speculator).temperature
            stage.state, update_numbers = update(  # 6
                stage.state, batches, phase=phase.mode, temperature=heat
            )
            engine.load(stage.state.params, version=step + 1)  # 7
            numbers |= update_numbers
            stage.count(step + 1, sum(row.n_tokens for row in rows))
            numbers["collect_s"] = collected_s
            numbers["step_s"] = time.monotonic() - began_s
            writer.write(step, phase.mode, numbers)  # 8
            for warning in monitor.observe({"step": step, "phase": phase.mode, **numbers}):
                say(f"[{stage.name}] warning: {warning}")
            stage.save_when_due()
            progress.show(step + 1, phase.mode, numbers, last=step + 1 == total)


def _episodes(
    job: Job, engine: Any, frozen: Any, stream: TaskStream[Task], stage: Stage, mode: str
) -> tuple[list[TreeRow], dict[str, float]]:
    s = job.settings
    n = s.agent.tasks_per_step if mode == "agent" else s.speculator.tasks_per_step
    tasks = stream.batch(stage.next_task, n)
    stage.next_task += n
    if mode == "agent":
        groups = collect.agent_groups(job, engine, tasks, stage.step)
        return scoring.agent_rows(job, groups)
    episodes = collect.speculator_episodes(job, frozen or engine, tasks, stage.step)
    if frozen is not None:  # the frozen agent's calls, the present speculator's predictions
        sampling = job.speculator_sampling(s.speculator.temperature)
        k = s.speculator.group_size
        episodes = collect.predict(job, engine, episodes, sampling, k, drawn_only=True)
    return scoring.speculator_rows(job, episodes)


def _training_tasks(job: Job) -> list[Task]:
    return [task for task in job.tasks("train") if not task.data.get("vacuous")]


def main(_: Sequence[str]) -> None:
    """Entry point."""
    logging.set_verbosity(logging.WARNING)  # Orbax tells every step of every save
    train(settings_from(flags.FLAGS.config), Path(flags.FLAGS.workdir))


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The experiment's config file.")
    flags.DEFINE_string("workdir", None, "Folder of checkpoints and metrics; resumed.")
    entry.run(main, ["config", "workdir"], errors=(CheckpointError, DataError))
