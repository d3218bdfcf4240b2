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

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

# Queries are taken in tiles: a tile needs no key that comes after it in the row, which saves nearly
# half of the scores, and its scores stay in the CPU's cache. Tiles grow so that there are at most
# MOST_TILES; beyond KEPT_TOKENS the backward pass computes a tile's scores again instead of keeping
# them; beyond UNROLLED_TOKENS tiles are a loop, so that neither scores nor masks of the whole row
# ever exist.
TILE_TOKENS = 128
MOST_TILES = 16
KEPT_TOKENS = 2048
UNROLLED_TOKENS = 8192
_HIDDEN = -1e30

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Layout(NamedTuple):
    """Where each token of a [B, T] batch stands; None means one causal sequence a row.

    ``cuts_BT``: a branch token sees trunk positions below its cut. Segment 0 is padding.
    ``branches_BNJ``: the row indices of each branch's tokens, -1 where there is none; layers that
    carry a state from token to token need it, attention does not.
    """

    positions_BT: jax.Array
    segment_ids_BT: jax.Array | None = None
    branch_ids_BT: jax.Array | None = None
    cuts_BT: jax.Array | None = None
    branches_BNJ: jax.Array | None = None


def attender(layout: Layout, how: str, mesh: Mesh | None) -> Attend:
    """Returns attention over ``layout``: (q [B, H, T, E], k, v [B, K, T, E]) to [B, H, T, E].

    ``how`` is ``xla`` or ``splash`` (TPU's Pallas kernel); the numbers are the same. Softmax is in
    float32. One attender serves all layers.
    """
    if how == "splash":
        from agentspec.model import splash  # loads Pallas

        if mesh is None:
            return lambda q, k, v: splash.splash_attend(q, k, v, layout)
        return lambda q, k, v: splash.splash_attend_sharded(q, k, v, layout, mesh)
    if layout.positions_BT.shape[1] > UNROLLED_TOKENS:
        return lambda q, k, v: _attend_loop(q, k, v, layout)
    seen_tiles = visible_tiles(layout)
    return lambda q, k, v: attend_full(q, k, v, seen_tiles)


def tiles(n_tokens: int) -> list[slice]:
    """Returns the query tiles of a row of ``n_tokens``; keys of a tile are 0..tile.stop."""
    size = TILE_TOKENS * -(-n_tokens // (TILE_TOKENS * MOST_TILES))
    return [slice(start, min(start + size, n_tokens)) for start in range(0, n_tokens, size)]


def visible_tiles(layout: Layout) -> list[jax.Array]:
    """Returns per query tile a bool array [B, tile, keys up to the tile's end]: True is seen."""
    n_tokens = layout.positions_BT.shape[1]
    whole = (*layout[:4], jnp.broadcast_to(jnp.arange(n_tokens), layout.positions_BT.shape))

    def part(tile: slice) -> list[jax.Array | None]:
        return [None if array is None else array[:, tile] for array in whole]

    return [_visible_BTS(part(tile), part(slice(tile.stop))) for tile in tiles(n_tokens)]


def _visible_BTS(query: list[jax.Array | None], key: list[jax.Array | None]) -> jax.Array:
    """Returns bool [B, T, S]; both sides give positions, segments, branches, cuts, row indices."""

    def pair(i: int) -> tuple[jax.Array, jax.Array]:
        q_BT, k_BS = query[i], key[i]
        assert q_BT is not None and k_BS is not None
        return q_BT[:, :, None], k_BS[:, None, :]

    (q_position, k_position), (q_index, k_index) = pair(0), pair(4)
    seen = (k_index <= q_index) & (k_position <= q_position)
    if query[2] is not None:
        q_branch, k_branch = pair(2)
        trunk = k_branch == 0
        if query[3] is not None:
            trunk &= k_position < pair(3)[0]
        same = q_branch == k_branch
        seen = (seen & same) | ((k_index <= q_index) & trunk & ~same)
    if query[1] is not None:
        q_segment, k_segment = pair(1)
        seen &= q_segment == k_segment
    return seen


def attend_full(
    q_BHTE: jax.Array, k_BKTE: jax.Array, v_BKTE: jax.Array, seen_tiles: list[jax.Array]
) -> jax.Array:
    """Returns [B, H, T, E]: attention of every token within its own row; softmax in float32."""
    n_tokens = q_BHTE.shape[2]
    one = attend if n_tokens <= KEPT_TOKENS else jax.checkpoint(attend)
    outs = [
        one(q_BHTE[:, :, tile], k_BKTE[:, :, : tile.stop], v_BKTE[:, :, : tile.stop], seen)
        for tile, seen in zip(tiles(n_tokens), seen_tiles, strict=True)
    ]
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=2)


def _attend_loop(
    q_BHTE: jax.Array, k_BKTE: jax.Array, v_BKTE: jax.Array, layout: Layout
) -> jax.Array:
    """The same for long rows: a loop over tiles, each against all keys of the row."""
    B, H, T, E = q_BHTE.shape
    index_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    keys = [*layout[:4], index_BT]
    n, extra = -(-T // TILE_TOKENS), -T % TILE_TOKENS

    def cut(array: jax.Array | None, axis: int) -> jax.Array | None:  # tiles first
        if array is None:
            return None
        pad = [(0, extra if i == axis else 0) for i in range(array.ndim)]
        shape = (*array.shape[:axis], n, TILE_TOKENS, *array.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(array, pad, mode="edge").reshape(shape), axis, 0)

    @jax.checkpoint
    def one(tile: tuple[jax.Array, list[jax.Array | None]]) -> jax.Array:
        return attend(tile[0], k_BKTE, v_BKTE, _visible_BTS(tile[1], keys))

    outs = jax.lax.map(one, (cut(q_BHTE, 2), [cut(array, 1) for array in keys]))
    return jnp.moveaxis(outs, 0, 2).reshape(B, H, n * TILE_TOKENS, E)[:, :, :T]


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
