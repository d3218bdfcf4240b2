"""The static key/value cache of decoding: per layer two arrays [R, K, S, E], heads first.

Each layer has arrays of its own and a step writes by scatter, so that inside ``lax.while_loop`` XLA
updates them in place instead of copying the whole cache. Slot s of a row holds position s.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentspec.model.config import ModelConfig


class LayerCache(NamedTuple):
    """Keys (already turned by position) and values of one layer."""

    k_RKSE: jax.Array
    v_RKSE: jax.Array


Cache = tuple[LayerCache, ...]


def init_cache(config: ModelConfig, rows: int, length: int) -> Cache:
    """Returns zeros for ``rows`` sequences of up to ``length`` tokens, in the model's dtype."""
    shape = (rows, config.n_kv_heads, length, config.head_dim)
    dtype = jnp.dtype(config.dtype)
    return tuple(
        LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.n_layers)
    )


def slots(start_R: jax.Array, valid_R: jax.Array, n_tokens: int, length: int) -> jax.Array:
    """Returns [R, T] slots to write, ``length`` (dropped by ``write``) where there is none.

    Token t of row r stands at ``start_r + t`` and is kept iff ``t < valid_r``.
    """
    offsets_T = jnp.arange(n_tokens)
    positions_RT = start_R[:, None] + offsets_T
    keep_RT = (offsets_T < valid_R[:, None]) & (positions_RT >= 0) & (positions_RT < length)
    return jnp.where(keep_RT, positions_RT, length)


def write(
    cache: LayerCache, k_RKTE: jax.Array, v_RKTE: jax.Array, slots_RT: jax.Array
) -> LayerCache:
    """Returns the cache with keys and values written at ``slots_RT``; out of range is dropped."""
    rows_R1 = jnp.arange(slots_RT.shape[0])[:, None]

    def put(old_RKSE: jax.Array, new_RKTE: jax.Array) -> jax.Array:
        return old_RKSE.at[rows_R1, :, slots_RT].set(new_RKTE.swapaxes(1, 2), mode="drop")

    return LayerCache(put(cache.k_RKSE, k_RKTE), put(cache.v_RKSE, v_RKTE))
