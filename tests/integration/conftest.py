"""A tiny model, trained for a minute, for tests that need an agent which does something."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from agentspec.checkpoint import restore_params
from agentspec.configuration import settings_from
from agentspec.job import Job, build_job
from agentspec.train import train
from configs.tiny import get_config


@dataclasses.dataclass(frozen=True)
class Trained:
    """The job of ``configs/tiny.py:short``, its work directory and the weights after SFT."""

    job: Job
    workdir: Path
    params: Any


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains the stages base and sft of the short variant."""
    settings = settings_from(get_config("short"))
    workdir = tmp_path_factory.mktemp("short")
    train(settings, workdir)
    return Trained(build_job(settings), workdir, restore_params(workdir / "checkpoints" / "sft"))
