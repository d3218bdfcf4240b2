"""Stage 6: log-probs and advantages in, the clipped policy loss out (pure JAX).

DAPO form of the paper: -sum_i sum_t min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) / sum_i |y_i|,
with r = exp(logp - old_logp) per token. No KL by default. The normaliser is `aggregate`'s.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from agentspec.losses.aggregate import aggregate

LOG_RATIO_MAX = 20.0  # exp(20) is 4.9e8; without the clamp exp(100) is inf and its gradient NaN


def policy_loss(
    logp_BT: Any,
    old_logp_BT: Any,
    advantage: Any,
    mask_BT: Any,
    *,
    segment_ids_BT: Any = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    how: str = "token_mean",
    max_tokens: int | None = None,
    denominator: Any = None,
    weights_BT: Any = None,
    ref_logp_BT: Any = None,
    kl_coef: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the float32 scalar loss and metrics (float32 scalars, means over kept tokens).

    Log-probs in nats. ``advantage`` is [B] or [B, T]. ``weights_BT`` multiply the surrogate
    (truncated importance weights, already detached). With ``kl_coef`` above 0, k3 of
    ``ref_logp_BT`` is added. Positions of mask 0 are made safe before and after every exp: they
    may hold NaN or infinities, and nothing kept gives loss 0 and gradient 0. Ratios beyond e^20 are
    held there. Metrics: ``ratio_mean``, ``ratio_max``, ``ratio_min``, ``clip_low_frac``,
    ``clip_high_frac``, ``kl``. Raises ValueError for a KL without reference, and see `aggregate`.
    """
    keep_BT = jnp.asarray(mask_BT) != 0
    advantage = jnp.asarray(advantage, jnp.float32)
    advantage_BT = advantage[:, None] if advantage.ndim == 1 else advantage
    advantage_BT = jnp.where(keep_BT, advantage_BT, 0.0)
    log_ratio_BT = _safe_difference(logp_BT, old_logp_BT, keep_BT)
    ratio_BT = jnp.exp(jnp.clip(log_ratio_BT, -LOG_RATIO_MAX, LOG_RATIO_MAX))
    clipped_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    loss_BT = -jnp.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    if weights_BT is not None:
        loss_BT = loss_BT * jnp.where(keep_BT, weights_BT, 0.0)
    kl_BT = jnp.zeros_like(loss_BT)
    if ref_logp_BT is not None:
        kl_BT = kl_k3(logp_BT, ref_logp_BT, keep_BT)
    if kl_coef:
        if ref_logp_BT is None:
            raise ValueError(f"kl_coef is {kl_coef} but there are no reference log-probs")
        loss_BT = loss_BT + kl_coef * kl_BT
    loss = aggregate(
        loss_BT,
        mask_BT,
        how,
        segment_ids_BT=segment_ids_BT,
        max_tokens=max_tokens,
        denominator=denominator,
    )

    def mean(values_BT: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(aggregate(values_BT, mask_BT, "token_mean"))

    metrics = {
        "ratio_mean": mean(ratio_BT),
        "ratio_max": jax.lax.stop_gradient(jnp.where(keep_BT, ratio_BT, 0.0).max()),
        "ratio_min": jax.lax.stop_gradient(jnp.where(keep_BT, ratio_BT, jnp.inf).min()),
        "clip_low_frac": mean((ratio_BT < 1.0 - clip_low) & (advantage_BT < 0)),
        "clip_high_frac": mean((ratio_BT > 1.0 + clip_high) & (advantage_BT > 0)),
        "kl": mean(kl_BT),
    }
    return loss, metrics


def kl_k3(logp_BT: Any, ref_logp_BT: Any, mask_BT: Any) -> jax.Array:
    """float32 [B, T], never negative: exp(d) - d - 1 with d = ref_logp - logp, 0 under mask 0.

    d is clamped to +-20 before the exponential, so value and gradient stay finite.
    """
    d_BT = _safe_difference(ref_logp_BT, logp_BT, jnp.asarray(mask_BT) != 0)
    d_BT = jnp.clip(d_BT, -LOG_RATIO_MAX, LOG_RATIO_MAX)
    return jnp.exp(d_BT) - d_BT - 1.0


def truncated_weights(logp_BT: Any, sampler_logp_BT: Any, mask_BT: Any, cap: float) -> jax.Array:
    """float32 [B, T], detached: min(exp(logp - sampler_logp), cap), 0 under mask 0."""
    keep_BT = jnp.asarray(mask_BT) != 0
    d_BT = jnp.clip(_safe_difference(logp_BT, sampler_logp_BT, keep_BT), -20.0, LOG_RATIO_MAX)
    return jax.lax.stop_gradient(jnp.where(keep_BT, jnp.minimum(jnp.exp(d_BT), cap), 0.0))


def _safe_difference(a_BT: Any, b_BT: Any, keep_BT: jax.Array) -> jax.Array:
    """Difference a - b in float32; 0, without a gradient, where not kept."""
    a_BT = jnp.where(keep_BT, jnp.asarray(a_BT, jnp.float32), 0.0)
    return a_BT - jnp.where(keep_BT, jnp.asarray(b_BT, jnp.float32), 0.0)
