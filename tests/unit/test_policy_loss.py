"""Policy and SFT loss: reported cases with their values, and NumPy loops as twins."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentspec.losses.advantages import group_advantages, uniform_groups
from agentspec.losses.policy import kl_k3, policy_loss, truncated_weights
from agentspec.losses.sft import logps_of, sft_loss, token_logps

NAN, INF = float("nan"), float("inf")


def twin(logp, old, advantage, mask, low=0.2, high=0.28, ref=None, beta=0.0, weights=None):
    """Token mean of the clipped surrogate and k3, token by token."""
    total, n = 0.0, 0
    for b in range(len(logp)):
        for t in range(len(logp[b])):
            if not mask[b][t]:
                continue
            n += 1
            a = advantage[b] if np.ndim(advantage) == 1 else advantage[b][t]
            r = math.exp(logp[b][t] - old[b][t])
            w = 1.0 if weights is None else weights[b][t]
            total += -min(r * a, min(max(r, 1 - low), 1 + high) * a) * w
            if ref is not None:
                d = ref[b][t] - logp[b][t]
                total += beta * (math.exp(d) - d - 1)
    return total / max(n, 1)


def draw(seed):
    rng = np.random.default_rng(seed)
    logp, old, ref = (-rng.uniform(0.05, 3, (3, 7)).astype(np.float32) for _ in range(3))
    return logp, old, ref, rng.normal(size=(3, 7)).astype(np.float32), rng.integers(0, 2, (3, 7))


@pytest.mark.parametrize("seed", range(4))
def test_like_the_loop(seed):
    logp, old, ref, advantage, mask = draw(seed)
    got, _ = policy_loss(logp, old, advantage, mask)
    assert float(got) == pytest.approx(twin(logp, old, advantage, mask), abs=1e-5)
    got, _ = policy_loss(logp, old, advantage[:, 0], mask, ref_logp_BT=ref, kl_coef=0.1)
    assert float(got) == pytest.approx(
        twin(logp, old, advantage[:, 0], mask, ref=ref, beta=0.1), abs=1e-5
    )
    weights = np.asarray(truncated_weights(logp, old, mask, 1.5))
    want = np.where(mask, np.minimum(np.exp(logp - old), 1.5), 0)
    np.testing.assert_allclose(weights, want, rtol=1e-5)
    got, _ = policy_loss(logp, old, advantage, mask, weights_BT=weights)
    assert float(got) == pytest.approx(twin(logp, old, advantage, mask, weights=weights), abs=1e-5)


def test_clipping_by_hand():
    # ratios 2, 2, 0.5, 0.5 with advantages 1, -1, 1, -1
    logp = jnp.log(jnp.array([[2.0, 2.0, 0.5, 0.5]]))
    advantage, ones = jnp.array([[1.0, -1.0, 1.0, -1.0]]), jnp.ones((1, 4))

    def loss(logp):
        return policy_loss(logp, jnp.zeros((1, 4)), advantage, ones)

    (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(logp)
    # -1.28 (clipped) + 2 - 0.5 + 0.8 (clipped) = 1.02, over 4
    assert float(value) == pytest.approx(1.02 / 4)
    # only the unclipped ones have a gradient: -r A / 4
    np.testing.assert_allclose(grad, [[0, 0.5, -0.125, 0]], atol=1e-6)
    want = {"clip_high_frac": 0.25, "clip_low_frac": 0.25, "ratio_mean": 1.25}
    want |= {"ratio_max": 2.0, "ratio_min": 0.5, "kl": 0.0}
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(want)


def test_b27_b28_masked_rubbish_changes_nothing():
    logp = jnp.array([[-1.0, NAN, -INF, -2.0]])
    old = jnp.array([[-1.0, 3.0, NAN, -2.0]])
    advantage = jnp.array([[1.0, NAN, INF, 1.0]])
    ref = jnp.array([[-1.0, NAN, -INF, -2.0]])

    def loss(logp, mask):
        return policy_loss(logp, old, advantage, mask, ref_logp_BT=ref, kl_coef=0.1)[0]

    value, grad = jax.value_and_grad(loss)(logp, jnp.array([[1, 0, 0, 1]]))
    assert float(value) == pytest.approx(-1.0)
    np.testing.assert_allclose(grad, [[-0.5, 0, 0, -0.5]], atol=1e-6)
    value, grad = jax.value_and_grad(loss)(logp, jnp.zeros((1, 4), jnp.int32))
    assert float(value) == 0.0 and not np.asarray(grad).any()


def test_b35_k3_has_the_right_sign_and_value():
    half, quarter, one = [[math.log(0.5)]], [[math.log(0.25)]], [[1]]
    # exp(d) - d - 1 with d = log .25 - log .5 = -log 2: .5 + .6931 - 1
    assert float(kl_k3(half, quarter, one)[0, 0]) == pytest.approx(0.1931, abs=1e-4)
    assert float(kl_k3(quarter, half, one)[0, 0]) == pytest.approx(0.3069, abs=1e-4)
    loss, metrics = policy_loss(half, half, [0.0], one, ref_logp_BT=quarter, kl_coef=0.1)
    assert float(loss) == pytest.approx(0.01931, abs=1e-5)
    assert float(metrics["kl"]) == pytest.approx(0.1931, abs=1e-4)


def test_b36_a_far_reference_stays_finite():
    def loss(logp):
        args = (logp, jnp.zeros((1, 1)), jnp.zeros(1), jnp.ones((1, 1)))
        return policy_loss(*args, ref_logp_BT=logp + 100.0, kl_coef=0.01)[0]

    def far(logp):
        args = (logp, logp - 100.0, -jnp.ones(1), jnp.ones((1, 1)))
        return policy_loss(*args)[0]

    for f in (loss, far):
        value, grad = jax.value_and_grad(f)(jnp.zeros((1, 1)))
        assert np.isfinite(float(value)) and np.isfinite(np.asarray(grad)).all()


def test_b37_log_probs_at_the_sampling_temperature():
    logits = jnp.array([[[2.0, 1.0, 0.0]]])
    cold, _ = logps_of(logits, jnp.array([[0]]), 0.5)
    plain, _ = logps_of(logits, jnp.array([[0]]))
    assert float(cold[0, 0]) == pytest.approx(-0.1429, abs=1e-4)
    assert float(plain[0, 0]) == pytest.approx(-0.4076, abs=1e-4)
    _, metrics = policy_loss(cold, cold, [1.0], [[1]])
    assert float(metrics["ratio_mean"]) == 1.0
    _, wrong = policy_loss(plain, cold, [1.0], [[1]])
    assert float(wrong["ratio_mean"]) == pytest.approx(0.7675, abs=1e-4)
    greedy, _ = logps_of(logits, jnp.array([[0]]), 0.0)  # reported at temperature 1
    assert float(greedy[0, 0]) == float(plain[0, 0])


def test_b39_uniform_groups_kept_or_dropped():
    rewards = np.array([[1.0, 1.0], [0.0, 1.0]])  # A uniform, B not; one token a member
    advantage = group_advantages(rewards).reshape(4)
    logp, ref = jnp.log(jnp.full((4, 1), 0.5)), jnp.log(jnp.full((4, 1), 0.25))
    keep = np.repeat(~uniform_groups(rewards), 2).astype(int)[:, None]

    def loss(logp, mask, beta):
        old = jax.lax.stop_gradient(logp)
        return policy_loss(logp, old, advantage, mask, ref_logp_BT=ref, kl_coef=beta)[0]

    grad = jax.grad(loss)
    a = 0.7071  # advantages of B: -a, a; the policy gradient of a token is -A/n
    ones = jnp.ones((4, 1))
    np.testing.assert_allclose(grad(logp, ones, 0.0)[:, 0], [0, 0, a / 4, -a / 4], atol=1e-4)
    np.testing.assert_allclose(grad(logp, keep, 0.0)[:, 0], [0, 0, a / 2, -a / 2], atol=1e-4)
    # k3 gradient: 1 - exp(d) = 1 - .5; A takes part in it only where it is kept
    kl = 0.1 * 0.5
    got = grad(logp, ones, 0.1)[:, 0]
    np.testing.assert_allclose(got, np.array([kl, kl, kl + a, kl - a]) / 4, atol=1e-4)
    got = grad(logp, keep, 0.1)[:, 0]
    np.testing.assert_allclose(got, np.array([0, 0, kl + a, kl - a]) / 2, atol=1e-4)
    assert float(loss(logp, ones, 0.1)) == pytest.approx(0.1 * 0.1931, abs=1e-5)
    assert float(loss(logp, keep, 0.1)) == pytest.approx(0.1 * 0.1931, abs=1e-5)


def test_a_kl_without_reference_is_refused():
    with pytest.raises(ValueError, match="kl_coef is 0.1"):
        policy_loss([[0.0]], [[0.0]], [1.0], [[1]], kl_coef=0.1)


def test_sft_loss_like_the_loop():
    logp, _, _, _, mask = draw(7)
    kept = [logp[b][t] for b in range(3) for t in range(7) if mask[b][t]]
    assert float(sft_loss(logp, mask)) == pytest.approx(-sum(kept) / len(kept), abs=1e-5)
    rows = [[x for x, m in zip(*r, strict=True) if m] for r in zip(logp, mask, strict=True)]
    want = -np.mean([np.mean(r) for r in rows if r])
    assert float(sft_loss(logp, mask, how="sequence_mean")) == pytest.approx(want, abs=1e-5)


def test_token_logps_are_numpys():
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(3, 5, 4)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(4, 11)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 11, (3, 5)))
    mask = jnp.asarray(rng.integers(0, 2, (3, 5)))
    found = token_logps(lambda x: x @ head, hidden, targets, mask, temperature=0.7)
    z = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / 0.7
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    picked = np.take_along_axis(p, np.asarray(targets)[..., None], -1)[..., 0]
    keep = np.asarray(mask) == 1
    np.testing.assert_allclose(np.asarray(found[0])[keep], np.log(picked)[keep], atol=1e-5)
    entropy = -(p * np.log(p)).sum(-1)
    np.testing.assert_allclose(np.asarray(found[1])[keep], entropy[keep], atol=1e-5)
