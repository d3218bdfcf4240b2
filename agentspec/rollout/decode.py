"""The engine's device programs: read spans, sample, copy pages, save and load them.

In: the paged cache (donated, so updated in place), and small host arrays saying what each row
does. Out: the cache, and the sampled tokens. Each program has one shape, whoever is in it: a row's
results do not depend on its index, its neighbours or on how its tokens are split into calls, bit
for bit (float32, one machine).
"""

from __future__ import annotations

import collections
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from agentspec.model.deltanet import DeltaCache
from agentspec.model.paged import Families
from agentspec.rollout import sampling

Params = Any
Cache = Any


class SpanRows(NamedTuple):
    """Spans to read; arrays [S] int32. Slots out of range: no state is read or written."""

    ids_SC: Any
    table_SJ: Any
    start_S: Any
    valid_S: Any  # 0: padding
    source_S: Any
    target_S: Any


class DecodeRows(NamedTuple):
    """What each row does in a decode call; arrays [R] (-1 in ``stop_RK`` is padding)."""

    ids_R: Any  # int32: the last known id of the row, fed first
    positions_R: Any  # int32: where that id stands
    budget_R: Any  # int32: how many tokens the row may still sample; 0: the row is idle
    least_R: Any  # int32: how many it must sample before a stop id may come
    seeds_R: Any  # uint32
    temperature_R: Any  # float32
    top_p_R: Any  # float32
    top_k_R: Any  # int32
    stop_RK: Any  # int32
    forced_RN: Any  # int32: -1 is drawn
    table_RJ: Any  # int32
    source_R: Any  # int32: slots of the state before and after
    target_R: Any


class Sampled(NamedTuple):
    """Result of a decode call: the first ``counts_R`` entries of a row are its new tokens."""

    ids_RN: Any
    logps_RN: Any
    entropies_RN: Any
    counts_R: Any


@functools.lru_cache(maxsize=8)
def programs(model: Any, tokens_per_call: int) -> Programs:
    """The programs for these settings, shared by all engines that use the same model object."""
    return Programs(model, tokens_per_call)


class Programs:
    """Jitted programs for one model. ``traces`` counts how often each was traced (compiled)."""

    def __init__(self, model: Any, tokens_per_call: int) -> None:
        """``model`` follows the ``LanguageModel`` contract (``apply_paged``, ``unembed``)."""
        self.model, self.tokens_per_call = model, tokens_per_call
        self.base_key = jax.random.key(0)
        self.traces: collections.Counter[str] = collections.Counter()
        self.read = jax.jit(self._read, donate_argnames="cache")
        self.decode = jax.jit(self._decode, donate_argnames="cache")
        self.copy = jax.jit(self._copy, donate_argnames="cache")
        self.save = jax.jit(self._save)
        self.load = jax.jit(self._load, donate_argnames="cache")

    def _read(self, params: Params, cache: Cache, spans: SpanRows) -> Cache:
        """Reads one block of spans."""
        self.traces["prefill"] += 1
        rows = _by_row(cache, spans.source_S)
        _, rows = self.model.apply_paged(
            params, rows, spans.ids_SC, spans.start_S, spans.valid_S, spans.table_SJ
        )
        return _by_slot(cache, rows, spans.target_S)

    def _decode(
        self, params: Params, cache: Cache, rows: DecodeRows, families: Families | None
    ) -> tuple[Cache, Sampled]:
        """Samples up to ``tokens_per_call`` tokens in every row that has a budget.

        A row ends on a stop id or when its budget is used up; the call ends when all rows have.
        """
        self.traces["decode"] += 1
        n_rows, limit = rows.ids_R.shape[0], self.tokens_per_call
        keys_R = sampling.row_keys(self.base_key, rows.seeds_R)

        def body(carry: Any) -> Any:
            i, by_row, ids_R, positions_R, alive_R, counts_R, out = carry
            hidden_R1D, by_row = self.model.apply_paged(
                params,
                by_row,
                ids_R[:, None],
                positions_R,
                alive_R.astype(jnp.int32),
                rows.table_RJ,
                families,
            )
            logits_RV = self.model.unembed(params, hidden_R1D[:, 0])
            draw = sampling.Draw(
                temperature_R=rows.temperature_R,
                top_p_R=rows.top_p_R,
                top_k_R=rows.top_k_R,
                barred_RK=jnp.where((counts_R < rows.least_R)[:, None], rows.stop_RK, -1),
                forced_R=jax.lax.dynamic_index_in_dim(rows.forced_RN, i, 1, keepdims=False),
            )
            new_R, logp_R, entropy_R = sampling.sample(logits_RV, keys_R, positions_R + 1, draw)
            out = tuple(
                jax.lax.dynamic_update_index_in_dim(old_NR, value_R, i, axis=0)
                for old_NR, value_R in zip(out, (new_R, logp_R, entropy_R), strict=True)
            )
            counts_R = counts_R + alive_R
            stopped_R = jnp.any(new_R[:, None] == rows.stop_RK, axis=1)
            ids_R = jnp.where(alive_R, new_R, ids_R)
            positions_R = positions_R + alive_R
            alive_R = alive_R & ~stopped_R & (counts_R < rows.budget_R)
            return i + 1, by_row, ids_R, positions_R, alive_R, counts_R, out

        out = (
            jnp.zeros((limit, n_rows), jnp.int32),
            jnp.zeros((limit, n_rows), jnp.float32),
            jnp.zeros((limit, n_rows), jnp.float32),
        )
        carry = (
            jnp.int32(0),
            _by_row(cache, rows.source_R),
            rows.ids_R,
            rows.positions_R,
            rows.budget_R > 0,
            jnp.zeros((n_rows,), jnp.int32),
            out,
        )
        carry = jax.lax.while_loop(lambda c: (c[0] < limit) & jnp.any(c[4]), body, carry)
        _, by_row, _, _, _, counts_R, (ids_NR, logps_NR, entropies_NR) = carry
        cache = _by_slot(cache, by_row, rows.target_R)
        return cache, Sampled(ids_NR.T, logps_NR.T, entropies_NR.T, counts_R)

    def _copy(self, cache: Cache, source_C: jax.Array, target_C: jax.Array) -> Cache:
        """Copies pages; a target out of range is padding."""
        self.traces["copy"] += 1

        def one(layer: Any) -> Any:
            if isinstance(layer, DeltaCache):
                return layer
            return jax.tree.map(
                lambda x: x.at[target_C].set(x.at[source_C].get(mode="clip"), mode="drop"), layer
            )

        return tuple(one(layer) for layer in cache)

    def _save(self, cache: Cache, pages_W: jax.Array, slots: dict[str, jax.Array]) -> Any:
        """Returns what these pages and slots hold."""
        self.traces["save"] += 1
        pages = [
            jax.tree.map(lambda x: x.at[pages_W].get(mode="clip"), layer)
            for layer in cache
            if not isinstance(layer, DeltaCache)
        ]
        states = [layer for layer in cache if isinstance(layer, DeltaCache)]
        return pages, {
            name: jax.tree.map(lambda x, s=slot: x.at[s].get(mode="clip"), states)
            for name, slot in slots.items()
        }

    def _load(
        self, cache: Cache, pages_W: jax.Array, slots: dict[str, jax.Array], saved: Any
    ) -> Cache:
        """Puts back what ``_save`` gave; places out of range are left out."""
        self.traces["load"] += 1
        pages, states = iter(saved[0]), {name: iter(part) for name, part in saved[1].items()}
        out = []
        for layer in cache:
            if isinstance(layer, DeltaCache):
                for name, slot in slots.items():
                    new = next(states[name])
                    layer = jax.tree.map(
                        lambda x, y, s=slot: x.at[s].set(y, mode="drop"), layer, new
                    )
            else:
                layer = jax.tree.map(
                    lambda x, y: x.at[pages_W].set(y, mode="drop"), layer, next(pages)
                )
            out.append(layer)
        return tuple(out)


def _by_row(cache: Cache, source_R: jax.Array) -> Cache:
    """The cache with the states of slots ``source_R`` in place of all slots."""
    return tuple(
        jax.tree.map(lambda x: x.at[source_R].get(mode="clip"), layer)
        if isinstance(layer, DeltaCache)
        else layer
        for layer in cache
    )


def _by_slot(cache: Cache, rows: Cache, target_R: jax.Array) -> Cache:
    """The cache with the rows' states put into slots ``target_R``; out of range is dropped."""
    return tuple(
        jax.tree.map(lambda x, new: x.at[target_R].set(new, mode="drop"), layer, row)
        if isinstance(layer, DeltaCache)
        else row
        for layer, row in zip(cache, rows, strict=True)
    )
