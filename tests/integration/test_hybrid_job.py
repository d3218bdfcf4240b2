"""A Qwen3.5 folder the whole way: trained on one device and on a mesh, evaluated, exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agentspec.configuration import settings_from
from agentspec.job import build_job
from configs.tiny import get_config

torch = pytest.importorskip("torch", reason="makes the folder: pip install -e .[test]")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SHORT = [
    "--config=configs/tiny.py:smoke",
    "--config.stages=('base', 'joint')",
    "--config.base.steps=4",
    "--config.joint.start=base",
    "--config.joint.steps=3",
    "--config.evaluate.tasks_per_world=2",
    "--config.evaluate.temperatures=(1.0,)",
    "--config.evaluate.crossing=()",
    "--config.model.scan",
    "--config.model.remat=full",
]


def run(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"agentspec.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=400,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 text model with the embedded default's tokenizer."""
    folder = tmp_path_factory.mktemp("qwen3_5")
    tokenizer = build_job(settings_from(get_config("smoke"))).tokenizer
    tokenizer.save(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
    )
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_train_evaluate_export(folder: Path, tmp_path: Path):
    model = f"--config.model.path={folder}"
    meshes = {"one": [], "mesh": ["--config.mesh.data=2", "--config.mesh.fsdp=4"]}
    losses = {}
    for name, mesh in meshes.items():
        run("train", *SHORT, model, *mesh, f"--workdir={tmp_path / name}")
        rows = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [row["loss"] for row in map(json.loads, rows) if row["stage"] != "joint"]
    assert len(losses["one"]) == 4 and losses["one"][-1] < losses["one"][0]
    np.testing.assert_allclose(losses["mesh"], losses["one"], atol=1e-4)
    run("evaluate", *SHORT, model, *meshes["mesh"], f"--workdir={tmp_path / 'mesh'}")
    results = json.loads((tmp_path / "mesh" / "results.json").read_text())
    assert {row["row"] for row in results["rows"]} == {"base", "joint"}

    out = tmp_path / "out"
    run("export", f"--checkpoint={tmp_path / 'mesh' / 'checkpoints' / 'joint'}", f"--out={out}")
    exported, info = transformers.Qwen3_5ForCausalLM.from_pretrained(
        out, output_loading_info=True, local_files_only=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before = transformers.Qwen3_5ForCausalLM.from_pretrained(folder, local_files_only=True)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        change = (exported(ids).logits - before(ids).logits).abs().max()
    assert 0 < float(change) < 10  # it was trained
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
