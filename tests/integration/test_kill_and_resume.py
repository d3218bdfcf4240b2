"""A run killed at any moment ends with the same weights, bit for bit, as one left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agentspec.checkpoint import restore_params

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("base", "sft_light", "sft", "joint", "sft_more")


def start(workdir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "agentspec.train", "--config=configs/tiny.py:smoke"]
    command += [f"--workdir={workdir}", "--config.checkpoint.every=1"]
    log = (workdir.parent / f"{workdir.name}.log").open("ab")
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=dict(os.environ))


def finish(workdir: Path) -> None:
    process = start(workdir)
    assert process.wait(timeout=300) == 0, (workdir.parent / f"{workdir.name}.log").read_text()


def rows(workdir: Path) -> list[dict]:
    file = workdir / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def kill_when(workdir: Path, reached) -> None:
    """Starts the run and kills it with SIGKILL as soon as ``reached()``; it must be still alive."""
    process = start(workdir)
    deadline = time.monotonic() + 300
    while not reached():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()


def seen(workdir: Path, stage: str, phase: str, step: int):
    return lambda: any(
        (r["stage"], r["phase"]) == (stage, phase) and r["step"] >= step for r in rows(workdir)
    )


def writing(workdir: Path, stage: str, after: int):
    """A checkpoint of the stage, beyond step ``after``, is on disk and not complete."""
    folder = workdir / "checkpoints" / stage

    def reached() -> bool:
        names = [p.name for p in folder.glob("*.partial")] if folder.exists() else []
        return any(int(name.split(".")[0]) > after for name in names)

    return reached


@pytest.mark.slow
def test_b46_killed_runs_end_with_the_same_weights(tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    finish(calm)
    kill_when(killed, seen(killed, "sft", "sft", 1))
    kill_when(killed, seen(killed, "joint", "agent", 0))
    kill_when(killed, seen(killed, "joint", "speculator", 2))
    kill_when(killed, writing(killed, "joint", 3))
    finish(killed)
    for stage in STAGES:
        a = restore_params(calm / "checkpoints" / stage)
        b = restore_params(killed / "checkpoints" / stage)
        flat_a, flat_b = _flat(a), _flat(b)
        assert flat_a.keys() == flat_b.keys()
        for key, value in flat_a.items():
            np.testing.assert_array_equal(value, flat_b[key], err_msg=f"{stage}: {key}")
    steps = [(r["stage"], r["step"]) for r in rows(killed)]
    assert steps == sorted(set(steps), key=steps.index), "a step was logged twice"
    keep = ("stage", "step", "phase", "loss", "grad_norm")
    assert [[r[k] for k in keep] for r in rows(killed)] == [
        [r[k] for k in keep] for r in rows(calm)
    ]


def _flat(tree: dict, path: str = "") -> dict[str, np.ndarray]:
    flat: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        name = f"{path}/{key}"
        flat |= _flat(value, name) if isinstance(value, dict) else {name: np.asarray(value)}
    return flat
