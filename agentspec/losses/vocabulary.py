"""Log-probs with the head taken over a part of the vocabulary at a time.

In: final hidden states, the head's parts, targets. Out: what `sft.token_logps` gives, without ever
holding [B, T, V]. Not over some tokens at a time: a mesh would exchange the whole head, and its
whole gradient, once for every chunk of tokens; here each part of it once. Pure JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_NOT_THERE = -1e30  # the logit of an entry behind the last


def n_parts(tokens: int, chunk_tokens: int) -> int:
    """How many parts have no more logits each than ``chunk_tokens`` of a row's ``tokens`` have."""
    return -(-tokens // chunk_tokens)


def cut_head(weight_VD: jax.Array, n: int, ways: int = 1) -> jax.Array:
    """[n, P, D]: part i has the entries i, n + i, 2n + i, ..., and zeros behind the last.

    So each part lies on all ``ways`` devices that a mesh cuts the vocabulary over.
    """
    V, D = weight_VD.shape
    P = -(-V // (n * ways)) * ways
    weight_VD = jnp.pad(weight_VD, ((0, P * n - V), (0, 0)))
    return weight_VD.reshape(P, n, D).swapaxes(0, 1)


def logps_by_vocabulary(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    parts_NPD: jax.Array,
    vocabulary: int,
    hidden_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    temperature: Any = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies (detached), float32 [B, T] in nats; see `sft.token_logps`.

    ``vocabulary`` is V, the entries that there are; ``product(hidden [B, T, D], part [P, D])``
    gives float32 logits [B, T, P] of a part of `cut_head`. The sums of the softmax run on from part
    to part, scaled by the largest logit so far; the backward pass computes each part's logits
    again.
    """
    n, P = parts_NPD.shape[:2]
    temperature = jnp.where(temperature == 0, 1.0, temperature)
    dtype = hidden_BTD.dtype
    # float32, so that the parts' gradients add up in float32
    wide_BTD = jnp.where((mask_BT != 0)[..., None], hidden_BTD, 0).astype(jnp.float32)

    def one(sums: Any, part: Any) -> tuple[Any, None]:
        most_BT, total_BT, mean_BT, hit_BT = sums
        part_PD, i = part
        ids_P = jnp.arange(P) * n + i
        logits = product(wide_BTD.astype(dtype), part_PD) / temperature
        logits = jnp.where(ids_P < vocabulary, logits, _NOT_THERE)
        top_BT = jnp.maximum(most_BT, jax.lax.stop_gradient(logits).max(-1))
        shares = jnp.exp(logits - top_BT[..., None])
        fade_BT = jnp.exp(most_BT - top_BT)
        fixed = jax.lax.stop_gradient(jnp.where(shares > 0, shares * logits, 0.0)).sum(-1)
        hit = jnp.where(ids_P == targets_BT[..., None], logits, 0.0).sum(-1)
        total_BT = total_BT * fade_BT + shares.sum(-1)
        return (top_BT, total_BT, mean_BT * fade_BT + fixed, hit_BT + hit), None

    zeros_BT = jnp.zeros(targets_BT.shape, jnp.float32)
    first = (jnp.full_like(zeros_BT, -jnp.inf), zeros_BT, zeros_BT, zeros_BT)
    sums, _ = jax.lax.scan(jax.checkpoint(one), first, (parts_NPD, jnp.arange(n)))
    most_BT, total_BT, mean_BT, hit_BT = sums
    logz_BT = most_BT + jnp.log(total_BT)
    return hit_BT - logz_BT, jax.lax.stop_gradient(logz_BT - mean_BT / total_BT)
