"""Per-token values and a mask in, one number out; the three averages kept apart by name.

For the per-token losses [[1, 1, 1, 1], [4]] and a maximum length of 4:
``token_mean`` gives 8/5 = 1.6, ``sequence_mean`` (1 + 4)/2 = 2.5, ``constant_length`` (Dr. GRPO)
8/(2*4) = 1.0. Each is numerator / denominator; both add up over micro-batches and hosts, so that a
denominator counted over all of them makes the sum of the parts the whole.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

How = Literal["token_mean", "sequence_mean", "constant_length"]


def aggregate(
    values_BT: Any,
    mask_BT: Any,
    how: str,
    *,
    segment_ids_BT: Any = None,
    max_tokens: int | None = None,
    denominator: Any = None,
) -> jax.Array:
    """float32 scalar: the mean of the values where the mask is not 0.

    ``sequence_mean`` averages each sequence first; a sequence is a row, or a segment of a row where
    segment ids (any integers) are given; sequences without a kept token are not counted.
    ``constant_length`` divides by ``max_tokens`` for each counted sequence. ``denominator``
    replaces the local one (see `count`). Nothing kept: 0, with gradient 0. Values under mask 0 may
    be NaN. Raises ValueError for an unknown ``how`` and a missing ``max_tokens``.
    """
    keep_BT = jnp.asarray(mask_BT) != 0
    values_BT = jnp.where(keep_BT, jnp.asarray(values_BT, jnp.float32), 0.0)
    if denominator is None:
        denominator = count(mask_BT, how, segment_ids_BT=segment_ids_BT, max_tokens=max_tokens)
    else:
        _check(how, max_tokens)
    if how == "sequence_mean":
        values_BT = values_BT / jnp.maximum(_lengths(keep_BT, segment_ids_BT)[0], 1.0)
    return values_BT.sum() / jnp.maximum(jnp.asarray(denominator, jnp.float32), 1.0)


def count(
    mask_BT: Any, how: str, *, segment_ids_BT: Any = None, max_tokens: int | None = None
) -> jax.Array:
    """float32 scalar, the denominator: tokens, sequences, or sequences times ``max_tokens``."""
    _check(how, max_tokens)
    keep_BT = jnp.asarray(mask_BT) != 0
    if how == "token_mean":
        return keep_BT.sum(dtype=jnp.float32)
    sequences = _lengths(keep_BT, segment_ids_BT)[1]
    return sequences * float(max_tokens or 1) if how == "constant_length" else sequences


def _check(how: str, max_tokens: int | None) -> None:
    if how not in get_args(How):
        raise ValueError(f"aggregation {how!r} is unknown; allowed: {', '.join(get_args(How))}")
    if how == "constant_length" and (max_tokens is None or max_tokens < 1):
        raise ValueError(f"constant_length needs max_tokens of at least 1, got {max_tokens}")


def _lengths(keep_BT: jax.Array, segment_ids_BT: Any) -> tuple[jax.Array, jax.Array]:
    """Kept tokens of each entry's own sequence, [B, T], and the number of sequences with any."""
    if segment_ids_BT is None:
        lengths_B1 = keep_BT.sum(axis=1, keepdims=True, dtype=jnp.float32)
        return jnp.broadcast_to(lengths_B1, keep_BT.shape), (lengths_B1 > 0).sum(dtype=jnp.float32)
    ids_BT = jnp.asarray(segment_ids_BT)
    rows, tokens = ids_BT.shape
    # Any integer ids become slots 0..T-1: the place of the first equal id in the sorted row.
    slot_BT = jax.vmap(jnp.searchsorted)(jnp.sort(ids_BT, axis=1), ids_BT)
    slot_BT = slot_BT + tokens * jnp.arange(rows)[:, None]
    lengths = jnp.zeros(rows * tokens, jnp.float32).at[slot_BT].add(keep_BT.astype(jnp.float32))
    return lengths[slot_BT], (lengths > 0).sum(dtype=jnp.float32)
