"""Attention of training on TPU: JAX's Pallas splash-attention kernel, over rows that hold trees.

In: queries, keys and values [B, heads, T, E] and the row's ``attention.Layout``. Out: what the XLA
path of ``attention`` gives, differentiable, without an array of T x T elements.

All that a query sees is two runs of its own row: its tree's trunk before its cut, and its own
branch up to itself. So one number a query says it all: ``before << bits | behind``; it sees keys
``[0, before)`` and ``[i - behind, i]`` of its own segment, i being its index in the row. The kernel
compares these with the key's index, and a table made from the data says which blocks of keys a
block of queries needs at all: other trees, other branches and padding cost nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo
from jax.sharding import Mesh, PartitionSpec

from agentspec.mesh import BATCH_AXES, LOGICAL_AXES
from agentspec.model.attention import Layout

BLOCK_TOKENS = 512  # queries and keys a block; fits the 16 MiB of a v5e core up to head size 256
LANES = 128
_BITS = 32  # of the number that says what a query sees


def splash_attend(
    q_BHTE: jax.Array,
    k_BKTE: jax.Array,
    v_BKTE: jax.Array,
    layout: Layout,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns [B, H, T, E] in q's dtype: every token's attention within its tree; q is unscaled.

    H is a multiple of K: key head h // (H / K) serves query head h. Padding (segment 0) gets
    finite numbers of no meaning. ``interpret`` runs the kernel's code on the CPU, slowly.

    Raises:
        ValueError: for heads that do not divide, or a row too long for its branches: T times the
            longest branch (the last dimension of ``branches_BNJ``; without it, T) is at most 2^32.
    """
    (_, H, T, E), K = q_BHTE.shape, k_BKTE.shape[1]
    if H % K:
        raise ValueError(f"{H} query heads are not a multiple of {K} key heads")
    block = min(BLOCK_TOKENS, -(-T // LANES) * LANES)
    padding = -T % block
    plan, settings = _plan(layout, block, padding, interpret)
    q_BHTE = q_BHTE * jnp.asarray(E**-0.5, q_BHTE.dtype)
    if padding:
        wider = ((0, 0), (0, 0), (0, padding), (0, 0))
        q_BHTE, k_BKTE, v_BKTE = (jnp.pad(x, wider) for x in (q_BHTE, k_BKTE, v_BKTE))
    return _attend(settings, q_BHTE, k_BKTE, v_BKTE, plan)[:, :, :T]


def splash_attend_sharded(
    q_BHTE: jax.Array,
    k_BKTE: jax.Array,
    v_BKTE: jax.Array,
    layout: Layout,
    mesh: Mesh,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Returns ``splash_attend``, each device taking its own rows and heads; for use under jit.

    Raises:
        ValueError: where the mesh does not divide the rows or the heads.
    """
    heads = LOGICAL_AXES["kv_heads"]
    ways = {"rows": math.prod(mesh.shape[axis] for axis in BATCH_AXES)}
    ways["query heads"] = ways["key heads"] = 1 if heads is None else mesh.shape[heads]
    sizes = {"rows": q_BHTE.shape[0], "query heads": q_BHTE.shape[1], "key heads": k_BKTE.shape[1]}
    for name, size in sizes.items():
        if size % ways[name]:
            raise ValueError(f"{size} {name} are not divisible by {ways[name]} devices of the mesh")
    rows = PartitionSpec(BATCH_AXES)
    rows_heads = PartitionSpec(BATCH_AXES, heads)
    return jax.shard_map(
        functools.partial(splash_attend, interpret=interpret),
        mesh=mesh,
        in_specs=(rows_heads, rows_heads, rows_heads, rows),
        out_specs=rows_heads,
        check_vma=False,  # the kernel does not say over which axes its results vary
    )(q_BHTE, k_BKTE, v_BKTE, layout)


class _Plan(NamedTuple):
    """What the kernel is told about each row; Q and S count blocks of queries and of keys.

    A block that is not needed is skipped, and the next one that is needed is loaded meanwhile.
    """

    seen_BT: jax.Array  # int32, read by the mask function
    segments_BT: jax.Array
    needed_BQS: jax.Array  # int32, 1: some query of the block sees some key of the block
    next_key_BQS: jax.Array  # int32, block of keys to load; keys run fastest
    next_query_BQS: jax.Array  # int32, block of queries to load; queries run fastest


@dataclasses.dataclass(frozen=True)
class _Settings:
    block: int
    bits: int | None  # of ``behind``; None: no branches, a query sees all of its segment before it
    interpret: bool


def _plan(layout: Layout, block: int, padding: int, interpret: bool) -> tuple[_Plan, _Settings]:
    B, T = layout.positions_BT.shape
    index = jnp.broadcast_to(jnp.arange(T + padding), (B, T + padding))

    def row(values: jax.Array | None, default: int) -> jax.Array:
        values = jnp.full((B, T), default) if values is None else values
        return jnp.pad(values.astype(jnp.int32), ((0, 0), (0, padding)))

    segments, branches = row(layout.segment_ids_BT, 1), row(layout.branch_ids_BT, 0)
    tree_starts = _changes(segments)
    tree_start = lax.cummax(jnp.where(tree_starts, index, 0), axis=1)
    own_start = lax.cummax(jnp.where(tree_starts | _changes(branches), index, 0), axis=1)
    own_start = jnp.where(segments == 0, index, own_start)
    if layout.branch_ids_BT is None:
        bits, before, seen = None, tree_start, index
    else:
        longest = T if layout.branches_BNJ is None else layout.branches_BNJ.shape[2]
        bits = (longest - 1).bit_length()
        if bits + (T - 1).bit_length() > _BITS:
            raise ValueError(
                f"rows of {T} tokens with branches of up to {longest}: splash attention takes "
                f"T x branch up to 2^{_BITS}; use shorter rows, or give Layout.branches_BNJ"
            )
        trunk = branches == 0
        before = lax.cummax(jnp.where(trunk, index + 1, 0), axis=1)  # the trunk's end
        if layout.cuts_BT is not None:
            before = jnp.minimum(before, tree_start + row(layout.cuts_BT, 0))
        before = jnp.where(trunk, index, before)
        before = jnp.where(segments == 0, tree_start, before)
        seen = before << bits | jnp.where(trunk, 0, index - own_start)

    blocks = jnp.arange((T + padding) // block)

    def touched(start: jax.Array, stop: jax.Array) -> jax.Array:
        first, end = (start // block)[:, :, None], (-(-stop // block))[:, :, None]
        touched_BTS = (first <= blocks) & (blocks < end)
        return touched_BTS.reshape(B, len(blocks), block, len(blocks)).any(axis=2)

    needed = touched(own_start, index + 1) | touched(tree_start, before)
    next_query = _next(needed.swapaxes(1, 2)).swapaxes(1, 2)
    plan = _Plan(seen, segments, needed.astype(jnp.int32), _next(needed), next_query)
    return plan, _Settings(block, bits, interpret)


def _changes(ids_BT: jax.Array) -> jax.Array:
    return jnp.pad(ids_BT[:, 1:] != ids_BT[:, :-1], ((0, 0), (1, 0)))


def _next(needed_BXY: jax.Array) -> jax.Array:
    """Returns the y of the first needed block from each (x, y) on, y running fastest."""
    B, X, Y = needed_BXY.shape
    order = jnp.where(needed_BXY, jnp.arange(X * Y).reshape(X, Y), X * Y - 1).reshape(B, X * Y)
    return (lax.cummin(order, axis=1, reverse=True) % Y).reshape(B, X, Y)


# From here on: JAX's kernel. Its public entry takes only masks known before tracing, so its private
# functions are called. Two things of them are relied on: their arguments, and that the blocks of
# queries are axis 1 of the grid of the forward and dq kernels and axis 2 of the dkv kernel's. Both
# hold for the versions of JAX that setup.py allows; test_splash.py fails where they do not.
kernel: Any = splash_attention_kernel
_PRIVATE = ("_splash_attention_forward", "_splash_attention_bwd_dq", "_splash_attention_bwd_dkv")
if _missing := [name for name in _PRIVATE if not hasattr(kernel, name)]:
    raise ImportError(
        f"splash attention of jax {jax.__version__} has no {', '.join(_missing)}: "
        "install jax>=0.10.2,<0.12, or set the model's attention to 'xla'"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    settings: _Settings, q_BHTE: jax.Array, k_BKTE: jax.Array, v_BKTE: jax.Array, plan: _Plan
) -> jax.Array:
    return _attend_forward(settings, q_BHTE, k_BKTE, v_BKTE, plan)[0]


def _attend_forward(
    settings: _Settings, q_BHTE: jax.Array, k_BKTE: jax.Array, v_BKTE: jax.Array, plan: _Plan
) -> tuple[jax.Array, tuple[Any, ...]]:
    def one(row: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, plan = row
        out, (log_sum,) = kernel._splash_attention_forward(
            _table(plan, plan.next_key_BQS),
            q,
            k,
            v,
            kernel.SegmentIds(plan.segments_BT, plan.segments_BT),
            None,
            block_sizes=kernel.BlockSizes(settings.block, settings.block),
            residual_checkpoint_name=None,
            save_residuals=True,
            **_common(settings, q_axis=0, q_program=1),
        )
        return out, log_sum

    out_BHTE, log_sum_BHT = _each_row(one, (q_BHTE, k_BKTE, v_BKTE, plan))
    return out_BHTE, (q_BHTE, k_BKTE, v_BKTE, plan, out_BHTE, log_sum_BHT)


def _attend_backward(
    settings: _Settings, saved: tuple[Any, ...], out_slope: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    layouts = {f"{x}_layout": kernel.QKVLayout.HEAD_DIM_MINOR for x in "qkv"}
    sizes = {"bq": settings.block, "bkv": settings.block}

    def one(row: tuple[Any, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v, plan, out, log_sum, slope = row
        along = (out.astype(jnp.float32) * slope.astype(jnp.float32)).sum(axis=-1)
        segments = kernel.SegmentIds(plan.segments_BT, plan.segments_BT)
        shared = (q, k, v, segments, None, log_sum, slope, along)
        q_slope = kernel._splash_attention_bwd_dq(
            *shared,
            mask_info=_table(plan, plan.next_key_BQS),
            **sizes,
            **layouts,
            **_common(settings, q_axis=0, q_program=1),
        )
        _, k_slope, v_slope = kernel._splash_attention_bwd_dkv(
            *shared,
            mask_info=_table(plan, plan.next_query_BQS),
            bkv_compute=settings.block,
            use_fused_bwd_kernel=False,
            **sizes,
            **layouts,
            **_common(settings, q_axis=1, q_program=2),
        )
        return q_slope, k_slope, v_slope

    return *_each_row(one, (*saved, out_slope)), None


_attend.defvjp(_attend_forward, _attend_backward)


def _each_row(one: Callable[[Any], Any], rows: Any) -> Any:
    """Returns ``one`` of every row, stacked: a kernel call has the block table of one row."""
    if jax.tree.leaves(rows)[0].shape[0] > 1:
        return lax.map(one, rows)
    out = one(jax.tree.map(lambda array: array[0], rows))
    return jax.tree.map(lambda array: array[None], out)


def _table(plan: _Plan, next_QS: jax.Array) -> MaskInfo:
    fields: dict[str, Any] = {
        "data_next": next_QS[None],  # the same for all heads
        "block_mask": plan.needed_BQS[None],
        "q_sequence": plan.seen_BT,
    }
    return MaskInfo(mask_next=None, partial_mask_blocks=None, **fields)


def _common(settings: _Settings, q_axis: int, q_program: int) -> dict[str, Any]:
    """Returns the arguments of all three kernels.

    ``q_axis``: the axis of queries in a block of scores; ``q_program``: in the kernel's grid.
    """
    bits = settings.bits

    def sees(seen: jax.Array, k_index: jax.Array) -> jax.Array:
        if bits is None:
            return k_index <= seen
        first = pl.program_id(q_program) * settings.block
        q_index = first + lax.broadcasted_iota(jnp.int32, seen.shape, q_axis)
        before = lax.shift_right_logical(seen, bits)
        own_start = q_index - (seen & (2**bits - 1))
        return (k_index < before) | ((own_start <= k_index) & (k_index <= q_index))

    return {
        "is_mqa": False,
        "mask_value": kernel.DEFAULT_MASK_VALUE,
        "attn_logits_soft_cap": None,
        "mask_function": sees,
        # The interpreter that knows grid positions inside a condition.
        "interpret": pltpu.InterpretParams() if settings.interpret else False,
    }
