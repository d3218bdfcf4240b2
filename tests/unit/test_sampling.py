"""One draw per row: log-probs, entropies, greedy, seeds, limits, and the distribution."""

from __future__ import annotations

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentspec.rollout import sampling
from agentspec.types import SamplingParams

BASE = jax.random.key(0)
SAMPLE = jax.jit(sampling.sample)


def draw(logits, seeds, positions, temperatures, top_p=1.0, top_k=0, barred=None, forced=-1):
    """``sample`` with one value for all rows, or one for each; ``barred`` a list per row."""
    n = len(logits)
    width = max(map(len, barred or [[]])) + 1  # -1 is padding
    barred_RK = np.full((n, width), -1, np.int32)
    for r, ids in enumerate(barred or []):
        barred_RK[r, : len(ids)] = ids
    out = SAMPLE(
        jnp.asarray(logits, jnp.float32),
        sampling.row_keys(BASE, jnp.asarray(seeds, jnp.uint32)),
        jnp.asarray(positions, jnp.int32),
        sampling.Draw(
            temperature_R=np.broadcast_to(np.float32(temperatures), n),
            top_p_R=np.broadcast_to(np.float32(top_p), n),
            top_k_R=np.broadcast_to(np.int32(top_k), n),
            barred_RK=barred_RK,
            forced_R=np.broadcast_to(np.int32(forced), n),
        ),
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


# -- limits ----------------------------------------------------------------------------------------

V = 24
LEAST = jax.jit(sampling.least_logits)


def logits_like(seed: int, n: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, V)).astype(np.float32) * 2


def left_by_transformers(scaled: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which ids its warpers leave [V], in its order; with the equals of the smallest left."""
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.from_numpy(scaled.copy())[None]
    if top_k:
        scores = warpers.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = warpers.TopPLogitsWarper(top_p)(None, scores)
    left = np.isfinite(scores[0].numpy())
    assert left.any()
    return scaled >= scaled[left].min()


def is_close_call(scaled: np.ndarray, top_k: int, top_p: float) -> bool:
    """Whether float32 rounding may decide if an id crosses ``top_p`` (sums in float64)."""
    falling = np.sort(scaled.astype(np.float64))[::-1]
    kept = falling[falling >= falling[min(top_k or V, V) - 1]]
    sums = np.cumsum(np.exp(kept - kept[0]) / np.exp(kept - kept[0]).sum())
    return bool(top_p < 1 and np.min(np.abs(sums - top_p)) < 1e-5)


real_logits = st.lists(st.floats(-30, 30, width=32), min_size=V, max_size=V)
few_values = st.lists(st.integers(-3, 3).map(float), min_size=V, max_size=V)  # many equals
some_top_p = st.one_of(st.just(1.0), st.floats(0.01, 0.9999))


@settings(max_examples=400, deadline=None)
@given(st.one_of(real_logits, few_values), st.integers(0, V + 6), some_top_p)
def test_top_k_and_top_p_leave_the_ids_that_transformers_leaves(logits, top_k, top_p):
    scaled = np.array(logits, np.float32)
    assume(not is_close_call(scaled, top_k, top_p))
    least = LEAST(scaled[None], np.float32([top_p]), np.int32([top_k]))
    left = scaled >= np.asarray(least)
    assert left.tolist() == left_by_transformers(scaled, top_k, top_p).tolist()


@pytest.mark.parametrize(
    ("logits", "top_k", "top_p", "left"),
    [
        # shares .5, .3, .15, .05: the id that crosses p stays
        (np.log([0.05, 0.5, 0.15, 0.3]), 0, 0.7, [1, 3]),
        (np.log([0.05, 0.5, 0.15, 0.3]), 0, 0.81, [1, 2, 3]),
        (np.log([0.05, 0.5, 0.15, 0.3]), 0, 1e-6, [1]),
        # of the two largest the shares are .625 and .375: p counts after top-k
        (np.log([0.05, 0.5, 0.15, 0.3]), 2, 0.6, [1]),
        # equals of the smallest that stays, stay: of the k-th, and of the one that crosses p
        ([2.0, 1.0, 1.0, 1.0], 2, 1.0, [0, 1, 2, 3]),
        (np.log([0.4, 0.2, 0.2, 0.2]), 0, 0.5, [0, 1, 2, 3]),
        # without top-p no id goes for being unlikely
        ([0.0, -40.0, -50.0, -60.0], 3, 1.0, [0, 1, 2]),
        ([0.0, -40.0, -50.0, -60.0], 9, 1.0, [0, 1, 2, 3]),
    ],
)
def test_what_limits_leave_by_hand(logits, top_k, top_p, left):
    scaled = np.asarray(logits, np.float32)
    least = LEAST(scaled[None], np.float32([top_p]), np.int32([top_k]))
    assert np.flatnonzero(scaled >= np.asarray(least)).tolist() == left


def test_draws_under_limits_follow_what_is_left():
    n, temperature = 20_000, 1.5
    logits = np.tile(logits_like(1), (n, 1))
    scaled = logits[0] / np.float32(temperature)
    left = left_by_transformers(scaled, 6, 0.8)
    assert 2 <= left.sum() < 6
    ids, logps, _ = draw(logits, np.arange(n), [4] * n, temperature, top_p=0.8, top_k=6)
    expected = np.where(left, np.exp(scaled), 0) / np.exp(scaled[left]).sum()
    np.testing.assert_allclose(np.bincount(ids, minlength=V) / n, expected, atol=0.015)
    full = scaled - np.log(np.exp(scaled.astype(np.float64)).sum())  # not renormalised
    np.testing.assert_allclose(logps, full[ids], atol=1e-5)


def test_rows_without_limits_do_not_feel_those_with():
    logits, seeds, at = logits_like(2, 64), np.arange(64), [3] * 64
    temperatures = np.where(np.arange(64) % 4 == 0, 0, 0.9)
    odd = np.arange(64) % 2 == 1
    plain = draw(logits, seeds, at, temperatures)
    limited = draw(
        logits,
        seeds,
        at,
        temperatures,
        top_p=np.where(odd, 0.3, 1.0),
        top_k=np.where(odd, 3, 0),
        barred=[[0, 1] if r else [] for r in odd],
        forced=np.where(np.arange(64) == 63, 5, -1),
    )
    for before, after in zip(plain, limited, strict=True):
        assert before[~odd].tolist() == after[~odd].tolist()
    assert plain[0][odd].tolist() != limited[0][odd].tolist()
    assert plain[2].tolist() == limited[2].tolist()  # entropies: nothing changes them


def test_limits_are_not_searched_unless_a_row_has_one():
    limits = sampling.Draw(
        temperature_R=np.ones(2, np.float32),
        top_p_R=np.ones(2, np.float32),
        top_k_R=np.zeros(2, np.int32),
        barred_RK=np.full((2, 1), -1, np.int32),
        forced_R=np.full(2, -1, np.int32),
    )
    keys = sampling.row_keys(BASE, jnp.zeros(2, jnp.uint32))
    made = jax.make_jaxpr(sampling.sample)(jnp.zeros((2, V)), keys, jnp.zeros(2, jnp.int32), limits)

    def primitives(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            if equation.primitive.name != "cond":
                for inner in jax.extend.core.jaxprs_in_params(equation.params):
                    yield from primitives(inner)

    outside = list(primitives(made.jaxpr))
    assert "cond" in outside and not {"sort", "scan", "while"} & set(outside)
    assert "scan[" in str(made)  # the search, in one branch of it


def test_barred_ids_are_not_drawn_and_come_out_before_the_limits():
    logits = np.tile(np.float32([0.0, 1.0, 9.0, 8.0, 2.0]), (400, 1))
    seeds, at = np.arange(400), [7] * 400
    ids, logps, _ = draw(logits, seeds, at, 0.0, barred=[[2, 3]] * 400)
    assert set(ids.tolist()) == {4}  # greedy: the largest that is left
    # 2 - log(e^9 + e^8 + e^2 + e + 1) = 2 - log(11095.15) = 2 - 9.31426
    assert logps == pytest.approx(-7.31426, abs=1e-4)
    ids, _, _ = draw(logits, seeds, at, 1.0, top_k=1, barred=[[2]] * 400)
    assert set(ids.tolist()) == {3}
    ids, _, _ = draw(logits, seeds, at, 1.0, top_p=0.5, barred=[[2, 3]] * 400)
    assert set(ids.tolist()) == {4}  # its share of what is left is e^2 / (e^2 + e + 1) = .67
    ids, _, _ = draw(logits, seeds, at, 9.0, barred=[[2, 3]] * 400)
    assert set(ids.tolist()) == {0, 1, 4}


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(0, 1, 0), (1, 1, 0), (1, 0.5, 2)])
def test_all_ids_barred_gives_an_id_and_no_nan(temperature, top_p, top_k):
    out = draw([[1.0, 2.0]], [1], [0], temperature, top_p, top_k, barred=[[0, 1]])
    assert out[0][0] in (0, 1) and np.isfinite(out).all()


def test_forced_ids_are_taken_with_the_log_probs_of_the_model():
    logits = [[2.0, 1.0, 0.0]] * 3
    ids, logps, entropies = draw(logits, [1] * 3, [0] * 3, [0.5, 0.0, 1.0], 0.1, 1, [[2]] * 3, 2)
    assert ids.tolist() == [2, 2, 2]
    # [4, 2, 0]: -log(e^4 + e^2 + 1); at 1, as for greedy rows: -log(e^2 + e + 1)
    assert logps == pytest.approx([-4.1429, -2.4076, -2.4076], abs=1e-4)
    p = np.exp([2.0, 1, 0]) / np.exp([2.0, 1, 0]).sum()
    assert entropies[1:] == pytest.approx([-(p * np.log(p)).sum()] * 2, abs=1e-5)


# -- parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": float("nan")}, "temperature must be finite and at least 0, got nan"),
        ({"temperature": float("inf")}, "temperature must be finite and at least 0, got inf"),
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"stop_ids": (1, 2, 3)}, "at most 2 stop ids, got 3"),
        ({"stop_ids": (-1,)}, r"ids lie in 0..2147483647, got .*stop_ids=\(-1,\)"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"top_p": float("nan")}, "top_p must be above 0 and at most 1, got nan"),
        ({"top_k": -1}, r"top_k must be at least 0 \(0: all\), at most 2147483647, got -1"),
        ({"top_k": 2**31}, "top_k must be .*, got 2147483648"),
        ({"min_tokens": -1}, "min_tokens must be 0 to max_tokens=4, got -1"),
        ({"min_tokens": 5}, "min_tokens must be 0 to max_tokens=4, got 5"),
        ({"forced": (1,) * 5}, "5 forced ids are more than max_tokens=4"),
        ({"forced": (3, -1)}, r"ids lie in 0..2147483647, got forced=\(3, -1\)"),
    ],
)
def test_parameters_out_of_range_are_refused_with_what_is_allowed(wrong, message):
    with pytest.raises(ValueError, match=message):
        sampling.check_sampling(SamplingParams(**{"max_tokens": 4, **wrong}), max_stop_ids=2)


def test_parameters_at_the_ends_of_their_ranges_pass():
    sampling.check_sampling(SamplingParams(), 0)
    at_ends = SamplingParams(
        0.0, 4, (0, 1), top_p=1e-9, top_k=2**31 - 1, min_tokens=4, forced=(7,) * 4
    )
    sampling.check_sampling(at_ends, 2)
