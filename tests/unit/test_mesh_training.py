"""Training on 8 virtual devices equals training on one: loss, gradients, one optimizer step."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agentspec.mesh import make_mesh, param_shardings
from agentspec.model.config import LinearShape, ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.optim import Optimizer
from agentspec.settings import LossSettings
from agentspec.tokens.pack import PackedBatch, pack
from agentspec.types import Branch, TreeRow
from agentspec.update import make_update

SIZES = dict(
    vocab_size=64, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, rope_theta=1e4
)
DENSE = ModelConfig(n_layers=2, tie_embeddings=False, remat="full", scan=True, **SIZES)
HYBRID = ModelConfig(
    n_layers=2,
    family="qwen3_5",
    layer_types=("linear", "full"),
    linear=LinearShape(key_heads=2, value_heads=4, key_dim=8, value_dim=8),
    chunk=16,
    remat="dots",
    **SIZES,
)
MESHES = {"8x1": (8, 1, 1), "2x4": (2, 4, 1), "4x2": (1, 4, 2), "2x2x2": (2, 2, 2)}
OPTIMIZER = Optimizer(lr=0.001, eps=1e-5, weight_decay=0.1, clip_norm=0.5)
LOSS = LossSettings(logits_chunk_tokens=16)


def batches() -> list[PackedBatch]:
    """Two micro-batches of 8 rows with trees in them."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(16):
        n = int(rng.integers(30, 40))
        ids = tuple(int(x) for x in rng.integers(1, 64, n))
        branch = Branch(20, ids[:6], (0, 0, 1, 1, 1, 1), (-4.0,) * 6, float(rng.normal()))
        mask = (0,) * 10 + (1,) * (n - 10)
        rows.append(TreeRow(ids, mask, (-4.0,) * n, float(rng.normal()), (branch,)))
    return pack(rows, 48, 8, branch_table=True)


@functools.cache
def on_one(config: ModelConfig):
    """Start weights, gradients, and the state and numbers after one step on one device."""
    model = LanguageModel(config)
    start = jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))
    update = make_update(model, OPTIMIZER, LOSS)
    loss, grads, _ = update.grads(start, batches()[0])
    state, numbers = update(OPTIMIZER.init(jax.tree.map(jax.numpy.asarray, start)), batches())
    return start, loss, grads, state, numbers


@pytest.mark.parametrize("config", [DENSE, HYBRID], ids=["dense", "hybrid"])
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_a_mesh_trains_like_one_device(shape, config):
    start, loss, grads, state, numbers = on_one(config)
    mesh = make_mesh(*shape)
    model = LanguageModel(config, mesh)
    where = param_shardings(model.logical_axes, model.shapes, mesh)
    params = jax.device_put(start, where)
    update = make_update(model, OPTIMIZER, LOSS, mesh=mesh)
    mesh_loss, mesh_grads, _ = update.grads(params, batches()[0])
    assert float(mesh_loss) == pytest.approx(float(loss), abs=1e-5)
    close(mesh_grads, grads)
    for grad, sharding in zip(jax.tree.leaves(mesh_grads), jax.tree.leaves(where), strict=True):
        assert grad.sharding.is_equivalent_to(sharding, grad.ndim)
    places = OPTIMIZER.shardings(model.shapes, where)
    init = jax.jit(OPTIMIZER.init, out_shardings=places)
    mesh_state, mesh_numbers = update(init(params), batches())
    assert mesh_numbers == pytest.approx(numbers, abs=1e-5)
    close(mesh_state.params, state.params)
    close(mesh_state.opt_state, state.opt_state)
    for leaf, place in zip(jax.tree.leaves(mesh_state), jax.tree.leaves(places), strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


def close(a, b):
    leaves = jax.tree_util.tree_leaves_with_path(a)
    for (path, x), y in zip(leaves, jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_moments_are_cut_like_their_weights():
    mesh = make_mesh(2, 2, 2)
    model = LanguageModel(DENSE, mesh)
    where = param_shardings(model.logical_axes, model.shapes, mesh)
    places = dataclasses.asdict(OPTIMIZER.shardings(model.shapes, where))
    moments = [leaf for leaf in jax.tree.leaves(places["opt_state"]) if leaf.spec != ()]
    assert len(moments) >= 2 * 8  # both moments of the cut weights
    assert where["layers"]["0"]["mlp"]["up"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert places["step"] == NamedSharding(mesh, PartitionSpec())


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 8), "'kv_heads' of size 2 is not divisible by mesh axis 'tensor' of size 8"),
        ((2, 2, 1), "needs 4 devices, got 8"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_both_numbers(shape, message):
    with pytest.raises(ValueError, match=message):
        mesh = make_mesh(*shape)
        param_shardings(LanguageModel(DENSE).logical_axes, LanguageModel(DENSE).shapes, mesh)
