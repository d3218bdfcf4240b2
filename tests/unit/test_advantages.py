"""Group advantages: values by hand, the reported cases, and a plain Python twin."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.losses.advantages import (
    group_advantages,
    uniform_groups,
)


def twin(rewards, eps=1e-6):
    """One group, in plain Python."""
    n = len(rewards)
    if n == 1 or max(rewards) - min(rewards) <= 1e-6:
        return [0.0] * n
    mean = math.fsum(rewards) / n
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1))
    return [(r - mean) / (std + eps) for r in rewards]


def test_values_by_hand():
    # mean 2, deviations -1 0 1, std with n - 1 is 1
    got = group_advantages([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], eps=0.0)
    assert got.tolist() == [[-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert got.dtype == np.float32


def test_b30_a_group_of_one_has_advantage_0():
    with np.errstate(all="raise"):
        assert group_advantages([[0.7]]).tolist() == [[0.0]]
    assert uniform_groups([[0.7]]).tolist() == [True]


def test_b32_one_reward_apart_from_equal_ones_in_float32():
    rewards = np.array([[1.0] + [0.35] * 7], np.float32)
    # std = sqrt(7/8 * 0.65^2 / 7) = 0.65/sqrt(8), mean .43125; E[x^2] - E[x]^2 leaves a residue
    got = group_advantages(rewards)[0]
    assert got[0] == pytest.approx(0.56875 * math.sqrt(8) / 0.65, abs=1e-4)
    assert got[1:] == pytest.approx([-0.08125 * math.sqrt(8) / 0.65] * 7, abs=1e-4)
    assert not group_advantages(np.array([[0.35] * 8], np.float32)).any()  # no residue either


def test_b41_the_std_divides_by_n_minus_1():
    got = group_advantages([[1.0, 0.0, 0.0, 1.0]], eps=0.0)  # ddof=1; ddof=0 would give +-1
    np.testing.assert_allclose(got, [[0.8660254, -0.8660254, -0.8660254, 0.8660254]], rtol=1e-6)


def test_a_spread_of_at_most_1e_6_is_exactly_0():
    assert not group_advantages([[0.1 + 0.2, 0.3], [0.5, 0.5 + 9e-7]]).any()
    assert group_advantages([[0.5, 0.5 + 2e-6]]).any()
    assert uniform_groups([[1, 1], [0, 1]]).tolist() == [True, False]


def test_rewards_must_be_finite_and_present():
    with pytest.raises(ValueError, match=r"\(1, 0\) is nan"):
        group_advantages([[0.0, 1.0], [math.nan, 1.0]])
    with pytest.raises(ValueError, match="shape"):
        group_advantages(np.zeros((2, 0)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=9))
def test_like_the_plain_python_twin(rewards):
    np.testing.assert_allclose(group_advantages([rewards])[0], twin(rewards), rtol=1e-5, atol=1e-5)
