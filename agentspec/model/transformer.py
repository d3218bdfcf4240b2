"""The one decoder: a Flax NNX module, and its functional face used by every other room.

In: token ids [B, T] with positions, segments, branches and cuts (training), or ids with a cache
(decoding). Out: hidden states [B, T, D], and logits in float32. ``LanguageModel`` splits the module
once into a static graph and a plain nested dict of arrays; engine, update and checkpoint pass that
dict through ``jax.jit`` (never ``nnx.jit``, whose call overhead grows with the depth).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from agentspec.model import attention
from agentspec.model.cache import Cache, init_cache, slots
from agentspec.model.config import ModelConfig
from agentspec.model.layers import Layer, RMSNorm, param, rotary

Params = dict[str, Any]


class Transformer(nnx.Module):
    """Embedding, layers (unrolled in Python), final norm, and a head unless it is tied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Makes all parameters of ``config``."""
        V, D = config.vocab_size, config.d_model
        self.config = config
        self.embedding = param(config, rngs, ("vocab", "width"), (V, D), D**-0.5)
        self.layers = nnx.Dict({str(i): Layer(config, rngs) for i in range(config.n_layers)})
        self.norm = RMSNorm(config, rngs, D)
        if not config.tie_embeddings:
            self.head = param(config, rngs, ("vocab", "width"), (V, D), D**-0.5)

    def stack(self) -> list[Layer]:
        """Returns the layers from first to last."""
        return [self.layers[str(i)] for i in range(self.config.n_layers)]

    def hidden(self, ids_BT: jax.Array, layout: attention.Layout) -> jax.Array:
        """Returns [B, T, D] after the final norm."""
        x_BTD = self.embedding[...][ids_BT]
        rope = rotary(self.config, layout.positions_BT)
        seen_tiles = attention.visible_tiles(layout)
        for layer in self.stack():

            def run(x_BTD: jax.Array, layer: Layer = layer) -> jax.Array:
                return layer(x_BTD, rope, seen_tiles)

            x_BTD = jax.checkpoint(run)(x_BTD) if self.config.remat else run(x_BTD)
        return self.norm(x_BTD)

    def hidden_cached(
        self, cache: Cache, ids_RT: jax.Array, start_R: jax.Array, valid_R: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Returns [R, T, D] after the final norm, and the cache with the valid tokens in it."""
        T, S = ids_RT.shape[1], cache[0].k_RKSE.shape[2]
        positions_RT = start_R[:, None] + jnp.arange(T)
        seen_RTS = jnp.arange(S) <= positions_RT[:, :, None]
        slots_RT = slots(start_R, valid_R, T, S)
        rope = rotary(self.config, positions_RT)
        x_RTD = self.embedding[...][ids_RT]
        caches = []
        for layer, layer_cache in zip(self.stack(), cache, strict=True):
            x_RTD, layer_cache = layer.cached(x_RTD, rope, layer_cache, slots_RT, seen_RTS)
            caches.append(layer_cache)
        return self.norm(x_RTD), tuple(caches)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits [..., V]."""
        weight_VD = self.embedding[...] if self.config.tie_embeddings else self.head[...]
        return jnp.matmul(hidden, weight_VD.T, preferred_element_type=jnp.float32)


class LanguageModel:
    """A ``Transformer`` as pure functions of (params, arrays). Static and hashable by identity.

    Call these under your own ``jax.jit``; none of them jits.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Traces the module once for its graph and shapes; no weights are made."""
        self.config = config
        abstract = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
        self.graphdef, state = nnx.split(abstract)
        self.shapes: Params = nnx.to_pure_dict(state)  # ShapeDtypeStruct leaves
        self.logical_axes: Params = nnx.to_pure_dict(
            jax.tree.map(
                lambda variable: variable.get_metadata("axes"),
                state,
                is_leaf=lambda node: isinstance(node, nnx.Variable),
            )
        )

    def module(self, params: Params) -> Transformer:
        """Returns the NNX module that holds ``params``."""
        return nnx.merge(self.graphdef, params)

    def init(self, key: jax.Array) -> Params:
        """Returns fresh parameters: a plain nested dict of arrays, from one PRNG key."""
        return nnx.to_pure_dict(nnx.state(Transformer(self.config, nnx.Rngs(params=key))))

    def hidden(
        self,
        params: Params,
        ids_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        branch_ids_BT: jax.Array | None = None,
        cuts_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns hidden states [B, T, D] after the final norm, in the parameters' dtype.

        Query i sees key j iff both are in one segment, j is no later in the row, and (branch j ==
        branch i and position j <= position i, or branch j == 0 and position j < cut i). Positions
        default to 0..T-1, segments and branches to one. Padding must be segment 0.
        """
        ids_BT = jnp.asarray(ids_BT)
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
        if (branch_ids_BT is None) != (cuts_BT is None):
            raise ValueError("branch_ids_BT and cuts_BT are given together or not at all")
        layout = attention.Layout(
            jnp.asarray(positions_BT),
            *(
                None if array is None else jnp.asarray(array)
                for array in (segment_ids_BT, branch_ids_BT, cuts_BT)
            ),
        )
        return self.module(params).hidden(ids_BT, layout)

    def unembed(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits [..., V] of hidden states [..., D]."""
        return self.module(params).unembed(hidden)

    def apply(
        self,
        params: Params,
        ids_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        branch_ids_BT: jax.Array | None = None,
        cuts_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns float32 logits [B, T, V] of a full, uncached forward pass; see ``hidden``."""
        hidden = self.hidden(params, ids_BT, positions_BT, segment_ids_BT, branch_ids_BT, cuts_BT)
        return self.unembed(params, hidden)

    def init_cache(self, rows: int, length: int) -> Cache:
        """Returns an empty cache for ``rows`` sequences of up to ``length`` tokens."""
        return init_cache(self.config, rows, length)

    def apply_cached(
        self,
        params: Params,
        cache: Cache,
        ids_RT: jax.Array,
        start_R: jax.Array,
        valid_R: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Returns (hidden [R, T, D], cache) for T tokens a row, appended at ``start_R``.

        Row r's token t stands at position ``start_r + t`` and sees cache slots up to its own. Its
        key and value are kept iff ``t < valid_r`` (a count: 0 leaves the row's cache as it was)
        and the position lies in the cache. Hidden states of tokens not kept mean nothing.
        """
        return self.module(params).hidden_cached(cache, ids_RT, start_R, valid_R)
