"""How a parameter is declared: once, with its shape, logical axes and initialiser.

``config.param_dtype`` is what is stored (and what gradients and the optimizer see);
``config.dtype`` is what is computed with, reached by ``cast`` at the place of use.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from agentspec.model.config import ModelConfig

Weight: TypeAlias = nnx.Param[jax.Array]


def param(
    config: ModelConfig, rngs: nnx.Rngs, axes: tuple[str, ...], shape: tuple[int, ...], std: float
) -> Weight:
    """Returns a parameter drawn from a normal with deviation ``std``; ``std`` 0 gives ones."""
    dtype = jnp.dtype(config.stored_dtype)
    if std == 0:
        return nnx.Param(jnp.ones(shape, dtype), axes=axes)
    return nnx.Param((std * jax.random.normal(rngs.params(), shape)).astype(dtype), axes=axes)


def cast(weight: Weight, like: jax.Array) -> jax.Array:
    """Returns the weight in ``like``'s dtype (the compute dtype): no copy where they agree."""
    return weight[...].astype(like.dtype)
