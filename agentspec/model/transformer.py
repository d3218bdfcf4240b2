"""The one decoder: Flax NNX modules, and their functional face used by every other room.

In: token ids [B, T] with positions, segments, branches and cuts (training), or ids with a cache
(decoding). Out: hidden states [B, T, D], and logits in float32. ``LanguageModel`` splits the
modules once into static graphs and a plain nested dict of arrays; engine, update and checkpoint
pass that dict through ``jax.jit`` (never ``nnx.jit``, whose call overhead grows with the depth).
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentspec.mesh import BATCH_AXES, LOGICAL_AXES
from agentspec.model import attention
from agentspec.model.cache import (
    Cache,
    LayerCache,
    cache_length,
    cache_specs,
    init_cache,
    static_attender,
)
from agentspec.model.config import ModelConfig
from agentspec.model.deltanet import DeltaNet
from agentspec.model.layers import MLP, Attention, Full, RMSNorm, Step, rotary
from agentspec.model.paged import Families, PagedCache, PagedKV, init_pages, paged_attender
from agentspec.model.parameters import param

Params = dict[str, Any]
_REMAT = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Layer(nnx.Module):
    """One pre-norm decoder layer: full attention or Gated DeltaNet, then the MLP."""

    def __init__(self, config: ModelConfig, kind: str, rngs: nnx.Rngs) -> None:
        """Makes the mixer of that kind and the MLP, each with its norm before it."""
        self.attention_norm = RMSNorm(config, rngs, config.d_model)
        self.kind = kind
        if kind == "full":
            self.attention = Attention(config, rngs)
        else:
            self.deltanet = DeltaNet(config, rngs)
        self.mlp_norm = RMSNorm(config, rngs, config.d_model)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BTD: jax.Array, full: Full) -> jax.Array:
        """Returns [B, T, D] of a full forward pass."""
        h_BTD = self.attention_norm(x_BTD)
        if self.kind == "full":
            x_BTD = x_BTD + self.attention(h_BTD, full)
        else:
            x_BTD = x_BTD + self.deltanet(h_BTD, full.layout)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))

    def cached(self, x_RTD: jax.Array, step: Step, cache: Any) -> tuple[jax.Array, Any]:
        """Returns [R, T, D] and this layer's cache with the new tokens in it."""
        h_RTD = self.attention_norm(x_RTD)
        if self.kind == "full":
            mixed, cache = self.attention.cached(h_RTD, step, cache)
        else:
            mixed, cache = self.deltanet.cached(h_RTD, cache, step.start_R, step.valid_R)
        x_RTD = x_RTD + mixed
        return x_RTD + self.mlp(self.mlp_norm(x_RTD)), cache


class Ends(nnx.Module):
    """What stands before and behind the layers: embedding, final norm, head unless it is tied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Makes the parameters of both ends."""
        V, D = config.vocab_size, config.d_model
        self.dtype = jnp.dtype(config.dtype)
        self.embedding = param(config, rngs, ("vocab", "width"), (V, D), D**-0.5)
        self.norm = RMSNorm(config, rngs, D)
        if not config.tie_embeddings:
            self.head = param(config, rngs, ("vocab", "width"), (V, D), D**-0.5)
        self.tied = config.tie_embeddings

    def embed(self, ids_BT: jax.Array) -> jax.Array:
        """Returns [B, T, D] in the compute dtype."""
        return self.embedding[...][ids_BT].astype(self.dtype)

    @property
    def head_weight(self) -> Any:
        """The head's parameter [V, D], which may be the embedding."""
        return self.embedding if self.tied else self.head

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits [..., V]."""
        weight_VD = self.head_weight[...].astype(hidden.dtype)
        return jnp.matmul(hidden, weight_VD.T, preferred_element_type=jnp.float32)


class LanguageModel:
    """The modules as pure functions of (params, arrays). Static and hashable by identity.

    Call these under your own ``jax.jit``; none of them jits. With a ``mesh`` rows are laid out over
    its batch axes, whatever the program around says. ``params["layers"]`` has ``config.period``
    entries: one a layer, or with ``scan`` the layers of each place in the pattern, stacked.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh | None = None) -> None:
        """Traces the modules once for their graphs and shapes; no weights are made."""
        self.config, self.mesh = config, mesh
        kinds = config.kinds[: config.period]
        abstract = nnx.eval_shape(
            lambda: {
                "ends": Ends(config, nnx.Rngs(0)),
                **{str(j): Layer(config, kind, nnx.Rngs(0)) for j, kind in enumerate(kinds)},
            }
        )
        self._graphs = {name: nnx.graphdef(module) for name, module in abstract.items()}
        self.shapes: Params = jax.eval_shape(self.init, jax.random.key(0))
        axes = {name: _axes(module) for name, module in abstract.items()}
        layers = {str(j): axes[str(j)] for j in range(config.period)}
        if config.scan:
            layers = jax.tree.map(lambda one: ("layers", *one), layers, is_leaf=_is_axes)
        self.logical_axes: Params = axes["ends"] | {"layers": layers}

    def init(self, key: jax.Array) -> Params:
        """Returns fresh parameters: a plain nested dict of arrays, from one PRNG key."""
        c = self.config
        rngs = nnx.Rngs(params=key)
        ends = nnx.to_pure_dict(nnx.state(Ends(c, rngs)))

        def block(rngs: nnx.Rngs) -> Params:
            kinds = enumerate(c.kinds[: c.period])
            return {str(j): nnx.to_pure_dict(nnx.state(Layer(c, kind, rngs))) for j, kind in kinds}

        if not c.scan:
            return ends | {"layers": block(rngs)}
        keys = jax.random.split(rngs.params(), c.n_layers // c.period)
        return ends | {"layers": jax.vmap(lambda key: block(nnx.Rngs(params=key)))(keys)}

    def hidden(
        self,
        params: Params,
        ids_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        branch_ids_BT: jax.Array | None = None,
        cuts_BT: jax.Array | None = None,
        branches_BNJ: jax.Array | None = None,
    ) -> jax.Array:
        """Returns hidden states [B, T, D] after the final norm, in the compute dtype.

        Query i sees key j iff both are in one segment, j is no later in the row, and (branch j ==
        branch i and position j <= position i, or branch j == 0 and position j < cut i). Positions
        default to 0..T-1, segments and branches to one. Padding must be segment 0. A hybrid model
        needs ``branches_BNJ`` with branches: see ``attention.Layout``.
        """
        ids_BT = jnp.asarray(ids_BT)
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
        if (branch_ids_BT is None) != (cuts_BT is None):
            raise ValueError("branch_ids_BT and cuts_BT are given together or not at all")
        given = (segment_ids_BT, branch_ids_BT, cuts_BT, branches_BNJ)
        layout = attention.Layout(
            jnp.asarray(positions_BT), *(None if a is None else jnp.asarray(a) for a in given)
        )
        full = Full(
            rotary(self.config, layout.positions_BT),
            attention.attender(layout, self.attention, self.mesh),
            layout,
        )
        ends = self.ends(params)
        x_BTD = ends.embed(ids_BT)
        if self.mesh is not None:  # first as the table is cut, then by rows: one exchange
            x_BTD = self._constrain(x_BTD, BATCH_AXES[0], None, LOGICAL_AXES["width"])
        x_BTD = self._place(x_BTD)
        if self.config.scan:

            def block(x_BTD: jax.Array, layers: Params) -> tuple[jax.Array, None]:
                for j in range(self.config.period):
                    x_BTD = self._layer(j, x_BTD, layers[str(j)], full)
                return x_BTD, None

            x_BTD, _ = jax.lax.scan(block, x_BTD, params["layers"])
        else:
            for j in range(self.config.period):
                x_BTD = self._layer(j, x_BTD, params["layers"][str(j)], full)
        return ends.norm(self._by_rows(x_BTD))

    def unembed(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits [..., V] of hidden states [..., D]."""
        return self.ends(params).unembed(hidden)

    def head(self, params: Params) -> jax.Array:
        """Returns the head [V, D] as it is stored."""
        return self.ends(params).head_weight[...]

    def unembed_part(self, hidden: jax.Array, part_PD: jax.Array) -> jax.Array:
        """Returns float32 logits [..., P] of some of the head's entries; meshes cut these."""
        part_PD = part_PD.astype(hidden.dtype)
        if self.mesh is not None:
            part_PD = self._constrain(part_PD, LOGICAL_AXES["vocab"])
        return jnp.matmul(hidden, part_PD.T, preferred_element_type=jnp.float32)

    def apply(self, params: Params, ids_BT: jax.Array, *layout: Any, **more: Any) -> jax.Array:
        """Returns float32 logits [B, T, V] of a full, uncached forward pass; see ``hidden``."""
        return self.unembed(params, self.hidden(params, ids_BT, *layout, **more))

    def init_cache(self, rows: int, length: int) -> Cache:
        """Returns an empty cache for ``rows`` sequences of up to ``length`` tokens."""
        if self.mesh is None:
            return init_cache(self.config, rows, length)
        mesh, specs = self.mesh, cache_specs(self.config)
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        return jax.jit(init_cache, static_argnums=(0, 1, 2), out_shardings=where)(
            self.config, rows, length
        )

    def apply_cached(
        self,
        params: Params,
        cache: Cache,
        ids_RT: jax.Array,
        start_R: jax.Array,
        valid_R: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Returns (hidden [R, T, D], cache) for T tokens a row, appended at ``start_R``.

        Row r's token t stands at position ``start_r + t`` and sees the row's tokens up to its own.
        It is kept iff ``t < valid_r`` (a count: 0 leaves the row's cache as it was) and the
        position lies in the cache. Hidden states of tokens not kept mean nothing. Linear layers go
        on from the row's last token, or from nothing where ``start_r`` is 0.
        """
        positions_RT = start_R[:, None] + jnp.arange(ids_RT.shape[1])
        attend = static_attender(positions_RT, valid_R, cache_length(cache))
        step = Step(rotary(self.config, positions_RT), attend, start_R, valid_R)
        return self._cached(params, cache, ids_RT, step)

    def init_pages(self, pages: int, page_tokens: int, states: int) -> PagedCache:
        """Returns an empty paged cache: pages for attention layers, slots for linear ones."""
        if self.mesh is None:
            return init_pages(self.config, pages, page_tokens, states)
        mesh, specs = self.mesh, cache_specs(self.config)
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        where = tuple(PagedKV(*one) if isinstance(one, LayerCache) else one for one in where)
        return jax.jit(init_pages, static_argnums=(0, 1, 2, 3), out_shardings=where)(
            self.config, pages, page_tokens, states
        )

    def apply_paged(
        self,
        params: Params,
        cache: PagedCache,
        ids_RT: jax.Array,
        start_R: jax.Array,
        valid_R: jax.Array,
        table_RJ: jax.Array,
        families: Families | None = None,
    ) -> tuple[jax.Array, PagedCache]:
        """Returns (hidden [R, T, D], cache), as `apply_cached`, with keys and values in pages.

        Several rows may be spans of one sequence: all are written before any is read. Linear
        layers' entries of ``cache`` are by row here, so that there a sequence has one row.
        """
        positions_RT = start_R[:, None] + jnp.arange(ids_RT.shape[1])
        attend = paged_attender(table_RJ, positions_RT, valid_R, families)
        step = Step(rotary(self.config, positions_RT), attend, start_R, valid_R)
        return self._cached(params, cache, ids_RT, step)

    def _cached(
        self, params: Params, cache: tuple[Any, ...], ids_RT: jax.Array, step: Step
    ) -> tuple[jax.Array, Any]:
        ends = self.ends(params)
        x_RTD = ends.embed(ids_RT)
        caches = []
        for layer, layer_cache in zip(self.layers(params), cache, strict=True):
            x_RTD, layer_cache = layer.cached(x_RTD, step, layer_cache)
            caches.append(layer_cache)
        return ends.norm(x_RTD), tuple(caches)

    @property
    def attention(self) -> str:
        """``xla`` or ``splash``: what ``config.attention`` means on the devices at hand.

        Raises:
            ValueError: for ``splash`` on other devices than TPUs.
        """
        device = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        wanted = self.config.attention
        if wanted == "auto":
            return "splash" if device.platform == "tpu" else "xla"
        if wanted == "splash" and device.platform != "tpu":
            raise ValueError(f"model.attention=splash needs a TPU, the device is {device.platform}")
        return wanted

    def ends(self, params: Params) -> Ends:
        """Returns the NNX module of embedding, final norm and head that holds ``params``."""
        state = {name: value for name, value in params.items() if name != "layers"}
        return cast(Ends, nnx.merge(self._graphs["ends"], state))

    def layers(self, params: Params) -> list[Layer]:
        """Returns the NNX modules of all layers, first to last, that hold ``params``."""
        n = self.config.n_layers
        if not self.config.scan:
            return [self._merged(i, params["layers"][str(i)]) for i in range(n)]
        places = [divmod(i, self.config.period) for i in range(n)]
        return [
            self._merged(j, jax.tree.map(lambda a, k=k: a[k], params["layers"][str(j)]))
            for k, j in places
        ]

    def _merged(self, j: int, layer_params: Params) -> Layer:
        return cast(Layer, nnx.merge(self._graphs[str(j)], layer_params))

    def _layer(self, j: int, x_BTD: jax.Array, layer_params: Params, full: Full) -> jax.Array:
        """Layer j of the pattern, with its backward pass as ``config.remat`` says."""

        def run(x_BTD: jax.Array, layer_params: Params) -> jax.Array:
            return self._merged(j, layer_params)(self._by_rows(x_BTD), full)

        if self.config.remat != "none":
            run = jax.checkpoint(
                run, policy=_REMAT[self.config.remat], prevent_cse=not self.config.scan
            )
        # Placed before too, or under scan the kept inputs would be whole on every device.
        return self._place(run(self._place(x_BTD), layer_params))

    def _by_rows(self, x_BTD: jax.Array) -> jax.Array:
        """The same by rows over the mesh's batch axes."""
        return x_BTD if self.mesh is None else self._constrain(x_BTD, BATCH_AXES)

    def _place(self, x_BTD: jax.Array) -> jax.Array:
        """The same by rows over the mesh's batch axes, and by tokens over the axis of heads.

        Between layers nothing mixes tokens, so that what the backward pass keeps, each layer's
        input, is cut over all devices; within a layer heads are cut instead.
        """
        if self.mesh is None:
            return x_BTD
        axis = LOGICAL_AXES["heads"]
        whole = axis is None or x_BTD.shape[1] % self.mesh.shape[axis]
        return self._constrain(x_BTD, BATCH_AXES, None if whole else axis)

    def _constrain(self, x: jax.Array, *axes: Any) -> jax.Array:
        assert self.mesh is not None
        where = NamedSharding(self.mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(x, where)


def _axes(module: nnx.Module) -> Params:
    """Logical axes of a module's parameters."""
    return cast(
        Params,
        nnx.to_pure_dict(
            jax.tree.map(
                lambda variable: variable.get_metadata("axes"),
                nnx.state(module),
                is_leaf=lambda node: isinstance(node, nnx.Variable),
            )
        ),
    )


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)
