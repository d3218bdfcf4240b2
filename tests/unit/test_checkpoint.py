"""Checkpoints: the reported cases, damage, and bit-exact resumption with the real update."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from agentspec.checkpoint import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpoint,
    abstract,
    restore_params,
)
from agentspec.model.config import ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.optim import Optimizer, update_count
from agentspec.settings import LossSettings
from agentspec.tokens.pack import pack
from agentspec.types import TreeRow
from agentspec.update import make_update


def state_at(step, value=1.0, sharding=None):
    w = jnp.arange(32, dtype=jnp.float32).reshape(8, 4) * value
    params = {"layers": {0: {"w": w}, 1: {"w": w + 1}}, "norm": jnp.ones(4, jnp.bfloat16)}
    if sharding is not None:
        params = jax.device_put(params, {
            "layers": {0: {"w": sharding}, 1: {"w": sharding}},
            "norm": NamedSharding(sharding.mesh, PartitionSpec()),
        })  # fmt: skip
    return Optimizer().init(params).replace(step=jnp.int32(step))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def filled(directory, steps, **kw):
    with Checkpointer(directory, keep=9, **kw) as c:
        for step in steps:
            c.save(step, state_at(step, step), {"step": step})


def biggest(directory):
    files = [p for p in Path(directory).rglob("*") if p.is_file() and "state" in p.parts]
    return max(files, key=lambda p: p.stat().st_size)


def test_what_is_saved_comes_back_with_its_meta(tmp_path):
    meta = {"phase": "agent", "next_task": 7, "config": {"lr": 0.1}, "stages": ["base"]}
    with Checkpointer(tmp_path) as c:
        assert c.latest() is None
        c.save(3, state_at(3, 2.0), meta)
        found, found_meta = c.restore(abstract(state_at(0)))
        assert c.latest() == 3
    equal(found, state_at(3, 2.0))
    assert found_meta == meta


def test_more_trees_beside_the_state(tmp_path):
    tree = {"state": state_at(1), "best": {"w": jnp.ones(2)}, "a": {"z": jnp.zeros(3)}}
    with Checkpointer(tmp_path) as c:
        c.save(1, tree, {})
        found, _ = c.restore(abstract(tree))
    equal(found, tree)


def test_weights_alone_for_evaluation(tmp_path):
    filled(tmp_path, (2, 5))
    equal(restore_params(str(tmp_path)), state_at(5, 5).params)  # int keys of dicts come back
    equal(restore_params(f"{tmp_path}:2"), state_at(2, 2).params)
    equal(restore_params(tmp_path, target=abstract(state_at(0).params)), state_at(5, 5).params)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 4 in .*: \[2, 5\]"):
        restore_params(f"{tmp_path}:4")


@pytest.mark.parametrize("target", ("one device", "4x2"))
def test_b42_b43_saved_on_2x4_restored_elsewhere(tmp_path, target):
    devices = np.array(jax.devices())
    assert len(devices) == 8
    old = NamedSharding(Mesh(devices.reshape(2, 4), ("x", "y")), PartitionSpec("x", "y"))
    state = state_at(1, 3.0, old)
    with Checkpointer(tmp_path) as c:
        c.save(1, state, {})
        shapes = jax.eval_shape(lambda: state_at(1))
        with pytest.raises(CheckpointError, match="params/layers/0/w has no sharding"):
            c.restore(shapes)
        with pytest.raises(CheckpointError, match="params/layers/0/w has no sharding"):
            c.restore(abstract(shapes))
        if target == "one device":
            new = SingleDeviceSharding(devices[3])
        else:
            new = NamedSharding(Mesh(devices.reshape(4, 2), ("x", "y")), PartitionSpec())
        wanted = abstract(shapes, new)
        if target == "4x2":
            cut = NamedSharding(new.mesh, PartitionSpec("x", "y"))
            wanted.params["layers"][0]["w"] = abstract(shapes.params["layers"][0]["w"], cut)
        found, _ = c.restore(wanted)
    equal(found, state_at(1, 3.0))
    for leaf, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == want.sharding
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(found)} == (
        {1} if target == "one device" else {8}
    )


def test_a_target_of_another_model_names_the_array(tmp_path):
    filled(tmp_path, (1,))
    other = state_at(1)
    other.params["norm"] = jnp.ones(5, jnp.bfloat16)
    with (
        Checkpointer(tmp_path) as c,
        pytest.raises(
            CheckpointError, match=r"params/norm was saved as \[\[4\], 'bfloat16'\].*wants \[\[5\]"
        ),
    ):
        c.restore(abstract(other))


class Held:
    """Holds a Checkpointer's background work until released."""

    def __init__(self, checkpointer):
        self.release = threading.Event()
        checkpointer._pool.submit(self.release.wait, 60)


@pytest.mark.parametrize("how", ("save", "close", "wait"))
def test_b45_a_failed_background_save_raises_at_the_next_call(tmp_path, how):
    directory = tmp_path / "run"
    c = Checkpointer(directory)
    held = Held(c)
    c.save(1, state_at(1), {})
    c._orbax.wait_until_finished()
    shutil.rmtree(directory)  # the disk goes away (root ignores read-only folders)
    directory.write_text("not a folder")
    held.release.set()
    with pytest.raises((OSError, ValueError)):
        if how == "save":
            c.save(2, state_at(2), {})
        else:
            getattr(c, how)()
    c.close()


_KILLED = """
import os, signal, sys, threading
import jax.numpy as jnp
from agentspec.checkpoint import Checkpointer
from agentspec.optim import Optimizer
c = Checkpointer(sys.argv[1], keep=1)
state = Optimizer().init({"w": jnp.ones((8, 4))})
c.save(10, state.replace(step=jnp.int32(10)), {"step": 10})
c.wait()
c._pool.submit(threading.Event().wait, 60)  # the background work never gets to commit
c.save(20, state.replace(step=jnp.int32(20)), {"step": 20})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_b46_killed_right_after_save_resumes_from_the_one_before(tmp_path):
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).resolve().parents[2]))
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], env=env, timeout=120)
    assert done.returncode == -signal.SIGKILL
    state = Optimizer().init({"w": jnp.ones((8, 4))})
    with Checkpointer(tmp_path, keep=1) as c:
        assert c.latest() == 10
        assert c.read_meta() == {"step": 10}
        c.restore(abstract(state))
        c.save(20, state.replace(step=jnp.int32(20)), {"step": 20})  # over what was left
        c.wait()
        assert c.steps() == [20]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000020"]


def test_b46_old_ones_go_only_after_the_commit(tmp_path):
    with Checkpointer(tmp_path, keep=2) as c:
        for step in (1, 2):
            c.save(step, state_at(step), {})
        c.wait()
        held = Held(c)
        c.save(3, state_at(3), {})
        assert (c.steps(), c.latest()) == ([1, 2], 2)
        held.release.set()
        c.wait()
        assert c.steps() == [2, 3]


def test_b48_a_step_already_there_raises_unless_forced(tmp_path):
    with Checkpointer(tmp_path) as c:
        c.save(3, state_at(3, 1.0), {})
        with pytest.raises(CheckpointError, match="00000003 exists; force=True"):
            c.save(3, state_at(3, 2.0), {})
        c.save(3, state_at(3, 2.0), {"again": True}, force=True)
        found, meta = c.restore(abstract(state_at(0)))
    equal(found, state_at(3, 2.0))
    assert meta == {"again": True}
    assert [p.name for p in tmp_path.iterdir()] == ["00000003"]


def test_wrong_steps_and_meta_are_refused_before_anything_is_written(tmp_path):
    with Checkpointer(tmp_path) as c:
        with pytest.raises(CheckpointError, match=r"save\(step=4\) of a state whose step is 3"):
            c.save(4, state_at(3), {})
        with pytest.raises(TypeError, match="not JSON serializable"):
            c.save(3, state_at(3), {"x": object()})
        with pytest.raises(CheckpointError, match="no checkpoint in .*; steps there: none"):
            c.restore(abstract(state_at(0)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="keep must be at least 1"):
        Checkpointer(tmp_path, keep=0)


def _truncate(directory):
    file = biggest(directory)
    file.write_bytes(file.read_bytes()[:-1])
    return file


def _flip(directory):
    file = biggest(directory)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def _remove(directory):
    file = biggest(directory)
    file.unlink()
    return file


def _spoil_manifest(directory):
    (directory / "manifest.json").write_text('{"files": ')
    return directory / "manifest.json"


def _spoil_meta(directory):
    (directory / "meta.json").write_text("{")
    return directory / "meta.json"


@pytest.mark.parametrize("damage", (_truncate, _flip, _remove, _spoil_manifest, _spoil_meta))
def test_a_damaged_newest_is_named_and_the_one_before_is_used(tmp_path, damage):
    filled(tmp_path, (1, 2))
    file = damage(tmp_path / "00000002")
    with Checkpointer(tmp_path) as c:
        with pytest.warns(UserWarning, match=f"{file}.*step 1 instead"):
            found, meta = c.restore(abstract(state_at(0)))
        assert meta == {"step": 1}
        equal(found, state_at(1, 1))
        with pytest.raises(DamagedCheckpoint, match=str(file)):
            c.restore(abstract(state_at(0)), step=2)
        first = damage(tmp_path / "00000001")
        with pytest.raises(
            DamagedCheckpoint, match=f"no sound checkpoint is left.*{file}.*{first}"
        ):
            c.restore(abstract(state_at(0)))


def test_b49_resumed_training_is_bit_equal_to_unbroken(tmp_path):
    model = LanguageModel(ModelConfig(64, 16, 2, 4, 2, 4, 32, 10000.0))
    start = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    optimizer = Optimizer(lr=0.01, decay="cosine", warmup_steps=2, total_steps=10)
    update = make_update(model, optimizer, LossSettings())
    rng = np.random.default_rng(0)
    rows = [
        TreeRow(
            tuple(int(i) for i in rng.integers(1, 64, 8)), (0,) + (1,) * 7, (-4.0,) * 8, (-1.0) ** i
        )
        for i in range(40)
    ]

    def train(state, steps, checkpointer=None):
        for i in steps:
            state, _ = update(state, pack(rows[4 * i : 4 * i + 4], 16, 1))
            if checkpointer and i == 4:  # in the loop, after the update, arrays donated right after
                checkpointer.save(i + 1, state, {"next": i + 1})
        return state

    with Checkpointer(tmp_path) as c:
        whole = train(optimizer.init(jax.tree.map(jnp.asarray, start)), range(10), c)
    with Checkpointer(tmp_path) as c:
        state, meta = c.restore(abstract(jax.eval_shape(optimizer.init, start),
                                         SingleDeviceSharding(jax.devices()[0])))  # fmt: skip
    assert meta["next"] == 5 == int(state.step) == update_count(state)
    resumed = train(state, range(meta["next"], 10))
    equal(resumed, whole)
    assert int(resumed.step) == update_count(resumed) == 10


def test_the_manifest_is_plain_json(tmp_path):
    filled(tmp_path, (1,))
    manifest = json.loads((tmp_path / "00000001" / "manifest.json").read_text())
    assert manifest["arrays"]["params/layers/1/w"] == [[8, 4], "float32"]
    assert manifest["paths"]["params/layers/1/w"] == ["layers", 1, "w"]
    assert "meta.json" in manifest["files"]
