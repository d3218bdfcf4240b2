"""Puts a model's parameters on their devices, one tensor of its files at a time.

In: a ``LanguageModel`` (shapes and logical axes), the Hugging Face tensors that its parameters are,
and readable ones in files. Out: the parameters. Of each tensor a host reads what its own devices
hold, cast as it is read; a parameter stacked over layers is made once, on the devices, and filled
layer by layer in place. So a host needs memory for its part of one tensor, whatever the model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentspec.mesh import param_shardings
from agentspec.model.hf_names import Piece, Tensor, leaf_names
from agentspec.model.safetensors_files import Readable
from agentspec.model.transformer import LanguageModel, Params


def place(
    model: LanguageModel, tensors: list[Tensor], stored: Mapping[str, Readable], mesh: Mesh | None
) -> Params:
    """Returns the parameters, each read, cast and put on its devices before the next is read."""
    likes = leaf_names(model.shapes)
    placed: dict[str, Any] = dict.fromkeys(likes)
    if mesh is not None:
        placed = leaf_names(param_shardings(model.logical_axes, model.shapes, mesh))
    leaves: dict[str, jax.Array] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            like, sharding = likes[piece.leaf], placed[piece.leaf]
            if piece.entry is None:
                leaf = _array(piece, stored[tensor.name], like.dtype, sharding)
            else:
                layer = _array(piece, stored[tensor.name], like.dtype, _of_a_layer(sharding))
                stack = leaves.get(piece.leaf)
                if stack is None:
                    stack = _zeros(like, sharding)
                leaf = _filler(sharding)(stack, layer, np.int32(piece.entry))
            leaves[piece.leaf] = jax.block_until_ready(leaf)  # else the host runs ahead, reading on
    return jax.tree.unflatten(jax.tree.structure(model.shapes), [leaves[name] for name in likes])


def _array(piece: Piece, stored: Readable, dtype: Any, sharding: Any) -> jax.Array:
    """Returns one layer of one leaf on its devices; equal shards are read once."""
    if sharding is None:
        whole = stored.read(piece.cut([slice(None)] * len(piece.shape)), dtype)
        return jnp.array(whole.reshape(piece.shape))

    made: dict[tuple[tuple[int, int], ...], jax.Array] = {}
    shards = []
    for device, index in sharding.addressable_devices_indices_map(piece.shape).items():
        cuts = zip(index, piece.shape, strict=True)
        bounds = tuple(cut.indices(size)[:2] for cut, size in cuts)
        part: Any = made.get(bounds)
        if part is None:
            part = stored.read(piece.cut([slice(*bound) for bound in bounds]), dtype)
            part = part.reshape([stop - start for start, stop in bounds])
        made[bounds] = jax.block_until_ready(jax.device_put(part, device))  # one on the host
        shards.append(made[bounds])
    return jax.make_array_from_single_device_arrays(piece.shape, sharding, shards)


def _of_a_layer(sharding: NamedSharding | None) -> NamedSharding | None:
    """Returns how one entry lies of a stack that lies so; stacks are not cut along the layers."""
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _zeros(like: jax.ShapeDtypeStruct, sharding: NamedSharding | None) -> jax.Array:
    return jax.jit(lambda: jnp.zeros(like.shape, like.dtype), out_shardings=sharding)()


@functools.cache
def _filler(sharding: NamedSharding | None) -> Any:
    """Returns a jitted function that puts a layer into a stack, in the stack's own memory."""

    def fill(stack: jax.Array, layer: jax.Array, entry: int) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, layer, entry, 0)

    return jax.jit(fill, donate_argnums=0, out_shardings=sharding)
