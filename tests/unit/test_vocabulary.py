"""The head over parts of the vocabulary, against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentspec.losses.vocabulary import cut_head, logps_by_vocabulary, n_parts

V, D, SHAPE = 11, 4, (3, 5)


def by_hand(hidden, head, targets, slope, temperature):
    """Log-probs, entropies and the gradients of (log-probs * slope).sum(), in float64."""
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    z = hidden @ head.T / temperature
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    picked = np.take_along_axis(p, targets[..., None], -1)[..., 0]
    z_slope = slope[..., None] * (np.eye(V)[targets] - p) / temperature
    slopes = z_slope @ head, np.einsum("btv,btd->vd", z_slope, hidden)
    return np.log(picked), -(p * np.log(p)).sum(-1), slopes


@pytest.mark.parametrize("temperature", [0.7, 0.0])
@pytest.mark.parametrize(("n", "ways"), [(1, 1), (3, 1), (4, 2), (11, 1)])
def test_parts_give_the_whole_softmax(n, ways, temperature):
    rng = np.random.default_rng(n)
    hidden = 3 * rng.normal(size=(*SHAPE, D)).astype(np.float32)
    head = 2 * rng.normal(size=(V, D)).astype(np.float32)
    targets, mask = rng.integers(0, V, SHAPE), rng.integers(0, 2, SHAPE)
    slope = rng.normal(size=SHAPE) * mask

    def total(hidden, head):
        logp, entropy = logps_by_vocabulary(
            lambda hidden, part: hidden @ part.T,
            cut_head(head, n, ways),
            V,
            hidden,
            targets,
            mask,
            temperature=temperature,
        )
        return (logp * slope).sum(), (logp, entropy)

    found, slopes = jax.value_and_grad(total, (0, 1), has_aux=True)(jnp.asarray(hidden), head)
    logp, entropy, wanted = by_hand(hidden, head, targets, slope, temperature or 1.0)
    keep = mask == 1
    np.testing.assert_allclose(found[1][0][keep], logp[keep], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[1][1][keep], entropy[keep], rtol=1e-5, atol=1e-5)
    for ours, by in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(ours, by, rtol=1e-5, atol=1e-5)
    assert np.isfinite(found[1][0]).all() and np.isfinite(found[1][1]).all()


def test_parts_lie_on_all_devices_of_the_vocabulary():
    # 11 entries in 2 parts over 2 devices: 6 a part, part 0 the even ones; the last is a zero.
    parts = cut_head(jnp.arange(11.0)[:, None], 2, ways=2)
    assert parts[..., 0].tolist() == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 0]]
    assert n_parts(20480, 512) == 40 and n_parts(20481, 512) == 41
