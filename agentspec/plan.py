"""Tells before renting it whether a job fits a TPU slice, and what a step costs there at least.

    python -m agentspec.plan --config=configs/qwen3_4b.py:search --topology=v5e:8x8
        [--only=train|sample] [--config.mesh.fsdp=64 --config.model.remat=full ...]

Compiles the job's own programs for that slice, without a TPU (the extra ``plan``: libtpu) and
without weights: ``model.path`` may name a folder that holds a config.json and nothing else. Prints
what each phase takes of a chip's memory and what each program costs. Exit code 1 if something does
not fit; then it looks for the nearest setting that does, by trying.

Memory: weights, moments and the sampling cache stay on the chips throughout; the sampling copy of
the weights is there while sampling only, accumulated gradients during an update only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from ml_collections import config_flags

from agentspec import entry
from agentspec.chips import GIB, Slice, slice_named
from agentspec.configuration import ConfigError, settings_from
from agentspec.costs import Cost
from agentspec.job import build_job
from agentspec.model.config import ModelConfig
from agentspec.model.hf_config import config_from_hf
from agentspec.model.safetensors_files import read_json
from agentspec.model.weights import CHOICES
from agentspec.plan_programs import Measured, Setting, Training, chip_bytes, slice_devices
from agentspec.plan_report import Phase, Report, Work, candidates, described, nearest, text
from agentspec.plan_sampling import Sampling
from agentspec.progress import say
from agentspec.rollout.device import span_rows
from agentspec.settings import MeshSettings, Settings


def model_config(settings: Settings) -> ModelConfig:
    """The shape of the job's model; of a folder, config.json alone is read."""
    m, file = settings.model, Path(settings.model.path) / "config.json"
    if m.path and file.is_file():
        with entry.reading("model.path", m.path):
            config = config_from_hf(read_json(file), str(file))
    else:
        with entry.reading("model.path", m.path):
            here = dataclasses.replace(settings, mesh=MeshSettings())  # no devices are needed
            config = build_job(here).model.config
    return dataclasses.replace(config, dtype=m.dtype, **{key: getattr(m, key) for key in CHOICES})


def first_setting(settings: Settings, wanted: Slice) -> Setting:
    """The config's own setting on the slice; a config for one device is spread over ``fsdp``."""
    m = settings.mesh
    mesh = (m.data, m.fsdp, m.tensor)
    if mesh == (1, 1, 1):
        mesh = (1, wanted.n_chips, 1)
    return Setting(
        wanted,
        mesh,
        settings.pack.rows_per_batch,
        settings.model.remat,
        settings.loss.logits_chunk_tokens,
        (settings.engine.rows, settings.engine.speculator_rows),
    )


class Planner:
    """Makes reports; programs that two settings share are compiled once."""

    def __init__(self, settings: Settings, config: ModelConfig, only: str = "") -> None:
        """``config`` as `model_config` gives it; ``only`` the phases of ``train`` or ``sample``."""
        self.settings, self.config, self.only = settings, config, only
        self._sampled = functools.cache(self._sample)

    def training(self, setting: Setting) -> Training:
        """The update's programs, not yet compiled."""
        devices = slice_devices(setting.slice)
        return Training(self.settings, self.config, setting, devices)

    def state_bytes(self, setting: Setting) -> int | None:
        """Weights, moments and gradients of a chip; None where the mesh does not divide the model
        or the rows.
        """
        try:
            training = self.training(setting)
        except ConfigError:
            return None
        return chip_bytes((training.state, training.params))

    def report(self, setting: Setting) -> Report:
        """Compiles everything for the setting. Raises ConfigError for one that cannot be."""
        s, training = self.settings, self.training(setting)
        sampling = Sampling(s, self.config, setting.slice.host())
        state, weights = chip_bytes(training.state), chip_bytes(training.params)
        caches = chip_bytes(sampling.cache(setting.engine_rows))
        parts = {
            f"weights ({self.config.stored_dtype})": weights,
            "optimizer state": state - weights,
            "gradients": weights,
            f"weights to sample with ({self.config.dtype})": chip_bytes(sampling.params),
            "cache": caches,
        }
        phases: list[Phase] = []
        work: list[Work] = []
        if self.only != "sample":
            self._train(training, parts, phases, work)
        if self.only != "train":
            for program in self._sampled(setting.slice.host(), setting.engine_rows):
                phases.append(Phase(program, {"weights and moments": state}))
                if program.cost:
                    work.append(Work(_sampled_name(program, s, setting), program.cost))
        title = _title(s, self.config, setting, training)
        a_row = sampling.row_bytes
        ways = int(sampling.mesh.size)
        return Report(title, setting, parts, tuple(phases), tuple(work), a_row, ways)

    def _train(
        self, training: Training, parts: dict[str, int], phases: list[Phase], work: list[Work]
    ) -> None:
        """Adds the update's phases and what they cost."""
        s, setting = self.settings, training.setting
        micro = {  # rows of a step at most, each a full one, and branches of each
            "agent update": (s.agent.tasks_per_step * s.agent.group_size, 0),
            "speculator update": (s.speculator.tasks_per_step, branches_of(s)),
        }
        moments, caches = parts["optimizer state"], parts["cache"]
        adding, applying = training.adding(), training.applying()
        for name, (rows, branches) in micro.items():
            n = -(-rows // setting.global_rows)
            say(f"[plan] compiling: {name}")
            program = training.gradients(f"{name}, micro-batch", branches)
            beside = {"moments": moments, "cache": caches}
            if n > 1:
                beside["gradients so far"] = parts["gradients"]
            phases.append(Phase(program, beside))
            work += _update_work(name, n, program, adding, applying)
        phases.append(Phase(applying, {"cache": caches}))

    def _sample(self, host: Slice, rows: tuple[int, int]) -> list[Measured]:
        sampling = Sampling(self.settings, self.config, host)
        say("[plan] compiling: sampling")
        names = ("decode, agent", "decode, speculator")
        programs = [sampling.prefilling(rows)]
        programs += [
            sampling.decoding(name, rows) for name, n in zip(names, rows, strict=True) if n
        ]
        return programs


def branches_of(s: Settings) -> int:
    """Branches of a speculator row: the predictions of an episode's share of the prefixes."""
    prefixes = max(1, round(s.speculator.prefixes_per_step / s.speculator.tasks_per_step))
    return prefixes * s.speculator.group_size


def _update_work(
    name: str, n: int, program: Measured, adding: Measured, applying: Measured
) -> list[Work]:
    if program.cost is None or adding.cost is None or applying.cost is None:
        return []
    whole: Cost = program.cost.times(n) + adding.cost.times(n - 1) + applying.cost
    return [
        Work(program.name, program.cost),
        Work(f"{name}, at most {n} micro-batch{'es' if n > 1 else ''}", whole),
    ]


def _sampled_name(program: Measured, s: Settings, setting: Setting) -> str:
    rows = setting.engine_rows["speculator" in program.name]
    if program.name == "prefill":
        return (
            f"prefill, {span_rows(s.engine.prefill_chunk)} spans of {s.engine.prefill_chunk} tokens"
        )
    return f"{program.name}, a token of {rows} rows"


def _title(s: Settings, config: ModelConfig, setting: Setting, training: Training) -> str:
    n = sum(leaf.size for leaf in jax.tree.leaves(training.model.shapes))
    data, fsdp, tensor = setting.mesh
    wanted = setting.slice
    return (
        f"{s.name}: {n / 1e9:.3f} billion weights on {wanted.name}, {wanted.n_chips} chips of "
        f"{wanted.host_chips} a host; mesh data={data} fsdp={fsdp} tensor={tensor}\n"
        f"micro-batch of {setting.global_rows} rows of {s.pack.row_tokens} tokens, "
        f"remat={setting.remat}, head {setting.chunk_tokens or 'all'} tokens at a time, "
        f"attention={training.model.attention}"
    )


def suggest(planner: Planner, first: Setting, most: int) -> str:
    """What to change so that it fits, found by trying at most ``most`` settings."""
    tried: dict[Setting, Report] = {}

    def fits(setting: Setting) -> bool:
        say(f"[plan] trying {described(setting, first)}")
        tried[setting] = planner.report(setting)
        return tried[setting].fits

    limit = planner.config.n_kv_heads
    found, n = nearest(candidates(first, limit), fits, planner.state_bytes, most)
    if found is None:
        if not most:
            return "Nothing else was tried: --most_tries is 0."
        if not n:
            return "There is no other setting to try that could fit."
        more = "there are no more to try" if n < most else "--most_tries may allow more"
        return f"None of the {n} other settings tried fits; {more}."
    report = tried[found]
    peak = max(phase.peak_bytes for phase in report.phases)
    return (
        f"This fits ({n} tried; peak {peak / GIB:.2f} of {report.usable_bytes / GIB:.2f} GiB):\n"
        f"  {described(found, first)}"
    )


def main(_: Sequence[str]) -> None:
    """Entry point."""
    given: Any = flags.FLAGS
    settings = settings_from(given.config)
    try:
        wanted = slice_named(given.topology)
    except ValueError as error:
        raise app.UsageError(f"--topology={error}") from error
    planner = Planner(settings, model_config(settings), given.only or "")
    first = first_setting(settings, wanted)
    report = planner.report(first)
    print(text(report))
    if not report.fits:
        print("\nIt does not fit.", suggest(planner, first, given.most_tries))
        raise SystemExit(1)
    print("\nIt fits.")


if __name__ == "__main__":
    config_flags.DEFINE_config_file("config", None, "The experiment's config file.")
    flags.DEFINE_string("topology", None, "The slice to plan for, such as v5e:8x8.")
    flags.DEFINE_enum("only", None, ["train", "sample"], "Plan these phases alone: sooner done.")
    flags.DEFINE_integer("most_tries", 8, "How many other settings to try if it does not fit.", 0)
    entry.run(main, ["config", "topology"])
