"""The three averages: values by hand, the reported cases, and a NumPy loop as twin."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentspec.losses.aggregate import aggregate, count

HOWS = ("token_mean", "sequence_mean", "constant_length")
NAN = float("nan")


def twin(values, mask, how, segments=None, max_tokens=None):
    """Loops over tokens; a sequence is a (row, segment)."""
    sequences = {}
    for b in range(len(values)):
        for t in range(len(values[b])):
            if mask[b][t]:
                key = (b, None if segments is None else segments[b][t])
                sequences.setdefault(key, []).append(float(values[b][t]))
    if not sequences:
        return 0.0
    tokens = [x for xs in sequences.values() for x in xs]
    if how == "token_mean":
        return sum(tokens) / len(tokens)
    if how == "sequence_mean":
        return sum(sum(xs) / len(xs) for xs in sequences.values()) / len(sequences)
    return sum(tokens) / (len(sequences) * max_tokens)


@pytest.mark.parametrize(("how", "want"), list(zip(HOWS, (1.6, 2.5, 1.0), strict=True)))
def test_b33_each_name_gives_its_value(how, want):
    values, mask = [[1.0, 1, 1, 1], [4, NAN, NAN, NAN]], [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert float(aggregate(values, mask, how, max_tokens=4)) == pytest.approx(want)
    packed = dict(segment_ids_BT=[[1, 1, 1, 1, 2, 0, 0]], max_tokens=4)  # the same in one row
    got = aggregate([[1.0, 1, 1, 1, 4, NAN, 9]], [[1, 1, 1, 1, 1, 0, 0]], how, **packed)
    assert float(got) == pytest.approx(want)


@pytest.mark.parametrize("how", HOWS)
def test_b27_nothing_kept_gives_loss_0_and_gradient_0(how):
    def loss(values):
        return aggregate(values, jnp.zeros((2, 3)), how, max_tokens=3)

    value, grad = jax.value_and_grad(loss)(jnp.ones((2, 3)))
    assert float(value) == 0.0 and not np.asarray(grad).any()


@pytest.mark.parametrize("how", ("token_mean", "sequence_mean"))
def test_b28_nan_under_the_mask_does_not_get_through(how):
    def loss(values):
        return aggregate(values, [[1, 0, 1]], how)

    value, grad = jax.value_and_grad(loss)(jnp.array([[1.0, NAN, 3.0]]))
    assert float(value) == 2.0
    assert grad.tolist() == [[0.5, 0.0, 0.5]]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("with_segments", (False, True))
def test_like_the_numpy_loop_and_parts_add_up(how, with_segments):
    rng = np.random.default_rng(0)
    for _ in range(5):
        values = rng.normal(size=(4, 9)).astype(np.float32)
        mask = rng.integers(0, 2, (4, 9))
        segments = rng.choice([0, 1, 2, 700], (4, 9)) if with_segments else None
        kw = {"segment_ids_BT": segments, "max_tokens": 9}
        want = twin(values, mask, how, segments, 9)
        assert float(aggregate(values, mask, how, **kw)) == pytest.approx(want, abs=1e-5)
        total = float(count(mask, how, **kw))
        parts = 0.0  # two micro-batches under the one global denominator
        for half in (slice(0, 2), slice(2, 4)):
            own = None if segments is None else segments[half]
            parts += float(
                aggregate(
                    values[half],
                    mask[half],
                    how,
                    segment_ids_BT=own,
                    max_tokens=9,
                    denominator=total,
                )
            )
        assert parts == pytest.approx(want, abs=1e-5)


def test_wrong_names_and_missing_lengths_are_refused():
    with pytest.raises(ValueError, match="'mean' is unknown; allowed: token_mean"):
        aggregate([[1.0]], [[1]], "mean")
    with pytest.raises(ValueError, match="max_tokens"):
        aggregate([[1.0]], [[1]], "constant_length", denominator=1.0)
