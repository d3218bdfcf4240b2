"""The parts of a decoder layer: RMS norm, rotary positions, attention, gated MLP.

Weights keep Hugging Face's [out, in] order (on CPU as fast as or faster than [in, out]), with heads
as their own dimension, so that the mesh can cut between heads only. Each parameter is made by
``param`` once, with shape and logical axes (see ``mesh.LOGICAL_AXES``). Norms and softmax are
computed in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from agentspec.model import attention
from agentspec.model.cache import LayerCache, write
from agentspec.model.config import ModelConfig

Rotary = tuple[jax.Array, jax.Array]


def param(
    config: ModelConfig, rngs: nnx.Rngs, axes: tuple[str, ...], shape: tuple[int, ...], std: float
) -> nnx.Param[jax.Array]:
    """Returns a parameter drawn from a normal with deviation ``std``; ``std`` 0 gives ones."""
    dtype = jnp.dtype(config.dtype)
    if std == 0:
        return nnx.Param(jnp.ones(shape, dtype), axes=axes)
    return nnx.Param((std * jax.random.normal(rngs.params(), shape)).astype(dtype), axes=axes)


class RMSNorm(nnx.Module):
    """x / rms(x) * w over the last dimension, in float32."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, size: int) -> None:
        """Makes a norm over a last dimension of ``size``."""
        self.weight = param(config, rngs, ("scale",), (size,), 0)
        self.eps = config.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of x's shape and dtype."""
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * self.weight[...]


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Returns [E/2] float64 radians per position, ``theta ** (-2i/E)``, with Llama 3's scaling.

    Llama 3 scaling: wavelengths below original/high_freq_factor stay, above
    original/low_freq_factor are stretched by ``factor``, and are blended in between.
    """
    E = config.head_dim
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
    """Returns x with halves (i, i + E/2) of each head turned by the position's angles."""
    cos, sin = rope
    a, b = jnp.split(x_BHTE.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BHTE.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and, in Qwen3, norms on q and k heads."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Makes projections of q [H, E, D], k and v [K, E, D], out [D, H, E]."""
        D, H, K, E = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        std, out_std = D**-0.5, (H * E * 2 * config.n_layers) ** -0.5
        self.q = param(config, rngs, ("heads", "head_size", "width"), (H, E, D), std)
        self.k = param(config, rngs, ("kv_heads", "head_size", "width"), (K, E, D), std)
        self.v = param(config, rngs, ("kv_heads", "head_size", "width"), (K, E, D), std)
        self.o = param(config, rngs, ("width", "heads", "head_size"), (D, H, E), out_std)
        if config.qk_norm:
            self.q_norm = RMSNorm(config, rngs, E)
            self.k_norm = RMSNorm(config, rngs, E)
        self.qk_norm = config.qk_norm

    def project(self, x_BTD: jax.Array, rope: Rotary) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [B, H, T, E], keys and values [B, K, T, E], turned by position."""
        q, k, v = (_heads(x_BTD, weight[...]) for weight in (self.q, self.k, self.v))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rope), rotate(k, rope), v

    def output(self, x_BHTE: jax.Array) -> jax.Array:
        """Returns [B, T, D]: the heads' results joined and projected."""
        B, H, T, E = x_BHTE.shape
        return x_BHTE.swapaxes(1, 2).reshape(B, T, H * E) @ self.o[...].reshape(-1, H * E).T

    def __call__(self, x_BTD: jax.Array, rope: Rotary, seen_tiles: list[jax.Array]) -> jax.Array:
        """Returns [B, T, D] of a full forward pass."""
        q, k, v = self.project(x_BTD, rope)
        return self.output(attention.attend_full(q, k, v, seen_tiles))

    def cached(
        self,
        x_RTD: jax.Array,
        rope: Rotary,
        cache: LayerCache,
        slots_RT: jax.Array,
        seen_RTS: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        """Returns [R, T, D] and the cache with this step's keys and values written at slots."""
        q, k, v = self.project(x_RTD, rope)
        cache = write(cache, k, v, slots_RT)
        return self.output(attention.attend(q, cache.k_RKSE, cache.v_RKSE, seen_RTS)), cache


def _heads(x_BTD: jax.Array, weight_HED: jax.Array) -> jax.Array:
    """Returns [B, H, T, E]: one flat product, then heads first."""
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
        hidden_BTF = silu(x_BTD @ self.gate[...].T) * (x_BTD @ self.up[...].T)
        return hidden_BTF @ self.down[...].T


class Layer(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Makes attention and MLP, each with its norm before it."""
        self.attention_norm = RMSNorm(config, rngs, config.d_model)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config, rngs, config.d_model)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BTD: jax.Array, rope: Rotary, seen_tiles: list[jax.Array]) -> jax.Array:
        """Returns [B, T, D] of a full forward pass."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope, seen_tiles)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))

    def cached(
        self,
        x_RTD: jax.Array,
        rope: Rotary,
        cache: LayerCache,
        slots_RT: jax.Array,
        seen_RTS: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        """Returns [R, T, D] and this layer's cache with the new tokens in it."""
        mixed, cache = self.attention.cached(
            self.attention_norm(x_RTD), rope, cache, slots_RT, seen_RTS
        )
        x_RTD = x_RTD + mixed
        return x_RTD + self.mlp(self.mlp_norm(x_RTD)), cache
