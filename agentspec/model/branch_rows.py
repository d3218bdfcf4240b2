"""Branches of tree rows as rows of their own, for layers that carry a state from token to token.

In: arrays [B, T, ...] of packed rows and their layout. Out: the branches' entries as [B*N, J, ...],
N branches of up to J tokens a row, and back. Attention needs none of this: it has masks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from agentspec.model.attention import Layout


class Branches(NamedTuple):
    """Where each branch lies, as indices into its row; and which tokens lie in no branch."""

    trunk_BT: jax.Array  # bool
    index_BNJ: jax.Array  # its tokens, -1 where there are none
    starts_BN: jax.Array  # the first token of its tree's trunk
    cuts_BN: jax.Array  # one past the last trunk token that it sees


def find_branches(layout: Layout) -> Branches | None:
    """Returns where the branches lie, None for a batch without any.

    Raises:
        ValueError: for branch ids without the tokens' indices or the cuts.
    """
    if layout.branch_ids_BT is None:
        return None
    index_BNJ, cuts_BT, segments_BT = layout.branches_BNJ, layout.cuts_BT, layout.segment_ids_BT
    if index_BNJ is None or cuts_BT is None:
        raise ValueError(
            "linear attention got branch_ids_BT without branches_BNJ (the row indices of each "
            "branch's tokens, [B, N, J], -1 where there are none) or without cuts_BT; give all "
            "three or none"
        )
    if not index_BNJ.size:
        return None
    starts_BT = jnp.zeros_like(cuts_BT)
    if segments_BT is not None:
        changes = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
        starts_BT = jax.lax.cummax(jnp.where(changes, jnp.arange(changes.shape[1]), 0), axis=1)
    there, first_BN = index_BNJ[..., 0] >= 0, jnp.maximum(index_BNJ[..., 0], 0)
    starts_BN = jnp.take_along_axis(starts_BT, first_BN, axis=1)
    cuts_BN = starts_BN + jnp.take_along_axis(cuts_BT, first_BN, axis=1)
    starts_BN, cuts_BN = jnp.where(there, starts_BN, 0), jnp.where(there, cuts_BN, 0)
    return Branches(layout.branch_ids_BT == 0, index_BNJ, starts_BN, cuts_BN)


def before_cuts(branches: Branches, count: int) -> jax.Array:
    """Returns row indices [B, N, count] of the last trunk tokens before each cut, else -1."""
    index_BNJ = branches.cuts_BN[..., None] + jnp.arange(-count, 0)
    return jnp.where(index_BNJ >= branches.starts_BN[..., None], index_BNJ, -1)


def take(x_BT: jax.Array, index_BNJ: jax.Array) -> jax.Array:
    """Returns [B*N, J, ...]: the rows' entries at ``index_BNJ``, zeros where it is -1."""
    taken = jax.vmap(lambda x_T, index_NJ: x_T[jnp.maximum(index_NJ, 0)])(x_BT, index_BNJ)
    there = (index_BNJ >= 0).reshape(*index_BNJ.shape, *(1,) * (x_BT.ndim - 2))
    return join(jnp.where(there, taken, 0))


def put(x_BT: jax.Array, index_BNJ: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the rows with the branches' entries ``new`` [B*N, J, ...] at ``index_BNJ``."""
    B, T = x_BT.shape[:2]
    where = jnp.where(index_BNJ >= 0, index_BNJ, T).reshape(B, -1)  # T is out of range: dropped
    write = jax.vmap(lambda x_T, index, new: x_T.at[index].set(new, mode="drop"))
    return write(x_BT, where, new.reshape(B, -1, *new.shape[2:]))


def join(x_BN: jax.Array) -> jax.Array:
    """Returns [B*N, ...] of [B, N, ...]."""
    return x_BN.reshape(-1, *x_BN.shape[2:])
