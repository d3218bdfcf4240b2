"""The job on real input, whole and shrunken: real weights, real paragraphs, real recordings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agentspec.checkpoint import restore_params
from agentspec.configuration import settings_from
from agentspec.evaluate import evaluate_run
from agentspec.train import train


@pytest.mark.slow
def test_smollm2_trains_and_is_evaluated_on_hotpotqa(
    tmp_path: Path, data_dir, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = data_dir("multihop_qa")
    data_dir("search_trajectories")
    monkeypatch.setenv("AGENTSPEC_DATA", str(questions.parent))
    from configs.hotpot_smollm2 import get_config

    config = get_config()
    config.sft.update(dict(steps=1, rows_per_step=1, n_examples=16, warmup_steps=0))
    config.joint.steps = 2
    config.schedule.update(dict(agent_steps=1, speculator_steps=1))
    config.agent.group_size = 2
    config.speculator.update(dict(tasks_per_step=1, prefixes_per_step=3, group_size=2))
    config.speculator.max_tokens = 8
    config.episode.max_turns = 3
    config.engine.update(dict(rows=2, speculator_rows=2))
    config.evaluate.tasks_per_world = 1
    settings = settings_from(config)
    assert settings.model.path == str(smollm2_gguf)
    train(settings, tmp_path)
    base = restore_params(tmp_path / "checkpoints" / "base")
    sft = restore_params(tmp_path / "checkpoints" / "sft")
    assert base["embedding"].shape == (49152, 576)
    moved = np.abs(np.asarray(base["embedding"]) - np.asarray(sft["embedding"]))
    assert 0 < moved.max() <= 1.001 * settings.sft.lr  # one Adam step moves a weight by lr at most
    rows = evaluate_run(settings, tmp_path)["rows"]
    assert [r["row"] for r in rows if r["world"] == "all"] == ["base", "sft", "joint"]
    assert all(r["n_tasks"] == 1 for r in rows)
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["stage"], r["phase"]) for r in logged] == [
        ("sft", "sft"),
        ("joint", "agent"),
        ("joint", "speculator"),
    ]
    assert np.isfinite(logged[0]["loss"])
