"""Stage 4 to 5: rewards of groups in, advantages out (host side, NumPy, computed in float64).

The paper's A_i = (R_i - mean) / (std + 1e-6). Agent groups share a task,
speculator groups share a prefix. The standard deviation divides by n - 1 (``ddof=1``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

UNIFORM_RANGE = 1e-6  # a group whose max - min is at most this carries no signal


def uniform_groups(rewards_NG: ArrayLike) -> NDArray[np.bool_]:
    """Booleans [N]: groups of one, and groups whose rewards differ by at most 1e-6.

    With ``loss.drop_uniform_groups`` their tokens get mask 0, so that they leave the denominator
    and the KL term too.
    """
    rewards = _checked(rewards_NG)
    flat = np.ptp(rewards, axis=-1) <= UNIFORM_RANGE
    return np.asarray(flat | (rewards.shape[-1] == 1))


def group_advantages(rewards_NG: ArrayLike, eps: float = 1e-6) -> NDArray[np.float32]:
    """float32 [N, G] (or [G] for one group): (R - mean) / (std + eps), std with n - 1.

    Exactly 0 in a group of one and in one whose max - min is at most 1e-6. Raises ValueError for
    rewards that are not finite and for groups without members.
    """
    rewards = _checked(rewards_NG)
    uniform = uniform_groups(rewards)
    if rewards.shape[-1] == 1:
        return np.zeros(rewards.shape, np.float32)
    centred = rewards - rewards.mean(-1, keepdims=True)
    std = np.sqrt(np.square(centred).sum(-1, keepdims=True) / (rewards.shape[-1] - 1))
    scale = np.where(uniform[..., None], 1.0, std + eps)
    return np.where(uniform[..., None], 0.0, centred / scale).astype(np.float32)


def _checked(rewards_NG: ArrayLike) -> NDArray[np.float64]:
    rewards = np.asarray(rewards_NG, np.float64)
    if rewards.ndim < 1 or rewards.shape[-1] == 0:
        raise ValueError(f"rewards must be [N, G] with G at least 1, got shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(rewards))[0])
        raise ValueError(f"reward at [group, member] = {where} is {rewards[where]}, must be finite")
    return rewards
