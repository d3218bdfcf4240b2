"""A 2 GB model is loaded and exported in little more memory than its largest tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from agentspec.configuration import flat_settings
from agentspec.model.config import ModelConfig
from agentspec.model.hf_config import config_to_hf
from agentspec.model.hf_names import hf_tensors, leaf_names
from agentspec.model.safetensors_files import Outgoing, read_folder, write_folder
from agentspec.model.transformer import LanguageModel
from agentspec.settings import Settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"),
]
ROOT = Path(__file__).resolve().parents[2]
MB = 10**6
MARGIN = 300 * MB
CONFIG = ModelConfig(
    vocab_size=48828,
    d_model=2048,
    n_layers=15,
    n_heads=16,
    n_kv_heads=8,
    head_dim=128,
    d_ff=8192,
    rope_theta=1e6,
    dtype="bfloat16",
)
PEAK = """
def memory(key):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024

def reset_peak():
    open("/proc/self/clear_refs", "w").write("5")
"""
LOAD = """
import json, sys, jax
from agentspec.mesh import make_mesh
from agentspec.model.weights import load_model
from agentspec.checkpoint import Checkpointer
from agentspec.state import TrainState

folder, scan, devices, checkpoints = sys.argv[1:]
mesh = make_mesh(1, 2, 2) if devices == "4" else None
before = memory("VmRSS")
reset_peak()
loaded = load_model(folder, mesh=mesh, scan=scan == "scan")
peak = memory("VmHWM")
arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
if checkpoints:
    state = TrainState(loaded.params, (), jax.numpy.int32(1))
    with Checkpointer(checkpoints) as checkpointer:
        checkpointer.save(1, state, {})
print(json.dumps({"before": before, "peak": peak, "arrays": arrays}))
"""
EXPORT = """
import json, sys, pathlib
from agentspec.export import export

before = memory("VmRSS")
reset_peak()
n_bytes = export(sys.argv[1], pathlib.Path(sys.argv[2]))
print(json.dumps({"before": before, "peak": memory("VmHWM"), "written": n_bytes}))
"""


def run(program: str, *arguments: str, devices: int = 1) -> dict[str, int]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", PEAK + program, *arguments],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    numbers = json.loads(done.stdout.splitlines()[-1])
    print({name: f"{size / MB:.0f} MB" for name, size in numbers.items()})
    return numbers


@pytest.fixture(scope="module")
def big_model(tmp_path_factory):
    """(folder, bytes of the largest tensor)."""
    folder = tmp_path_factory.mktemp("big") / "model"
    folder.mkdir()
    values = (np.arange(1 << 24) % 0x7F80).astype(np.uint16).view(ml_dtypes.bfloat16)  # finite
    shapes = {name: like.shape for name, like in leaf_names(LanguageModel(CONFIG).shapes).items()}

    def blocks(size, number):
        for start in range(0, size, len(values)):
            yield np.roll(values, number)[: min(len(values), size - start)]

    tensors = [
        Outgoing(t.name, values.dtype, t.shape, lambda t=t, i=i: blocks(int(np.prod(t.shape)), i))
        for i, t in enumerate(hf_tensors(CONFIG, shapes))
    ]
    write_folder(folder, tensors, 10**9)
    (folder / "config.json").write_text(json.dumps(config_to_hf(CONFIG)))
    assert sum(t.nbytes for t in tensors) > 1900 * MB
    yield folder, max(t.nbytes for t in tensors)
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize(("layout", "devices"), [("layers", 1), ("scan", 4)])
def test_loading(big_model, layout, devices):
    folder, largest = big_model
    numbers = run(LOAD, str(folder), layout, str(devices), "", devices=devices)
    assert numbers["arrays"] > 1900 * MB
    assert numbers["peak"] - numbers["arrays"] <= largest + MARGIN  # Python and JAX included


def test_exporting(big_model, tmp_path):
    folder, largest = big_model
    (tmp_path / "run").mkdir()
    settings = flat_settings(Settings()) | {"model.path": str(folder)}
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings))
    checkpoint, out = tmp_path / "run" / "checkpoints" / "joint", tmp_path / "out"
    run(LOAD, str(folder), "scan", "1", str(checkpoint))
    numbers = run(EXPORT, str(checkpoint), str(out))
    assert numbers["peak"] <= largest + MARGIN
    before, after = read_folder(folder), read_folder(out)
    assert before.keys() == after.keys()
    assert sum(stored.nbytes for stored in after.values()) == numbers["written"]
    for name in ("model.embed_tokens.weight", "model.layers.13.mlp.down_proj.weight"):
        same = zip(before[name].blocks(), after[name].blocks(), strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in same), name
