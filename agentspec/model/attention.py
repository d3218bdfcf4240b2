"""Who sees whom, and grouped-query attention over it.

Full forward: rows hold several sequences (segments), each a trunk with branches. Query i sees key j
iff both are in the same segment, j comes no later in the row, and (j is in i's own branch at a
position no later than i's, or j is in the trunk at a position before i's cut). Cached decoding:
query at position p sees cache slots 0..p.

All products are batched over heads ([B, K, ., E]): on CPU that is up to ten times faster than a
layout with the length before the heads. Query heads that share a key head are stacked as more query
rows, so that keys and values are never repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Queries are taken in tiles: a tile needs no key that comes after it in the row, which saves nearly
# half of the scores, and its scores stay in the CPU's cache.
TILE_TOKENS = 128
_HIDDEN = -1e30


class Layout(NamedTuple):
    """Where each token of a [B, T] batch stands; None means one causal sequence a row.

    ``cuts_BT``: a branch token sees trunk positions below its cut. Segment 0 is padding.
    """

    positions_BT: jax.Array
    segment_ids_BT: jax.Array | None = None
    branch_ids_BT: jax.Array | None = None
    cuts_BT: jax.Array | None = None


def tiles(n_tokens: int) -> list[slice]:
    """Returns the query tiles of a row of ``n_tokens``; keys of a tile are 0..tile.stop."""
    return [
        slice(start, min(start + TILE_TOKENS, n_tokens))
        for start in range(0, n_tokens, TILE_TOKENS)
    ]


def visible_tiles(layout: Layout) -> list[jax.Array]:
    """Returns per query tile a bool array [B, tile, keys up to the tile's end]: True is seen."""
    n_tokens = layout.positions_BT.shape[1]
    return [_visible_BTS(layout, tile) for tile in tiles(n_tokens)]


def _visible_BTS(layout: Layout, tile: slice) -> jax.Array:
    positions, segments, branches, cuts = layout
    q_index, k_index = jnp.arange(tile.start, tile.stop), jnp.arange(tile.stop)
    q, k = (slice(None), tile), (slice(None), slice(tile.stop))
    in_order = k_index[None, None, :] <= q_index[None, :, None]
    causal = positions[k][:, None, :] <= positions[q][:, :, None]
    if branches is None:
        seen = in_order & causal
    else:
        same = branches[k][:, None, :] == branches[q][:, :, None]
        trunk = branches[k][:, None, :] == 0
        if cuts is not None:
            trunk &= positions[k][:, None, :] < cuts[q][:, :, None]
        seen = in_order & ((same & causal) | (trunk & ~same))
    if segments is not None:
        seen &= segments[k][:, None, :] == segments[q][:, :, None]
    return seen


def attend_full(
    q_BHTE: jax.Array, k_BKTE: jax.Array, v_BKTE: jax.Array, seen_tiles: list[jax.Array]
) -> jax.Array:
    """Returns [B, H, T, E]: attention of every token within its own row; softmax in float32."""
    n_tokens = q_BHTE.shape[2]
    outs = [
        attend(q_BHTE[:, :, tile], k_BKTE[:, :, : tile.stop], v_BKTE[:, :, : tile.stop], seen)
        for tile, seen in zip(tiles(n_tokens), seen_tiles, strict=True)
    ]
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=2)


def attend(
    q_BHTE: jax.Array, k_BKSE: jax.Array, v_BKSE: jax.Array, seen_BTS: jax.Array
) -> jax.Array:
    """Returns [B, H, T, E] for queries that see the keys marked in ``seen_BTS`` (at least one)."""
    B, H, T, E = q_BHTE.shape
    K = k_BKSE.shape[1]
    q_BKME = (q_BHTE * jnp.asarray(E**-0.5, q_BHTE.dtype)).reshape(B, K, H // K * T, E)
    return _attend(q_BKME, k_BKSE, v_BKSE, seen_BTS).reshape(B, H, T, E)


# M = query heads of one key head, stacked, times T. The gradient is written out because that saves
# two fifths of attention's time in training on CPU: weights stay exp(score - max), and their sum
# divides the small [M, E] results instead of the large [M, S] weights.
@jax.custom_vjp
def _attend(
    q_BKME: jax.Array, k_BKSE: jax.Array, v_BKSE: jax.Array, seen_BTS: jax.Array
) -> jax.Array:
    return _attend_forward(q_BKME, k_BKSE, v_BKSE, seen_BTS)[0]


def _attend_forward(
    q_BKME: jax.Array, k_BKSE: jax.Array, v_BKSE: jax.Array, seen_BTS: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    (B, K, M, _), (T, S) = q_BKME.shape, seen_BTS.shape[1:]
    scores = _product(q_BKME, k_BKSE.swapaxes(2, 3)).reshape(B, K, M // T, T, S)
    scores = jnp.where(seen_BTS[:, None, None], scores, _HIDDEN).reshape(B, K, M, S)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    total_BKM1 = weights.sum(axis=-1, keepdims=True)
    weights = weights.astype(v_BKSE.dtype)
    out_BKME = _product(weights, v_BKSE) / total_BKM1
    return out_BKME.astype(q_BKME.dtype), (q_BKME, k_BKSE, v_BKSE, weights, total_BKM1, out_BKME)


def _attend_backward(
    saved: tuple[jax.Array, ...], out_slope: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q_BKME, k_BKSE, v_BKSE, weights, total_BKM1, out_BKME = saved
    slope = out_slope.astype(jnp.float32) / total_BKM1
    along = (slope * out_BKME).sum(axis=-1, keepdims=True)  # softmax keeps the weights' sum at 1
    slope = slope.astype(v_BKSE.dtype)
    v_slope = _product(weights.swapaxes(2, 3), slope)
    score_slope = weights * (_product(slope, v_BKSE.swapaxes(2, 3)) - along)
    score_slope = score_slope.astype(q_BKME.dtype)
    q_slope = _product(score_slope, k_BKSE)
    k_slope = _product(score_slope.swapaxes(2, 3), q_BKME)
    return (
        q_slope.astype(q_BKME.dtype),
        k_slope.astype(k_BKSE.dtype),
        v_slope.astype(v_BKSE.dtype),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)
