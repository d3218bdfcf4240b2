"""Imitation stages: pretraining on agent turns, SFT on agent turns and speculation branches.

In: expert episodes. Out: a stage's weights. An SFT stage with ``patience`` looks at held-out Hit@1
as it goes and ends with the weights that had the best, so that it is never stopped early.
"""

from __future__ import annotations

import random
import time

from agentspec import collect, rng, scoring
from agentspec.configuration import ConfigError
from agentspec.job import Job
from agentspec.metrics import Writer
from agentspec.progress import StageProgress, say
from agentspec.stage import Stage
from agentspec.tasks.stream import TaskStream
from agentspec.types import Task, TreeRow


def run_imitation(job: Job, stage: Stage, writer: Writer) -> None:
    """Runs (or goes on with) a load, pretrain or sft stage."""
    c = stage.settings
    if c.kind == "load":
        return
    rows = imitation_examples(job, stage.name)
    stream = TaskStream(rows, seed=rng.stream(job.settings.seed, "examples", c.n_examples))
    update = stage.make_update("sft")
    budget = stage.tokens_of(c.match_tokens_of) if c.match_tokens_of else 0
    total = float(budget or c.steps)
    done = float(stage.tokens if budget else stage.step)
    with StageProgress(stage.name, done, total) as progress:
        while done < total and not stage.flat:
            began_s = time.monotonic()
            drawn = stream.batch(stage.next_task, c.rows_per_step)
            stage.next_task += c.rows_per_step
            batches = job.pack(drawn)
            stage.state, numbers = update(stage.state, batches)
            stage.count(stage.step + 1, sum(row.n_tokens for row in drawn))
            done = float(stage.tokens if budget else stage.step)
            if c.eval_every and stage.step % c.eval_every == 0:
                seen = held_out(job, stage)
                numbers |= {f"eval_{k}": seen[k] for k in ("hit_at_1", "success")}
                stage.look(seen["hit_at_1"], c.patience)
            numbers["step_s"] = time.monotonic() - began_s
            writer.write(stage.step - 1, c.kind, numbers)
            stage.save_when_due()
            progress.show(done, c.kind, numbers, last=done >= total or stage.flat)
    if stage.flat:
        say(f"[{stage.name}] held-out Hit@1 stopped rising; best at step {stage.best_step}")


def imitation_examples(job: Job, name: str) -> list[TreeRow]:
    """The stage's training rows. SFT keeps successful episodes only; pretraining imitates all."""
    c = job.settings.stage(name)
    tasks = [task for world in job.worlds.values() for task in world.expert_tasks()]
    random.Random(rng.stream(job.settings.seed, "expert_tasks", c.kind)).shuffle(tasks)
    while len(tasks) < c.n_examples:  # more episodes than tasks: experts vary by seed
        tasks = tasks + tasks
    episodes = collect.expert_episodes(
        job, tasks[: c.n_examples], rng.stream(job.settings.seed, "experts", c.kind)
    )
    kept = [t for t in episodes if c.kind == "pretrain" or t.score.success]
    say(
        f"[{name}] {len(kept)} of {len(episodes)} expert episodes kept, "
        f"{sum(len(t.ids) for t in kept) // max(len(kept), 1)} tokens each"
    )
    if not kept:
        raise ConfigError(
            f"config key {name}.n_examples={c.n_examples}: none of those expert episodes succeeded "
            "within episode.max_turns, max_turn_tokens and max_tokens"
        )
    return scoring.imitation_rows(job, kept, branches=c.kind == "sft")


def held_out(job: Job, stage: Stage) -> dict[str, float]:
    """Hit@1 and success on validation tasks, the agent at its training temperature."""
    engine = job.engine(stage.state.params, version=stage.step)
    tasks = validation_tasks(job, stage.settings.eval_tasks)
    groups = collect.episodes(job, engine, tasks, "validation", job.settings.agent.temperature)
    return scoring.episode_numbers(job, groups)


def validation_tasks(job: Job, n: int) -> list[Task]:
    """``n`` validation tasks, an equal share of each world."""
    share = -(-n // len(job.worlds))
    return [task for world in job.worlds.values() for task in world.tasks("validation")[:share]]
