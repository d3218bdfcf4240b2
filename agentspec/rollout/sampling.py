"""Sampling one token per row, on the device (paper: the policy's categorical distribution).

In: logits of the last position, a key per row, temperatures. Out: ids with the float32 log-prob of
each and the entropy it was drawn at. The Gumbel-max trick makes a draw a pure function of (logits,
seed, position): ``argmax(logits / T + g)`` with ``g`` drawn from
``fold_in(fold_in(base, seed), position)``. Nothing here depends on a row's place or neighbours.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_SEED = 2**32 - 1


def check_seed(seed: int) -> int:
    """Returns the seed; ValueError unless it fits the 32 bits that ``fold_in`` takes."""
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed {seed} is out of range: a sampling seed lies in 0..{MAX_SEED}")
    return seed


def row_keys(base: jax.Array, seeds_R: jax.Array) -> jax.Array:
    """One typed PRNG key per row [R] from uint32 seeds [R]."""
    return jax.vmap(lambda seed: jax.random.fold_in(base, seed))(seeds_R)


def sample(
    logits_RV: jax.Array, keys_R: jax.Array, positions_R: jax.Array, temperature_R: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws the tokens that will stand at ``positions_R`` (absolute, int32).

    Args:
        logits_RV: float32.
        keys_R: from ``row_keys``.
        positions_R: absolute index of the token to be drawn.
        temperature_R: float32 >= 0; 0 takes the largest logit (the first of equals).

    Returns:
        ids [R] int32; log-probs [R] and entropies [R], float32, nats, over the full vocabulary at
        the sampling temperature (at 1 for greedy rows).
    """
    greedy_R = temperature_R == 0
    scaled_RV = logits_RV / jnp.where(greedy_R, 1.0, temperature_R)[:, None]
    logp_RV = jax.nn.log_softmax(scaled_RV, axis=-1)

    def noise(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(
            jax.random.fold_in(key, position), (logits_RV.shape[-1],), jnp.float32
        )

    gumbel_RV = jax.vmap(noise)(keys_R, positions_R)
    ids_R = jnp.argmax(jnp.where(greedy_R[:, None], scaled_RV, scaled_RV + gumbel_RV), axis=-1)
    # A sum with one non-zero term: exact, and on CPU much faster than a gather by row.
    chosen_RV = jnp.arange(logits_RV.shape[-1])[None, :] == ids_R[:, None]
    logps_R = jnp.sum(jnp.where(chosen_RV, logp_RV, 0.0), axis=-1)
    safe_RV = jnp.where(jnp.isneginf(logp_RV), 0.0, logp_RV)
    entropy_R = -jnp.sum(jnp.exp(logp_RV) * safe_RV, axis=-1)
    return ids_R.astype(jnp.int32), logps_R, entropy_R
