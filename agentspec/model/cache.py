"""The caches of decoding: one for each layer, rows first; see ``deltanet`` for the linear layers'.

Full attention has a static cache: two arrays [R, K, S, E], heads first. Each layer has arrays of
its own and a step writes by scatter, so that inside ``lax.while_loop`` XLA updates them in place
instead of copying the whole cache. Slot s of a row holds position s, so taking back tokens needs
nothing but a smaller position. A linear layer's cache is a state after the last token: it cannot be
taken back, only copied while it is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from agentspec.mesh import LOGICAL_AXES
from agentspec.model import attention
from agentspec.model.config import ModelConfig
from agentspec.model.deltanet import DeltaCache, init_delta_cache


class LayerCache(NamedTuple):
    """Keys (already turned by position) and values of one full attention layer."""

    k_RKSE: jax.Array
    v_RKSE: jax.Array


Cache = tuple[LayerCache | DeltaCache, ...]


def init_cache(config: ModelConfig, rows: int, length: int) -> Cache:
    """Returns zeros for ``rows`` sequences of up to ``length`` tokens, in the compute dtype."""
    shape = (rows, config.n_kv_heads, length, config.head_dim)
    dtype = jnp.dtype(config.dtype)

    def one(kind: str) -> LayerCache | DeltaCache:
        if kind == "linear":
            return init_delta_cache(config, rows)
        return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    return tuple(one(kind) for kind in config.kinds)


def cache_specs(config: ModelConfig) -> Any:
    """Returns how each array of the cache is cut over a mesh: by heads, over ``tensor``."""
    by_heads: Any = PartitionSpec(None, LOGICAL_AXES["kv_heads"])
    whole: Any = PartitionSpec()

    def one(kind: str) -> LayerCache | DeltaCache:
        return DeltaCache(whole, by_heads) if kind == "linear" else LayerCache(by_heads, by_heads)

    return tuple(one(kind) for kind in config.kinds)


def cache_length(cache: Cache) -> int:
    """Returns how many tokens a row can hold; 0 where no layer keeps single tokens."""
    lengths = [layer.k_RKSE.shape[2] for layer in cache if isinstance(layer, LayerCache)]
    return lengths[0] if lengths else 0


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


def static_attender(positions_RT: jax.Array, valid_R: jax.Array, length: int) -> Any:
    """Returns (q [R, H, T, E], k, v [R, K, T, E], cache) -> ([R, H, T, E], cache), for all layers.

    Every token sees its row's slots up to its own position; ``length`` is the cache's.
    """
    slots_RT = slots(positions_RT[:, 0], valid_R, positions_RT.shape[1], length)
    seen_RTS = jnp.arange(length) <= positions_RT[:, :, None]

    def attend(
        q_RHTE: jax.Array, k_RKTE: jax.Array, v_RKTE: jax.Array, cache: LayerCache
    ) -> tuple[jax.Array, LayerCache]:
        cache = write(cache, k_RKTE, v_RKTE, slots_RT)
        return attention.attend(q_RHTE, cache.k_RKSE, cache.v_RKSE, seen_RTS), cache

    return attend
