"""Qwen3.5's linear attention layer, Gated DeltaNet: training on packed tree rows, and decoding.

In: hidden states [B, T, D] and the layout of their rows (training), or [R, T, D] and a cache
(decoding). Out: [B, T, D]. Queries, keys and values pass a short causal convolution each and then
the gated delta rule (``delta_rule``); the result is normed and gated. Source: Yang et al. 2024,
"Gated Delta Networks", section 3.4; parameters as in Hugging Face's Qwen3.5.

A branch of a tree row starts from the trunk's state at its cut, and its convolution from the trunk
tokens before the cut: the trunk is computed once, however many branches it has.

Dimension letters: G key heads of size X, H value heads of size Y (written Hv in the configuration's
comments), W kernel; N branches of J tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from agentspec.model.attention import Layout
from agentspec.model.branch_rows import Branches, before_cuts, find_branches, join, put, take
from agentspec.model.config import ModelConfig
from agentspec.model.delta_rule import Tokens, Trace, chunked, states_at, step
from agentspec.model.parameters import cast, param

_NORM_EPS = 1e-6  # of queries and keys; fixed in Hugging Face's code too

# In rows beyond LONG_TOKENS the rule's float32 arrays, of which there are some thirty as large as
# the values, exist for KEY_HEADS key heads (and their value heads) at a time, also backward.
LONG_TOKENS = 4096
KEY_HEADS = 4


class DeltaCache(NamedTuple):
    """One layer's memory of a row: the convolution's last inputs (q, k, v joined), the state."""

    conv_RWC: jax.Array  # [R, W-1, 2GX + HY], compute dtype
    state_RHXY: jax.Array  # float32


Streams = tuple[jax.Array, jax.Array, jax.Array]  # q, k [B, T, G, X] and v [B, T, H, Y]


class _Heads(NamedTuple):
    """What the mixing of tokens takes of some heads."""

    streams: Streams  # the convolution's inputs, compute dtype
    kernels: Streams  # [G, X, W], [G, X, W], [H, Y, W]
    gates: tuple[jax.Array, jax.Array]  # decay, beta: [B, T, H] float32
    z_BTHY: jax.Array


def init_delta_cache(config: ModelConfig, rows: int) -> DeltaCache:
    """Returns zeros for ``rows`` sequences; the size does not depend on their length."""
    G, H, X, Y, W = _sizes(config)
    conv = (rows, W - 1, 2 * G * X + H * Y)
    return DeltaCache(
        jnp.zeros(conv, jnp.dtype(config.dtype)), jnp.zeros((rows, H, X, Y), jnp.float32)
    )


class GatedNorm(nnx.Module):
    """x / rms(x) * w * silu(gate). The weight is plain, also where the other norms' are offsets."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Makes the weight [Y], shared by the heads."""
        self.weight = param(config, rngs, ("scale",), (_sizes(config)[3],), 0)
        self.eps = config.norm_eps

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Returns an array of the shape of x [..., Y], in the gate's dtype; computed in float32."""
        x, wide_gate = x.astype(jnp.float32), gate.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        x = x * self.weight[...].astype(jnp.float32) * jax.nn.silu(wide_gate)
        return x.astype(gate.dtype)


class DeltaNet(nnx.Module):
    """Gated DeltaNet: projections, causal convolution, gated delta rule, gated norm, projection."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Makes q, k [G, X, D], v, z [H, Y, D], b, a [H, D], the kernels, and out [D, H, Y]."""
        D, (G, H, X, Y, W) = config.d_model, _sizes(config)
        keys, values = ("delta_key_heads", "head_size"), ("delta_value_heads", "head_size")
        self.q = param(config, rngs, (*keys, "width"), (G, X, D), D**-0.5)
        self.k = param(config, rngs, (*keys, "width"), (G, X, D), D**-0.5)
        self.v = param(config, rngs, (*values, "width"), (H, Y, D), D**-0.5)
        self.z = param(config, rngs, (*values, "width"), (H, Y, D), D**-0.5)
        self.b = param(config, rngs, (values[0], "width"), (H, D), D**-0.5)
        self.a = param(config, rngs, (values[0], "width"), (H, D), D**-0.5)
        self.conv_q = param(config, rngs, (*keys, "kernel"), (G, X, W), W**-0.5)
        self.conv_k = param(config, rngs, (*keys, "kernel"), (G, X, W), W**-0.5)
        self.conv_v = param(config, rngs, (*values, "kernel"), (H, Y, W), W**-0.5)
        self.dt_bias = param(config, rngs, (values[0],), (H,), 0)
        rate = jax.random.uniform(rngs.params(), (H,), minval=0.01, maxval=16.0)
        self.A_log = nnx.Param(
            jnp.log(rate).astype(jnp.dtype(config.stored_dtype)), axes=(values[0],)
        )
        self.norm = GatedNorm(config, rngs)
        out_std = (H * Y * 2 * config.n_layers) ** -0.5
        self.out = param(config, rngs, ("width", *values), (D, H, Y), out_std)
        self.chunk = config.chunk
        # Of the rule's float32 products on accelerators. Three passes (16 bits) are finer than
        # bfloat16 inputs, and compile and run about twice as fast as float32's six.
        self.precision = "highest" if config.dtype == "float32" else "high"

    def __call__(self, x_BTD: jax.Array, layout: Layout) -> jax.Array:
        """Returns [B, T, D] of a full forward pass over packed rows.

        Raises:
            ValueError: for branches without ``layout.branches_BNJ``, which says where they lie.
        """
        T, G = x_BTD.shape[1], self.q.shape[0]
        heads = _Heads(
            self._streams(x_BTD),
            (self.conv_q[...], self.conv_k[...], self.conv_v[...]),
            self._gates(x_BTD),
            _heads(x_BTD, self.z),
        )
        branches = find_branches(layout)

        def some(heads: _Heads) -> jax.Array:
            return self._mixed(heads, layout, branches)

        if T <= LONG_TOKENS or G % KEY_HEADS or G == KEY_HEADS:
            return self._project(some(heads), x_BTD)
        out = jax.lax.map(jax.checkpoint(some), _cut_heads(heads, G // KEY_HEADS))
        return self._project(_joined_heads(out, KEY_HEADS), x_BTD)

    def _mixed(self, heads: _Heads, layout: Layout, branches: Branches | None) -> jax.Array:
        """Returns [B, T, H, Y] in the compute dtype: the rule's results, normed and gated."""
        segments, lead = layout.segment_ids_BT, heads.kernels[0].shape[-1] - 1
        own_BTW = None if segments is None else _own_inputs(segments, lead)
        padded = [jnp.pad(x, ((0, 0), (lead, 0), (0, 0), (0, 0))) for x in heads.streams]
        tokens = Tokens(*_convolve(padded, heads.kernels, own_BTW), *heads.gates)
        if branches is not None:
            tokens = tokens.only(branches.trunk_BT)
        with jax.default_matmul_precision(self.precision):
            out_BTHY, _, trace = chunked(tokens, self.chunk, segments)
        if branches is not None:
            out_BTHY = put(out_BTHY, branches.index_BNJ, self._branches(heads, branches, trace))
        return self.norm(out_BTHY, heads.z_BTHY)

    def _branches(self, heads: _Heads, branches: Branches, trace: Trace) -> jax.Array:
        """Returns [B*N, J, H, Y]: the rule's results for the branches, each on from its cut."""
        lead_BNW = before_cuts(branches, heads.kernels[0].shape[-1] - 1)
        index_BNJ = jnp.concatenate([lead_BNW, branches.index_BNJ], axis=-1)
        convolved = _convolve([take(x, index_BNJ) for x in heads.streams], heads.kernels)
        tokens = Tokens(*convolved, *(take(x, branches.index_BNJ) for x in heads.gates))
        with jax.default_matmul_precision(self.precision):
            states = states_at(trace, branches.starts_BN, branches.cuts_BN)
            return chunked(tokens, self.chunk, state_BHXY=join(states))[0]

    def cached(
        self, x_RTD: jax.Array, cache: DeltaCache, start_R: jax.Array, valid_R: jax.Array
    ) -> tuple[jax.Array, DeltaCache]:
        """Returns ([R, T, D], cache) for T tokens a row, of which the first ``valid_r`` count.

        ``valid_r`` 0 leaves the row's cache exactly as it was; ``start_r`` 0 begins the row anew,
        whatever the cache holds. Results of tokens that do not count mean nothing.
        """
        T = x_RTD.shape[1]
        new_R = (start_R == 0)[:, None, None]
        conv_RWC = jnp.where(new_R, 0, cache.conv_RWC)
        state = jnp.where(new_R[..., None], 0, cache.state_RHXY)
        streams = self._streams(x_RTD)
        joined = jnp.concatenate([conv_RWC, _flat(streams)], axis=1)
        kernels = (self.conv_q[...], self.conv_k[...], self.conv_v[...])
        tokens = Tokens(*_convolve(self._split(joined), kernels), *self._gates(x_RTD))
        tokens = tokens.only(jnp.arange(T) < valid_R[:, None])
        if T == 1:
            out_RTHY, state = step(state, tokens)
        else:
            with jax.default_matmul_precision(self.precision):
                out_RTHY, state, _ = chunked(tokens, self.chunk, state_BHXY=state)
        last = valid_R[:, None] + jnp.arange(conv_RWC.shape[1])
        conv_RWC = jnp.take_along_axis(joined, last[..., None], axis=1)
        any_R = (valid_R > 0)[:, None, None]
        cache = DeltaCache(
            jnp.where(any_R, conv_RWC, cache.conv_RWC),
            jnp.where(any_R[..., None], state, cache.state_RHXY),
        )
        return self._project(self.norm(out_RTHY, _heads(x_RTD, self.z)), x_RTD), cache

    def _streams(self, x_BTD: jax.Array) -> Streams:
        """Returns the convolution's inputs, in x's dtype."""
        return _heads(x_BTD, self.q), _heads(x_BTD, self.k), _heads(x_BTD, self.v)

    def _gates(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (decay, beta), both [B, T, H] float32: -exp(A_log) softplus(a + dt_bias), and
        sigmoid(b).
        """
        a = (x_BTD @ cast(self.a, x_BTD).T).astype(jnp.float32)
        b = (x_BTD @ cast(self.b, x_BTD).T).astype(jnp.float32)
        rate = jnp.exp(self.A_log[...].astype(jnp.float32))
        return -rate * jax.nn.softplus(a + self.dt_bias[...]), jax.nn.sigmoid(b)

    def _project(self, gated_BTHY: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Returns [B, T, D]: the heads joined and projected."""
        weight_DF = cast(self.out, x_BTD).reshape(x_BTD.shape[-1], -1)
        return gated_BTHY.reshape(*x_BTD.shape[:2], -1) @ weight_DF.T

    def _split(self, joined_BTC: jax.Array) -> list[jax.Array]:
        """Returns the streams of the cache's joined channels."""
        shapes = [weight.shape[:2] for weight in (self.q, self.k, self.v)]
        ends = [heads * size for heads, size in shapes]
        parts = jnp.split(joined_BTC, [ends[0], ends[0] + ends[1]], axis=-1)
        return [
            part.reshape(*part.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)
        ]


def _sizes(config: ModelConfig) -> tuple[int, int, int, int, int]:
    """Returns (G, H, X, Y, W)."""
    sizes = config.linear
    if sizes is None:
        raise ValueError("a Gated DeltaNet layer needs its sizes in model.linear, got None")
    return sizes.key_heads, sizes.value_heads, sizes.key_dim, sizes.value_dim, sizes.conv_kernel


def _heads(x_BTD: jax.Array, weight: nnx.Param[jax.Array]) -> jax.Array:
    """Returns [B, T, H, E] for a weight [H, E, D]."""
    H, E, D = weight.shape
    return (x_BTD @ cast(weight, x_BTD).reshape(H * E, D).T).reshape(*x_BTD.shape[:2], H, E)


def _cut_heads(heads: _Heads, n: int) -> _Heads:
    """Returns n parts, stacked, of equally many key heads each, with the value heads of these.

    Part i has key heads i, n + i, 2n + i, ...: so each part lies on all devices that the mesh cuts
    the heads over.
    """
    G = heads.kernels[0].shape[0]

    def cut(array: jax.Array, axis: int) -> jax.Array:
        before, after = array.shape[:axis], array.shape[axis + 1 :]
        array = jnp.moveaxis(array.reshape(*before, G // n, n, -1, *after), axis + 1, 0)
        return array.reshape(n, *before, -1, *after)

    kernels = jax.tree.map(lambda x: cut(x, 0), heads.kernels)
    streams, gates, z = jax.tree.map(
        lambda x: cut(x, 2), (heads.streams, heads.gates, heads.z_BTHY)
    )
    return _Heads(streams, kernels, gates, z)


def _joined_heads(parts: jax.Array, key_heads: int) -> jax.Array:
    """Returns [B, T, H, Y] of the parts' results, [n, B, T, H/n, Y], heads in the model's order."""
    n, B, T, some, Y = parts.shape
    parts = parts.reshape(n, B, T, key_heads, some // key_heads, Y)
    return parts.transpose(1, 2, 3, 0, 4, 5).reshape(B, T, n * some, Y)


def _flat(streams: Streams) -> jax.Array:
    """Returns [B, T, C]: the streams' heads one after the other."""
    return jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in streams], axis=-1)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _NORM_EPS)


def _convolve(
    streams: Sequence[jax.Array], kernels: Streams, own_BTW: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns float32 q, k [B, T, H, X] (of length 1/sqrt(X) and 1) and v [B, T, H, Y].

    Each stream starts with the W-1 inputs before its first token.
    """
    q, k, v = (_causal_conv(x, kernel, own_BTW) for x, kernel in zip(streams, kernels, strict=True))
    X, repeats = q.shape[-1], v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(_unit(x), repeats, axis=2) for x in (q, k))
    return q * X**-0.5, k, v


def _causal_conv(x_BSHE: jax.Array, kernel_HEW: jax.Array, own_BTW: jax.Array | None) -> jax.Array:
    """Returns float32 [B, T, H, E], S = W-1+T: each channel's weighted sum of W inputs, then silu.

    ``own_BTW``: False for inputs that a token must not see.
    """
    W = kernel_HEW.shape[-1]
    T = x_BSHE.shape[1] - W + 1
    total = jnp.zeros((), jnp.float32)
    for w in range(W):
        part = x_BSHE[:, w : w + T].astype(jnp.float32) * kernel_HEW[..., w].astype(jnp.float32)
        total += part if own_BTW is None else jnp.where(own_BTW[:, :, w, None, None], part, 0)
    return jax.nn.silu(total)


def _own_inputs(segment_ids_BT: jax.Array, lead: int) -> jax.Array:
    """Returns bool [B, T, W]: input w of token t (row index t - lead + w) is of its segment."""
    T = segment_ids_BT.shape[1]
    padded = jnp.pad(segment_ids_BT, ((0, 0), (lead, 0)), constant_values=-1)
    shifted = [padded[:, w : w + T] == segment_ids_BT for w in range(lead + 1)]
    return jnp.stack(shifted, axis=-1)
