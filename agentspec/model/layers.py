"""The parts of a decoder layer: RMS norm, rotary positions, attention, gated MLP.

Weights keep Hugging Face's [out, in] order (on CPU as fast as or faster than [in, out]), with heads
as their own dimension, so that the mesh can cut between heads only. Norms and softmax are computed
in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from agentspec.model import attention
from agentspec.model.config import ModelConfig
from agentspec.model.parameters import Weight, cast, param

Rotary = tuple[jax.Array, jax.Array]


class Full(NamedTuple):
    """What every layer of one full forward pass shares."""

    rope: Rotary
    attend: attention.Attend
    layout: attention.Layout


class Step(NamedTuple):
    """What every layer of one cached step shares; ``start_R`` and ``valid_R`` as given.

    ``attend``: (q, k, v, a layer's cache) -> (result, cache with the new keys and values).
    """

    rope: Rotary
    attend: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    start_R: jax.Array
    valid_R: jax.Array


class RMSNorm(nnx.Module):
    """x / rms(x) * w over the last dimension, in float32.

    With ``offset`` (Qwen3.5) the factor is 1 + w, added in float32: w is stored as it is, since one
    plus a small w would round it away in bfloat16.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, size: int) -> None:
        """Makes a norm over a last dimension of ``size``."""
        self.offset, self.eps = config.gated, config.norm_eps
        self.weight = param(config, rngs, ("scale",), (size,), 0)
        if self.offset:
            self.weight[...] = jnp.zeros_like(self.weight[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of x's shape and dtype."""
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.offset:
            factor = 1.0 + self.weight[...].astype(jnp.float32)
            return (wide * scale * factor).astype(x.dtype)
        return (wide * scale).astype(x.dtype) * cast(self.weight, x)


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns [E/2] float64 radians per position, ``theta ** (-2i/E)``, with Llama 3's scaling.

    E is the part of the head that is turned: ``rotary_dim``, or all of it.

    Llama 3 scaling: wavelengths below original/high_freq_factor stay, above
    original/low_freq_factor are stretched by ``factor``, and are blended in between.
    """
    E = config.rotary_dim or config.head_dim
    frequencies = config.rope_theta ** (-np.arange(0, E, 2, dtype=np.float64) / E)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rotary(config: ModelConfig, positions_BT: jax.Array) -> Rotary:
    """Returns cosines and sines [B, 1, T, E/2] float32 for all layers of a forward pass."""
    frequencies = jnp.asarray(inverse_frequencies(config), jnp.float32)
    angles = positions_BT[:, None, :, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BHTE: jax.Array, rope: Rotary) -> jax.Array:
    """Returns x with halves (i, i + R/2) of each head's first R entries turned by the angles."""
    cos, sin = rope
    half = cos.shape[-1]
    turned = x_BHTE[..., : 2 * half].astype(jnp.float32)
    a, b = jnp.split(turned, 2, axis=-1)
    parts = [a * cos - b * sin, b * cos + a * sin]
    if x_BHTE.shape[-1] > 2 * half:
        parts.append(x_BHTE[..., 2 * half :].astype(jnp.float32))
    return jnp.concatenate(parts, axis=-1).astype(x_BHTE.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

    Qwen3 and Qwen3.5 normalise each query and key head. In Qwen3.5 a gate as wide as the heads'
    results is projected with the query ([H, 2E, D]: per head the query's rows, then the gate's).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Makes projections of q [H, E or 2E, D], k and v [K, E, D], out [D, H, E]."""
        D, H, K, E = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        std, out_std = D**-0.5, (H * E * 2 * config.n_layers) ** -0.5
        Q = 2 * E if config.gated else E
        self.q = param(config, rngs, ("heads", "head_size", "width"), (H, Q, D), std)
        self.k = param(config, rngs, ("kv_heads", "head_size", "width"), (K, E, D), std)
        self.v = param(config, rngs, ("kv_heads", "head_size", "width"), (K, E, D), std)
        self.o = param(config, rngs, ("width", "heads", "head_size"), (D, H, E), out_std)
        if config.qk_norm:
            self.q_norm = RMSNorm(config, rngs, E)
            self.k_norm = RMSNorm(config, rngs, E)
        self.qk_norm, self.gated = config.qk_norm, config.gated

    def project(
        self, x_BTD: jax.Array, rope: Rotary
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Returns queries [B, H, T, E], keys and values [B, K, T, E], turned by position; gate."""
        q, k, v = (_heads(x_BTD, weight) for weight in (self.q, self.k, self.v))
        gate = None
        if self.gated:
            q, gate = jnp.split(q, 2, axis=-1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rope), rotate(k, rope), v, gate

    def output(self, x_BHTE: jax.Array, gate_BHTE: jax.Array | None) -> jax.Array:
        """Returns [B, T, D]: the heads' results gated, joined and projected."""
        B, H, T, E = x_BHTE.shape
        if gate_BHTE is not None:
            x_BHTE = x_BHTE * jax.nn.sigmoid(gate_BHTE)
        weight_DHE = cast(self.o, x_BHTE)
        return x_BHTE.swapaxes(1, 2).reshape(B, T, H * E) @ weight_DHE.reshape(-1, H * E).T

    def __call__(self, x_BTD: jax.Array, full: Full) -> jax.Array:
        """Returns [B, T, D] of a full forward pass."""
        q, k, v, gate = self.project(x_BTD, full.rope)
        return self.output(full.attend(q, k, v), gate)

    def cached(self, x_RTD: jax.Array, step: Step, cache: Any) -> tuple[jax.Array, Any]:
        """Returns [R, T, D] and the cache with this step's keys and values in it."""
        q, k, v, gate = self.project(x_RTD, step.rope)
        mixed, cache = step.attend(q, k, v, cache)
        return self.output(mixed, gate), cache


def _heads(x_BTD: jax.Array, weight: Weight) -> jax.Array:
    """Returns [B, H, T, E]: one flat product, then heads first."""
    weight_HED = cast(weight, x_BTD)
    H, E, D = weight_HED.shape
    flat = x_BTD @ weight_HED.reshape(H * E, D).T
    return flat.reshape(*x_BTD.shape[:2], H, E).swapaxes(1, 2)


@jax.custom_jvp
def silu(x: jax.Array) -> jax.Array:
    """Returns x * sigmoid(x). On CPU XLA's own ``logistic`` rounds worse: 1.5 times the error in a
    deep model's logits. The derivative is given since this form's own is NaN far below zero.
    """
    return x / (1 + jnp.exp(-x))


@silu.defjvp
def _silu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    gate = 1 / (1 + jnp.exp(-x))
    y = silu(x)
    return y, dx * (gate + y * (1 - gate))


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Makes gate and up [F, D], down [D, F]."""
        D, F = config.d_model, config.d_ff
        self.gate = param(config, rngs, ("ffn", "width"), (F, D), D**-0.5)
        self.up = param(config, rngs, ("ffn", "width"), (F, D), D**-0.5)
        self.down = param(config, rngs, ("width", "ffn"), (D, F), (F * 2 * config.n_layers) ** -0.5)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns [B, T, D]."""
        gate, up, down = (cast(weight, x_BTD) for weight in (self.gate, self.up, self.down))
        return (silu(x_BTD @ gate.T) * (x_BTD @ up.T)) @ down.T
