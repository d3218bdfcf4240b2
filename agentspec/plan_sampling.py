"""The sampling engine's programs, compiled for the chips of one host that is not there.

In: settings and the shape of a model. Out: ``plan_programs.Measured`` of prefill and decode, as
`rollout.decode.Programs` has them, with what the caches take. See ``plan_programs``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from agentspec.chips import Slice
from agentspec.mesh import LOGICAL_AXES, make_mesh, param_shardings
from agentspec.model.config import ModelConfig
from agentspec.model.paged import Families, init_pages
from agentspec.model.transformer import LanguageModel
from agentspec.plan_programs import Measured, chip_bytes, compiled, placed, slice_devices
from agentspec.rollout.decode import DecodeRows, Programs, SpanRows
from agentspec.rollout.device import (
    FAMILY_ROWS,
    MAX_STOP_IDS,
    default_pages,
    n_states,
    span_rows,
)
from agentspec.settings import Settings


class Sampling:
    """The engine's programs on the chips of one host, weights and cache heads cut over them.

    Cached layers are compiled one by one, so a deep model takes minutes. Instead the programs of
    the first layers, two and three repeats of their pattern, are compiled and the rest is added in
    proportion (`grown`).
    """

    def __init__(self, settings: Settings, config: ModelConfig, host: Slice) -> None:
        """Weights are in the compute dtype here: a copy of the trained ones.

        ``host`` is `chips.Slice.host`: nothing can be compiled for a part of a slice.
        """
        self.settings = settings
        self.config = dataclasses.replace(config, param_dtype=config.dtype, remat="none")
        devices = slice_devices(host)
        for ways in (len(devices), 1):  # one chip, where the model does not divide over all
            self.mesh = make_mesh(tensor=ways, devices=devices[:ways])
            try:
                self.model, self.params = self._weights(config.n_layers)
                break
            except ValueError:
                if ways == 1:
                    raise

    def cache(self, rows: tuple[int, int], n_layers: int | None = None) -> Any:
        """The abstract cache of an engine of so many rows; heads are cut where there are heads."""
        config = _first_layers(self.config, n_layers or self.config.n_layers)
        e, ways = self.settings.engine, self.mesh.shape["tensor"]
        pages = e.pages or default_pages(*rows, -(-e.cache_tokens // e.page_tokens))
        states = n_states(*rows) if "linear" in config.kinds else 0
        shapes = jax.eval_shape(lambda: init_pages(config, pages, e.page_tokens, states))

        def one(leaf: Any) -> Any:
            cut = leaf.ndim == 4 and leaf.shape[1] % ways == 0
            spec = PartitionSpec(None, LOGICAL_AXES["kv_heads"]) if cut else PartitionSpec()
            return placed(leaf, NamedSharding(self.mesh, spec))

        return jax.tree.map(one, shapes)

    @property
    def row_bytes(self) -> int:
        """What one more agent sequence of full length takes of each chip."""
        return chip_bytes(self.cache((3, 0))) - chip_bytes(self.cache((2, 0)))

    def prefilling(self, rows: tuple[int, int]) -> Measured:
        """Reading of one block of spans."""
        n, chunk = span_rows(self.settings.engine.prefill_chunk), self.settings.engine.prefill_chunk
        ints = self._array((n,), jnp.int32)
        ids, table = self._array((n, chunk), jnp.int32), self._table(n)
        return self._deep("prefill", "read", rows, SpanRows(ids, table, ints, ints, ints, ints))

    def decoding(self, name: str, rows: tuple[int, int]) -> Measured:
        """Decode of the agent's or the speculator's rows; its cost is one token in every row."""
        speculator = "speculator" in name
        n = rows[speculator]
        ints, floats = self._array((n,), jnp.int32), self._array((n,), jnp.float32)
        asked = DecodeRows(
            ids_R=ints,
            positions_R=ints,
            budget_R=ints,
            least_R=ints,
            seeds_R=self._array((n,), jnp.uint32),
            temperature_R=floats,
            top_p_R=floats,
            top_k_R=ints,
            stop_RK=self._array((n, MAX_STOP_IDS), jnp.int32),
            forced_RN=self._array((n, self.settings.engine.tokens_per_call), jnp.int32),
            table_RJ=self._table(n),
            source_R=ints,
            target_R=ints,
        )
        members = self._array((n, FAMILY_ROWS), jnp.int32)
        families = Families(members, ints, ints, ints) if speculator else None
        return self._deep(name, "decode", rows, asked, families)

    def _table(self, n: int) -> Any:
        e = self.settings.engine
        return self._array((n, -(-e.cache_tokens // e.page_tokens)), jnp.int32)

    def _deep(self, name: str, which: str, rows: tuple[int, int], *asked: Any) -> Measured:
        period = dataclasses.replace(self.config, scan=True).period
        repeats = self.config.n_layers // period
        # Not one repeat: the last attention of a prefill is left out, since nothing needs it.
        depths = (2 * period, 3 * period) if repeats > 3 else (self.config.n_layers,)
        e, found = self.settings.engine, []
        for depth in depths:
            model, params = self._weights(depth)
            programs = Programs(model, e.tokens_per_call)
            run, cache = getattr(programs, which), self.cache(rows, depth)
            found.append(compiled(name, run, params, cache, *asked))
        if len(found) == 1:
            return found[0]
        two, three = found
        return grown(two, three, repeats)

    def _weights(self, n_layers: int) -> tuple[LanguageModel, Any]:
        model = LanguageModel(_first_layers(self.config, n_layers), mesh=self.mesh)
        where = param_shardings(model.logical_axes, model.shapes, self.mesh)
        return model, jax.tree.map(placed, model.shapes, where)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)


def grown(two: Measured, three: Measured, n: int) -> Measured:
    """What n repeats take and cost, on the line through what two and three do."""

    def at(a: float, b: float) -> float:
        return a + (n - 2) * (b - a)

    given, results, aliased, temporary = (
        int(at(a, b)) for a, b in zip(two.sizes, three.sizes, strict=True)
    )
    whole = Measured(three.name, given, results, aliased, temporary)
    whole = dataclasses.replace(whole, compile_s=two.compile_s + three.compile_s)
    if two.cost is None or three.cost is None:  # too large already, and more fits no better
        return dataclasses.replace(whole, needs_bytes=max(two.total_bytes, three.total_bytes))
    cost = dataclasses.replace(
        three.cost,
        flops=at(two.cost.flops, three.cost.flops),
        bytes=at(two.cost.bytes, three.cost.bytes),
    )
    return dataclasses.replace(whole, cost=cost)


def _first_layers(config: ModelConfig, n: int) -> ModelConfig:
    return dataclasses.replace(config, n_layers=n, layer_types=config.layer_types[:n])
