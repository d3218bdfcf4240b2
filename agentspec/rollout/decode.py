"""The engine's device programs: prefill, decode and row copy over one static cache.

In: a cache pytree whose leaves are [R, ...] (rows first), and small host arrays saying what each
row does. Out: the cache (donated, so updated in place) and the sampled tokens. Every program has
one shape per pool, whoever is in it: a row's results do not depend on its index, its neighbours or
on how its tokens are split into calls, bit for bit (float32, one shape, one machine).
"""

from __future__ import annotations

import collections
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentspec.rollout import sampling

Params = Any
Cache = Any


class DecodeRows(NamedTuple):
    """What each row of a pool does in a decode call; arrays [R] (``stop_RK``: -1 is padding)."""

    ids_R: Any  # int32: the last known id of the row, fed first
    positions_R: Any  # int32: where that id stands
    budget_R: Any  # int32: how many tokens the row may still sample; 0: the row is idle
    seeds_R: Any  # uint32
    temperature_R: Any  # float32
    stop_RK: Any  # int32


class Sampled(NamedTuple):
    """Result of a decode call: the first ``counts_R`` entries of a row are its new tokens."""

    ids_RN: Any
    logps_RN: Any
    entropies_RN: Any
    counts_R: Any


@functools.lru_cache(maxsize=8)
def programs(model: Any, prefill_chunk: int, tokens_per_call: int) -> Programs:
    """The programs for these settings, shared by all engines that use the same model object."""
    return Programs(model, prefill_chunk=prefill_chunk, tokens_per_call=tokens_per_call)


class Programs:
    """Jitted programs for one model. ``traces`` counts how often each was traced (compiled)."""

    def __init__(self, model: Any, *, prefill_chunk: int, tokens_per_call: int) -> None:
        """``model`` follows the ``LanguageModel`` contract (``apply_cached``, ``unembed``)."""
        self.model = model
        self.prefill_chunk = prefill_chunk
        self.tokens_per_call = tokens_per_call
        self.base_key = jax.random.key(0)
        self.traces: collections.Counter[str] = collections.Counter()
        self.prefill = jax.jit(self._prefill, donate_argnames="cache")
        self.decode = jax.jit(self._decode, donate_argnames="cache")
        self.copy_within = jax.jit(self._copy_within, donate_argnames="cache")
        self.copy_across = jax.jit(self._copy_across, donate_argnames="cache")

    def _prefill(
        self,
        params: Params,
        cache: Cache,
        rows_P: jax.Array,
        ids_PS: jax.Array,
        start_P: jax.Array,
        length_P: jax.Array,
    ) -> Cache:
        """Puts ``length_P`` ids into ``rows_P`` from position ``start_P`` on, chunk by chunk.

        A row's chunks begin at its own ``start``. A row index of R (out of range) is padding.
        """
        self.traces["prefill"] += 1
        chunk = self.prefill_chunk
        sub = jax.tree.map(lambda leaf: leaf.at[rows_P].get(mode="clip"), cache)

        def body(carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
            i, sub = carry
            ids_PC = jax.lax.dynamic_slice_in_dim(ids_PS, i * chunk, chunk, axis=1)
            valid_P = jnp.clip(length_P - i * chunk, 0, chunk)
            _, sub = self.model.apply_cached(params, sub, ids_PC, start_P + i * chunk, valid_P)
            return i + 1, sub

        n_chunks = (jnp.max(length_P) + chunk - 1) // chunk
        _, sub = jax.lax.while_loop(lambda c: c[0] < n_chunks, body, (jnp.int32(0), sub))
        return jax.tree.map(lambda leaf, new: leaf.at[rows_P].set(new, mode="drop"), cache, sub)

    def _decode(self, params: Params, cache: Cache, rows: DecodeRows) -> tuple[Cache, Sampled]:
        """Samples up to ``tokens_per_call`` tokens in every row that has a budget.

        A row ends on a stop id or when its budget is used up; the call ends when all rows have.
        """
        self.traces["decode"] += 1
        n_rows, limit = rows.ids_R.shape[0], self.tokens_per_call
        keys_R = sampling.row_keys(self.base_key, rows.seeds_R)

        def body(carry: Any) -> Any:
            i, cache, ids_R, positions_R, alive_R, counts_R, out = carry
            hidden_R1D, cache = self.model.apply_cached(
                params, cache, ids_R[:, None], positions_R, alive_R.astype(jnp.int32)
            )
            logits_RV = self.model.unembed(params, hidden_R1D[:, 0])
            new_R, logp_R, entropy_R = sampling.sample(
                logits_RV, keys_R, positions_R + 1, rows.temperature_R
            )
            out = tuple(
                jax.lax.dynamic_update_index_in_dim(old_NR, value_R, i, axis=0)
                for old_NR, value_R in zip(out, (new_R, logp_R, entropy_R), strict=True)
            )
            counts_R = counts_R + alive_R
            stopped_R = jnp.any(new_R[:, None] == rows.stop_RK, axis=1)
            ids_R = jnp.where(alive_R, new_R, ids_R)
            positions_R = positions_R + alive_R
            alive_R = alive_R & ~stopped_R & (counts_R < rows.budget_R)
            return i + 1, cache, ids_R, positions_R, alive_R, counts_R, out

        out = (
            jnp.zeros((limit, n_rows), jnp.int32),
            jnp.zeros((limit, n_rows), jnp.float32),
            jnp.zeros((limit, n_rows), jnp.float32),
        )
        carry = (
            jnp.int32(0),
            cache,
            rows.ids_R,
            rows.positions_R,
            rows.budget_R > 0,
            jnp.zeros((n_rows,), jnp.int32),
            out,
        )
        carry = jax.lax.while_loop(lambda c: (c[0] < limit) & jnp.any(c[4]), body, carry)
        _, cache, _, _, _, counts_R, (ids_NR, logps_NR, entropies_NR) = carry
        return cache, Sampled(ids_NR.T, logps_NR.T, entropies_NR.T, counts_R)

    def _copy_within(self, cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
        """Copies row ``source`` over row ``target`` of the same cache."""
        self.traces["copy"] += 1
        copy_row = functools.partial(_copy_row, source=source, target=target)
        return jax.tree.map(copy_row, cache, cache)

    def _copy_across(
        self, cache: Cache, origin: Cache, source: jax.Array, target: jax.Array
    ) -> Cache:
        """Copies row ``source`` of ``origin`` over row ``target`` of ``cache``."""
        self.traces["copy"] += 1
        copy_row = functools.partial(_copy_row, source=source, target=target)
        return jax.tree.map(copy_row, cache, origin)


def _copy_row(to: jax.Array, of: jax.Array, *, source: jax.Array, target: jax.Array) -> jax.Array:
    row = jax.lax.dynamic_index_in_dim(of, source, axis=0, keepdims=True)
    return jax.lax.dynamic_update_slice_in_dim(to, row, target, axis=0)
