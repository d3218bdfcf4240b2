"""Supervised loss, and the log-probs that every loss starts from (pure JAX).

SFT warm-up before RL: successful trajectories and the speculation examples cut
from them, trunk and branches in one mean. Log-probs are full-vocabulary, at the sampling
temperature, in float32: the same definition as the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from agentspec.losses.aggregate import aggregate


def sft_loss(
    logp_BT: Any,
    mask_BT: Any,
    *,
    segment_ids_BT: Any = None,
    how: str = "token_mean",
    max_tokens: int | None = None,
    denominator: Any = None,
) -> jax.Array:
    """float32 scalar in nats: mean negative log-likelihood where the mask is not 0."""
    keep_BT = jnp.asarray(mask_BT) != 0
    nll_BT = -jnp.where(keep_BT, jnp.asarray(logp_BT, jnp.float32), 0.0)
    return aggregate(
        nll_BT,
        mask_BT,
        how,
        segment_ids_BT=segment_ids_BT,
        max_tokens=max_tokens,
        denominator=denominator,
    )


def logps_of(logits: Any, targets: Any, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each target, and the entropy (detached), both float32 nats of targets' shape.

    ``logits`` has one more axis, the vocabulary. Temperature 0 (greedy) means log-probs at 1, as
    the sampler reports them. Targets are picked by comparison, whose backward pass has no scatter.
    """
    logits = jnp.asarray(logits, jnp.float32) / jnp.where(temperature == 0, 1.0, temperature)
    logz = jax.nn.logsumexp(logits, axis=-1)
    hit = jnp.arange(logits.shape[-1]) == jnp.asarray(targets)[..., None]
    logp = jnp.where(hit, logits, 0.0).sum(-1) - logz
    fixed = jax.lax.stop_gradient(logits - logz[..., None])
    probs = jnp.exp(fixed)
    return logp, -jnp.where(probs > 0, probs * fixed, 0.0).sum(-1)


def token_logps(
    unembed: Callable[[jax.Array], jax.Array],
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    temperature: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies, float32 [B, T] in nats; meaningless but finite under mask 0.

    Holds all logits [B, T, V] at once; `vocabulary.logps_by_vocabulary` does not.
    """
    hidden_BTD = jnp.where((mask_BT != 0)[..., None], hidden_BTD, 0)
    return logps_of(unembed(hidden_BTD), targets_BT, temperature)
