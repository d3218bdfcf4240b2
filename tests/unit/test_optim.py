"""AdamW against a NumPy loop; schedules by hand; a reset that is a fresh optimizer."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentspec.optim import Optimizer, learning_rate, reset, update_count


def adamw(params, grads_of, o, steps, rates, fresh_at=()):
    """Float64 NumPy AdamW with clipping; moments and count new at the steps of ``fresh_at``."""
    params = {k: np.asarray(v, np.float64) for k, v in params.items()}
    for i in range(steps):
        if i == 0 or i in fresh_at:
            m = {k: np.zeros_like(v) for k, v in params.items()}
            v = {k: np.zeros_like(x) for k, x in params.items()}
            n = 0
        n += 1
        grads = grads_of(i)
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        for k, g in grads.items():
            g = g / max(1.0, norm / o.clip_norm) if o.clip_norm else g
            m[k] = o.b1 * m[k] + (1 - o.b1) * g
            v[k] = o.b2 * v[k] + (1 - o.b2) * g**2
            step = m[k] / (1 - o.b1**n) / (np.sqrt(v[k] / (1 - o.b2**n)) + o.eps)
            decay = o.weight_decay * params[k] if params[k].ndim >= 2 else 0.0
            params[k] = params[k] - rates[i] * (step + decay)
    return params


@pytest.mark.parametrize("clip_norm", (1.0, 0.0))
def test_like_the_numpy_loop_with_a_reset_in_between(clip_norm):
    o = Optimizer(lr=0.01, warmup_steps=3, weight_decay=0.1, clip_norm=clip_norm)
    rng = np.random.default_rng(0)
    start = {"w": rng.normal(size=(3, 2)), "norm": np.ones(3)}
    grads = [{k: rng.normal(size=v.shape) for k, v in start.items()} for _ in range(6)]
    state = o.init({k: jnp.asarray(v, jnp.float32) for k, v in start.items()})
    step = jax.jit(o.step)
    for i in range(6):
        if i == 4:
            state = o.reset(state)
            assert update_count(state) == 0 and int(state.step) == 4
        state, lr = step(state, {k: jnp.asarray(g, jnp.float32) for k, g in grads[i].items()})
    # the rate follows the global step through the reset: 1/3, 2/3, then constant
    rates = [0.01 / 3, 0.02 / 3, 0.01, 0.01, 0.01, 0.01]
    want = adamw(start, lambda i: grads[i], o, 6, rates, fresh_at=(4,))
    for k in want:
        np.testing.assert_allclose(state.params[k], want[k], atol=1e-6)
    assert (int(state.step), update_count(state)) == (6, 2)
    assert float(lr) == pytest.approx(0.01)


def test_reset_equals_a_fresh_state_and_keeps_the_layout():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", None))
    params = {"w": jax.device_put(jnp.ones((8, 2), jnp.bfloat16), sharding)}
    o = Optimizer(lr=0.1)
    state, _ = o.step(o.init(params), params)
    again = reset(state)
    for a, b in zip(
        jax.tree.leaves(again.opt_state), jax.tree.leaves(o.init(params).opt_state), strict=True
    ):
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)
        np.testing.assert_array_equal(a, b)
    moments = [x for x in jax.tree.leaves(again.opt_state) if x.ndim]
    assert len(moments) == 2
    assert all(x.dtype == jnp.float32 for x in moments)
    assert all(x.sharding.is_equivalent_to(sharding, 2) for x in moments)
    assert again.params is state.params and int(again.step) == 1


def test_learning_rates_by_hand():
    cosine = Optimizer(lr=2.0, decay="cosine", warmup_steps=2, total_steps=6, final_lr_frac=0.1)
    rates = [float(learning_rate(cosine, s)) for s in range(8)]
    # warm-up 1/2, 2/2; then .1 + .9 (1 + cos(pi k/4))/2 for k = 0..4, held after
    half = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in range(5)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, *(2 * h for h in half[1:]), 0.2], abs=1e-6)
    constant = Optimizer(lr=3.0, warmup_steps=4)
    assert [float(learning_rate(constant, s)) for s in range(6)] == pytest.approx(
        [0.75, 1.5, 2.25, 3, 3, 3]
    )


def test_reset_schedule_counts_since_the_reset():
    for reset_schedule, want in ((False, 1.0), (True, 0.25)):
        o = Optimizer(lr=1.0, warmup_steps=4, reset_schedule=reset_schedule)
        state = o.init({"w": jnp.ones((1, 1))})
        for _ in range(5):
            state, _ = o.step(state, {"w": jnp.ones((1, 1))})
        _, lr = o.step(o.reset(state), {"w": jnp.ones((1, 1))})
        assert float(lr) == want


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decay": "linear"}, "constant or cosine, got 'linear'"),
        ({"decay": "cosine", "total_steps": 3, "warmup_steps": 3}, "3 and 3"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"clip_norm": -1.0}, "clip_norm must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Optimizer(**wrong)
