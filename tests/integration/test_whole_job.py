"""The whole default job on a shrunken config: train, evaluate, report, by the user's commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "--config=configs/tiny.py:smoke"
STAGES = ("base", "sft_light", "sft", "joint", "sft_more")


def run(module: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"agentspec.{module}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ), timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_train_evaluate_report(tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    first = run("train", CONFIG, f"--workdir={workdir}")
    for stage in STAGES:
        assert f"[{stage}]" in first.stderr  # progress was shown throughout
    again = run("train", CONFIG, f"--workdir={workdir}")
    assert again.stderr.count("finished before") == len(STAGES)

    run("evaluate", CONFIG, f"--workdir={workdir}")
    results = json.loads((workdir / "results.json").read_text())
    expected = {(s, w) for s in STAGES for w in ("lookup", "storefront", "all")}
    assert {(r["row"], r["world"]) for r in results["rows"]} == expected
    assert len(results["rows"]) == len(expected)  # one entry for each row and world
    for row in results["rows"]:
        for key in ("success", "hit_at_1", "hit_at_1_read_only", "parse_failure_frac"):
            assert row[key] is None or 0 <= row[key] <= 1
        assert row["speculated_s"] <= row["serial_s"] + 1e-9
        asked = 8 if row["world"] == "all" else 4
        assert row["n_tasks"] + row["n_vacuous"] == asked  # vacuous ones are counted apart
    assert {r["temperature"] for r in results["rows_other_temperatures"]} == {0.0}
    crossing = results["crossing"]
    assert crossing["agents"] == crossing["speculators"] == ["base", "sft", "joint"]
    assert [len(line) for line in crossing["hit_at_1"]] == [3, 3, 3]

    shown = run("report", f"--workdir={workdir}").stdout
    assert all(stage in shown for stage in STAGES)
    page = (workdir / "report.html").read_text()
    assert page.count("<svg") > 3
    assert "http://" not in page.replace("http://www.w3.org", "")

    checkpoints = workdir / "checkpoints"
    crossed = run(
        "evaluate",
        CONFIG,
        f"--checkpoint={checkpoints / 'joint'}",
        f"--speculator_checkpoint={checkpoints / 'sft'}",
    )
    told = json.loads(crossed.stdout)
    assert {r["world"] for r in told["rows"]} == {"lookup", "storefront", "all"}
    assert told["crossed"]["speculator"].endswith("sft")
