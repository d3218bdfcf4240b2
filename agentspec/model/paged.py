"""The paged cache: keys and values of all sequences in pages of fixed size, any sequence in any.

In: a page table (row, j) -> page that holds the row's positions j*P..j*P+P-1, and queries. Out: the
cache with the new tokens written, and attention over it. Work follows the rows' own lengths: rows
go in groups, each as many pages as its longest row has. A page that a row does not see adds exactly
nothing, so that results do not depend on the group, bit for bit.

Keys lie tokens last ([N, K, E, P]): on CPU a step's scores are then taken along memory, six times
as fast as the other way, and gathering by page costs no more than twice what contiguous rows do.

A family is several rows that share their first whole pages (a speculator's candidates); its queries
read those as one block, each page once, and the rest row by row. The two parts are joined by their
maxima and sums (as in flash attention).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentspec.model.config import ModelConfig
from agentspec.model.deltanet import DeltaCache, init_delta_cache

GROUP_ROWS = 16  # decoding rows whose pages are read at once
GROUP_SPANS = 4  # the same for spans of several tokens
GROUP_FAMILIES = 4
TILE_TOKENS = 128  # keys read at once
_HIDDEN = -1e30


class PagedKV(NamedTuple):
    """One full attention layer's pages: keys (turned by position) and values, compute dtype."""

    k_NKEP: jax.Array
    v_NKPE: jax.Array


class Families(NamedTuple):
    """Rows that read their first whole pages together; int32.

    ``members_FC``: row numbers, R where there is none. ``pages_F``: how many pages, 0 for no
    family. ``shared_R``: the same for each row. ``place_R``: index in ``members_FC``, flattened,
    F * C for a row without a family.
    """

    members_FC: Any
    pages_F: Any
    shared_R: Any
    place_R: Any


class _Part(NamedTuple):
    """Softmax over some keys: maximum, sum of weights, weighted values; float32."""

    most_RKM1: jax.Array
    total_RKM1: jax.Array
    out_RKME: jax.Array


PagedCache = tuple[PagedKV | DeltaCache, ...]
PagedAttend = Callable[[jax.Array, jax.Array, jax.Array, PagedKV], tuple[jax.Array, PagedKV]]


def init_pages(config: ModelConfig, pages: int, page_tokens: int, states: int) -> PagedCache:
    """Returns zeros: ``pages`` pages for each attention layer, ``states`` slots for linear ones."""
    K, E, dtype = config.n_kv_heads, config.head_dim, jnp.dtype(config.dtype)

    def one(kind: str) -> PagedKV | DeltaCache:
        if kind == "linear":
            return init_delta_cache(config, states)
        k_NKEP = jnp.zeros((pages, K, E, page_tokens), dtype)
        return PagedKV(k_NKEP, jnp.zeros((pages, K, page_tokens, E), dtype))

    return tuple(one(kind) for kind in config.kinds)


def page_bytes(config: ModelConfig, page_tokens: int) -> int:
    """Returns the bytes of one page over all layers."""
    per_token = 2 * config.n_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    return per_token * page_tokens * sum(kind == "full" for kind in config.kinds)


def paged_attender(
    table_RJ: jax.Array,
    positions_RT: jax.Array,
    valid_R: jax.Array,
    families: Families | None,
) -> PagedAttend:
    """Returns (q [R, H, T, E], k, v [R, K, T, E], cache) -> ([R, H, T, E], cache), for all layers.

    Token t of row r is kept iff ``t < valid_r``. It sees the row's positions up to its own.
    """
    R, T = positions_RT.shape

    def attend(
        q_RHTE: jax.Array, k_RKTE: jax.Array, v_RKTE: jax.Array, cache: PagedKV
    ) -> tuple[jax.Array, PagedKV]:
        N, K, E, P = cache.k_NKEP.shape
        cache = _write(cache, k_RKTE, v_RKTE, table_RJ, positions_RT, valid_R)
        q_RKME = (q_RHTE * jnp.asarray(E**-0.5, q_RHTE.dtype)).reshape(R, K, -1, E)
        heads = q_RKME.shape[2] // T
        last_RM = jnp.tile(positions_RT, (1, heads))
        first_R = jnp.zeros(R, jnp.int32) if families is None else families.shared_R
        end_R = jnp.where(valid_R > 0, (positions_RT[:, 0] + valid_R - 1) // P + 1, 0)
        part = _by_groups(
            q_RKME, cache, table_RJ, first_R, end_R, last_RM, GROUP_ROWS if T == 1 else GROUP_SPANS
        )
        if families is not None:
            part = _joined(part, _family_part(q_RKME, cache, table_RJ, families))
        mixed = part.out_RKME / part.total_RKM1
        return mixed.astype(q_RHTE.dtype).reshape(R, K * heads, T, E), cache

    return attend


def _write(
    cache: PagedKV,
    k_RKTE: jax.Array,
    v_RKTE: jax.Array,
    table_RJ: jax.Array,
    positions_RT: jax.Array,
    valid_R: jax.Array,
) -> PagedKV:
    N, _, _, P = cache.k_NKEP.shape
    T = positions_RT.shape[1]
    page_RT = jnp.take_along_axis(table_RJ, positions_RT // P, axis=1, mode="clip")
    page_RT = jnp.where(jnp.arange(T) < valid_R[:, None], page_RT, N)
    at_RT = positions_RT % P

    def tokens_first(x_RKTE: jax.Array) -> jax.Array:
        return x_RKTE.transpose(0, 2, 1, 3)

    return PagedKV(
        cache.k_NKEP.at[page_RT, :, :, at_RT].set(tokens_first(k_RKTE), mode="drop"),
        cache.v_NKPE.at[page_RT, :, at_RT].set(tokens_first(v_RKTE), mode="drop"),
    )


def _by_groups(
    q_RKME: jax.Array,
    cache: PagedKV,
    table_RJ: jax.Array,
    first_R: jax.Array,
    end_R: jax.Array,
    last_RM: jax.Array,
    size: int,
) -> _Part:
    """Attention over each row's pages ``first_r .. end_r - 1``, ``size`` rows at a time."""
    R = q_RKME.shape[0]
    size = min(size, R)
    n = -(-R // size)

    def cut(x: jax.Array) -> jax.Array:  # groups first; padding rows have no pages
        x = jnp.pad(x, [(0, n * size - R)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(n, size, *x.shape[1:])

    rows = (cut(q_RKME), cut(table_RJ), cut(first_R), cut(end_R), cut(last_RM))
    # Rows that read anything come first; groups behind the last of them take no time.
    live = jnp.max(jnp.where(rows[3].max(1) > 0, jnp.arange(1, n + 1), 0))
    K, M, E = q_RKME.shape[1:]
    nothing = _no_keys((n, size, K, M, E))

    def body(carry: tuple[jax.Array, _Part]) -> tuple[jax.Array, _Part]:
        i, out = carry
        group = [jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for x in rows]
        part = _group(group, cache)
        put = jax.lax.dynamic_update_index_in_dim
        return i + 1, _Part(*(put(x, y, i, 0) for x, y in zip(out, part, strict=True)))

    part = jax.lax.while_loop(lambda carry: carry[0] < live, body, (jnp.int32(0), nothing))[1]
    return _Part(*(x.reshape(n * size, *x.shape[2:])[:R] for x in part))


def _group(rows: list[jax.Array], cache: PagedKV) -> _Part:
    q_GKME, table_GJ, first_G, end_G, last_GM = rows
    G, K, M, E = q_GKME.shape
    P = cache.k_NKEP.shape[-1]
    tile = max(1, TILE_TOKENS // P)
    q_GnKME = jnp.broadcast_to(q_GKME[:, None], (G, tile, K, M, E))

    def body(carry: tuple[jax.Array, _Part]) -> tuple[jax.Array, _Part]:
        i, part = carry
        j_Gn = first_G[:, None] + i * tile + jnp.arange(tile)
        page_Gn = jnp.take_along_axis(table_GJ, j_Gn, axis=1, mode="clip")
        k = jnp.take(cache.k_NKEP, page_Gn, axis=0, mode="clip")
        scores = jnp.matmul(q_GnKME, k, preferred_element_type=jnp.float32)
        at = j_Gn[:, :, None] * P + jnp.arange(P)
        seen = (at[:, :, None] <= last_GM[:, None, :, None]) & (j_Gn < end_G[:, None])[
            ..., None, None
        ]
        scores = jnp.where(seen[:, :, None], scores, _HIDDEN)
        most = jnp.maximum(part.most_RKM1, scores.max((1, 4))[..., None])
        weights = jnp.exp(scores - most[:, None])
        v = jnp.take(cache.v_NKPE, page_Gn, axis=0, mode="clip")
        new = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32).sum(1)
        scale = jnp.exp(part.most_RKM1 - most)
        total = part.total_RKM1 * scale + weights.sum((1, 4))[..., None]
        return i + 1, _Part(most, total, part.out_RKME * scale + new)

    steps = (jnp.max(end_G - first_G) + tile - 1) // tile
    start = (jnp.int32(0), _no_keys((G, K, M, E)))
    return jax.lax.while_loop(lambda carry: carry[0] < steps, body, start)[1]


def _family_part(
    q_RKME: jax.Array, cache: PagedKV, table_RJ: jax.Array, families: Families
) -> _Part:
    """Attention of each family's rows, as one block of queries, over its shared pages."""
    R, K, M, E = q_RKME.shape
    F, C = families.members_FC.shape
    members = jnp.minimum(families.members_FC, R - 1)
    q_FKXE = q_RKME[members].transpose(0, 2, 1, 3, 4).reshape(F, K, C * M, E)
    everything = jnp.full((F, C * M), jnp.iinfo(jnp.int32).max)
    none = jnp.zeros(F, jnp.int32)
    table_FJ = table_RJ[members[:, 0]]
    part = _by_groups(q_FKXE, cache, table_FJ, none, families.pages_F, everything, GROUP_FAMILIES)

    def rows(x: jax.Array, nothing: float) -> jax.Array:
        x = x.reshape(F, K, C, M, -1).transpose(0, 2, 1, 3, 4).reshape(F * C, K, M, -1)
        return x.at[families.place_R].get(mode="fill", fill_value=nothing)

    return _Part(rows(part.most_RKM1, _HIDDEN), rows(part.total_RKM1, 0), rows(part.out_RKME, 0))


def _no_keys(shape: tuple[int, ...]) -> _Part:
    """Softmax over no keys, for queries [..., E]."""
    zeros = jnp.zeros((*shape[:-1], 1), jnp.float32)
    return _Part(zeros + _HIDDEN, zeros, jnp.zeros(shape, jnp.float32))


def _joined(a: _Part, b: _Part) -> _Part:
    most = jnp.maximum(a.most_RKM1, b.most_RKM1)
    of_a, of_b = jnp.exp(a.most_RKM1 - most), jnp.exp(b.most_RKM1 - most)
    return _Part(
        most,
        a.total_RKM1 * of_a + b.total_RKM1 * of_b,
        a.out_RKME * of_a + b.out_RKME * of_b,
    )
