"""Device mesh and the one table from logical to mesh axes.

In: how many devices for ``data``, ``fsdp`` and ``tensor``. Out: a ``Mesh``, and ``NamedSharding``s
of parameters and batches. Parameters declare their logical axes once, where they are made
(``model.layers``); nothing else in the code names a mesh axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

LOGICAL_AXES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "delta_key_heads": "tensor",
    "delta_value_heads": "tensor",
    "ffn": "tensor",
    "width": "fsdp",
    "head_size": None,
    "kernel": None,
    "layers": None,  # stacked layers are read one after the other by every device
    "scale": None,  # norm weights: small, on every device
}
BATCH_AXES = ("data", "fsdp")  # rows of a batch are cut over both


class MeshError(ValueError):
    """A mesh that does not go with the devices or with what is to lie on it."""


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Returns a mesh of shape (data, fsdp, tensor).

    Raises:
        MeshError: where the three do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = (data, fsdp, tensor)
    if min(shape) < 1:
        raise MeshError(f"mesh data={data} x fsdp={fsdp} x tensor={tensor}: each is at least 1")
    if math.prod(shape) != len(devices):
        raise MeshError(
            f"mesh data={data} x fsdp={fsdp} x tensor={tensor} needs {math.prod(shape)} devices, "
            f"got {len(devices)}"
        )
    return Mesh(np.asarray(devices, dtype=object).reshape(shape), MESH_AXES)


def partition(axes: Sequence[str], shape: Sequence[int], mesh: Mesh, name: str) -> PartitionSpec:
    """Returns the spec of one array with logical ``axes`` and ``shape``; ``name`` is for errors.

    Raises:
        MeshError: for an unknown logical axis, a mesh axis used twice, or a mesh axis that does
            not divide its dimension.
    """
    if len(axes) != len(shape):
        raise MeshError(f"{name}: {len(axes)} logical axes {tuple(axes)} for shape {tuple(shape)}")
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis not in LOGICAL_AXES:
            raise MeshError(
                f"{name}: unknown logical axis {axis!r}, allowed: {', '.join(LOGICAL_AXES)}"
            )
        mesh_axis = LOGICAL_AXES[axis]
        if mesh_axis is not None:
            if mesh_axis in spec:
                raise MeshError(f"{name}: axes {tuple(axes)} use mesh axis {mesh_axis!r} twice")
            if size % mesh.shape[mesh_axis]:
                raise MeshError(
                    f"{name}: dimension {axis!r} of size {size} is not divisible by mesh axis "
                    f"{mesh_axis!r} of size {mesh.shape[mesh_axis]}"
                )
        spec.append(mesh_axis)
    return PartitionSpec(*spec)


def param_shardings(axes: Any, shapes: Any, mesh: Mesh) -> Any:
    """Returns the tree of ``NamedSharding`` for ``shapes``, a tree of arrays or of their structs.

    ``axes`` is a tree of the same form whose leaves are tuples of logical axes.
    """

    def one(path: Any, axes_leaf: tuple[str, ...], array: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return NamedSharding(mesh, partition(axes_leaf, array.shape, mesh, name))

    return jax.tree_util.tree_map_with_path(
        one, axes, shapes, is_leaf=lambda node: isinstance(node, tuple)
    )


def batch_sharding(mesh: Mesh, rows: int) -> NamedSharding:
    """Returns the sharding of a batch of ``rows`` rows, cut over ``data`` and ``fsdp``.

    Raises:
        MeshError: where the devices of those axes do not divide ``rows``.
    """
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if rows % ways:
        raise MeshError(f"{rows} rows a batch are not divisible by data x fsdp = {ways} devices")
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))
