"""One draw per row: log-probs, entropies, greedy, seeds, and the distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentspec.rollout import sampling

BASE = jax.random.key(0)


def draw(logits, seeds, positions, temperatures):
    keys = sampling.row_keys(BASE, jnp.asarray(seeds, jnp.uint32))
    out = jax.jit(sampling.sample)(
        jnp.asarray(logits, jnp.float32),
        keys,
        jnp.asarray(positions, jnp.int32),
        jnp.asarray(temperatures, jnp.float32),
    )
    return [np.asarray(x) for x in out]


def test_b37_log_probs_are_those_at_the_sampling_temperature():
    # logits [2, 1, 0], first token, T = 0.5: 4 - log(e^4 + e^2 + e^0) = -0.1429; at T = 1 -0.4076
    logits = [[2.0, 1.0, 0.0]] * 200
    ids, logps, _ = draw(logits, range(200), [5] * 200, [0.5] * 200)
    assert logps[ids == 0] == pytest.approx(-0.1429, abs=1e-4)
    assert logps[ids == 1] == pytest.approx(-2.1429, abs=1e-4)
    ids, logps, _ = draw(logits, range(200), [5] * 200, [1.0] * 200)
    assert logps[ids == 0] == pytest.approx(-0.4076, abs=1e-4)


def test_greedy_takes_the_first_largest_and_reports_log_probs_at_one():
    logits = [[0.0, 3.0, 3.0, 1.0], [1.0, 0.0, 0.0, 0.0]]
    ids, logps, entropies = draw(logits, [1, 2], [0, 0], [0, 0])
    assert ids.tolist() == [1, 0]
    # 3 - log(1 + 2 e^3 + e) = -0.7817; 1 - log(e + 3) = -0.7437
    assert logps == pytest.approx([-0.7817, -0.7437], abs=1e-4)
    p = np.exp([1.0, 0, 0, 0]) / np.exp([1.0, 0, 0, 0]).sum()
    assert entropies[1] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)


def test_entropy_of_uniform_and_of_a_forbidden_token():
    _, _, entropies = draw([[0.0] * 8, [0.0] * 4 + [-np.inf] * 4], [0, 0], [0, 0], [1.0, 2.0])
    assert entropies == pytest.approx([np.log(8), np.log(4)], abs=1e-5)


def test_a_draw_depends_on_seed_and_position_and_not_on_the_row():
    logits = np.random.default_rng(0).normal(size=(1, 37)).repeat(6, axis=0)
    ids, _, _ = draw(logits, [7] * 6, range(6), [1.0] * 6)
    back, _, _ = draw(logits, [7] * 6, range(5, -1, -1), [1.0] * 6)
    assert ids.tolist() == back[::-1].tolist()
    other, _, _ = draw(logits, [8] * 6, range(6), [1.0] * 6)
    assert len(set(ids.tolist())) > 1
    assert ids.tolist() != other.tolist()


def test_frequencies_follow_the_softmax():
    n = 20_000
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    ids, _, _ = draw(np.tile(logits, (n, 1)), np.arange(n), [11] * n, [1.0] * n)
    share = np.bincount(ids, minlength=4) / n
    # standard error of a share is at most 0.0036
    np.testing.assert_allclose(share, [0.5, 0.3, 0.15, 0.05], atol=0.015)
    ids, _, _ = draw(np.tile(logits, (n, 1)), [3] * n, np.arange(n), [1.0] * n)
    share = np.bincount(ids, minlength=4) / n
    np.testing.assert_allclose(share, [0.5, 0.3, 0.15, 0.05], atol=0.015)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ValueError, match=f"seed {seed} is out of range.*0..4294967295"):
        sampling.check_seed(seed)
    assert sampling.check_seed(2**32 - 1) == 2**32 - 1
