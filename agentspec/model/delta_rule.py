"""The gated delta rule: a recurrence over tokens, and its parallel form over chunks of tokens.

Per head, a state S [X, Y] maps keys to values. A token forgets by ``exp(decay)``, then moves what S
holds under its key towards its value by the share beta, then reads S with its query:

    S <- exp(decay) S;    S <- S + k (beta (v - k^T S))^T;    out = q^T S

Source: Yang et al. 2024, "Gated Delta Networks" (alpha is exp(decay) here), the chunked form its
section 3.3. Pure functions in float32. Dimension letters: I chunks of C tokens; N branches; H value
heads (keys and queries are repeated to them). Decays are <= 0 and only sums of decays are
exponentiated, so nothing overflows, in the masked places either. Products run in JAX's ambient
matmul precision: set it above the accelerators' default, whose errors the inverse builds up.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tokens(NamedTuple):
    """What the rule takes of each token. Decay 0 with beta 0 leaves the state as it was."""

    q_BTHX: jax.Array
    k_BTHX: jax.Array
    v_BTHY: jax.Array
    decay_BTH: jax.Array  # log of the share of the state that is kept, <= 0
    beta_BTH: jax.Array  # 0 no change, 1 the value under this key is replaced

    def only(self, kept_BT: jax.Array) -> Tokens:
        """Returns the tokens, where False those that leave the state as it was."""
        keep = kept_BT[..., None]
        return self._replace(
            decay_BTH=jnp.where(keep, self.decay_BTH, 0), beta_BTH=jnp.where(keep, self.beta_BTH, 0)
        )


class Trace(NamedTuple):
    """What a chunked pass leaves behind from which any state within the row follows."""

    states_IBHXY: jax.Array  # at each chunk's start
    changes_IBHCY: jax.Array  # what each token adds to the state under its key
    k_IBHCX: jax.Array
    decay_IBHC: jax.Array


def step(state_BHXY: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Returns (out [B, 1, H, Y], state) of one token a row (T is 1)."""
    q, k, v, decay, beta = (array[:, 0] for array in tokens)
    state_BHXY = state_BHXY * jnp.exp(decay)[..., None, None]
    held_BHY = (state_BHXY * k[..., None]).sum(axis=-2)
    change_BHY = (v - held_BHY) * beta[..., None]
    state_BHXY = state_BHXY + k[..., None] * change_BHY[..., None, :]
    return (state_BHXY * q[..., None]).sum(axis=-2)[:, None], state_BHXY


def chunked(
    tokens: Tokens,
    chunk: int,
    segment_ids_BT: jax.Array | None = None,
    state_BHXY: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, Trace]:
    """Returns (out [B, T, H, Y], the state after the last token, the trace of the pass).

    Rows are cut in chunks of ``chunk`` tokens. Each segment (contiguous in its row; None means one)
    starts from zeros and sees nothing of the others. ``state_BHXY`` is the state before the first
    token, zeros where None; it belongs to the row's first segment.
    """
    B, T, H, X = tokens.k_BTHX.shape
    C = min(chunk, T)
    q, k, v, decay, beta = (_cut(array, C) for array in tokens)
    if segment_ids_BT is None:
        segment_ids_BT = jnp.ones((B, T), jnp.int32)
    segments_IBC = _cut(jnp.pad(segment_ids_BT, ((0, 0), (0, -T % C)), mode="edge"), C)
    last_IB = segments_IBC[..., -1]
    before_IB = jnp.concatenate([segments_IBC[:1, :, 0], last_IB[:-1]])
    reads_IBHC = (segments_IBC == before_IB[..., None])[:, :, None]  # the state carried in
    writes_IBHC = (segments_IBC == last_IB[..., None])[:, :, None]  # the state carried out
    same = segments_IBC[..., :, None] == segments_IBC[..., None, :]
    sees_IBHCC = (same & jnp.tri(C, dtype=bool))[:, :, None]

    since = _decay_between(decay)  # [..., i, j]: from just after token j up to token i
    from_start = since[..., :, 0] + decay[..., :1]
    fade = jnp.where(sees_IBHCC, jnp.exp(since), 0)
    k_beta = k * beta[..., None]
    inverse = _inverse(jnp.tril(jnp.matmul(k_beta, k.mT) * fade, -1))
    read_fade = jnp.where(reads_IBHC, jnp.exp(from_start), 0)[..., None]
    wanted = jnp.matmul(inverse, v * beta[..., None])  # the changes, were the carried state zero
    held = jnp.matmul(inverse, k_beta * read_fade)  # what of the carried state they take back
    writes = k * jnp.where(writes_IBHC, jnp.exp(since[..., -1, :]), 0)[..., None]
    lasts = read_fade[..., -1:, :]  # the last token reads the state that lasts through the chunk

    def one(state_BHXY, chunk_inputs):
        wanted, held, writes, lasts = chunk_inputs
        changes = wanted - jnp.matmul(held, state_BHXY)
        return state_BHXY * lasts + jnp.matmul(writes.mT, changes), (state_BHXY, changes)

    first = jnp.zeros((B, H, X, v.shape[-1])) if state_BHXY is None else state_BHXY
    last, (states, changes) = jax.lax.scan(one, first, (wanted, held, writes, lasts))
    out = jnp.matmul(q * read_fade, states) + jnp.matmul(jnp.matmul(q, k.mT) * fade, changes)
    out_BTHY = out.transpose(1, 0, 3, 2, 4).reshape(B, -1, H, v.shape[-1])[:, :T]
    return out_BTHY, last, Trace(states, changes, k, decay)


def states_at(trace: Trace, starts_BN: jax.Array, cuts_BN: jax.Array) -> jax.Array:
    """Returns [B, N, H, X, Y]: the states just before row index ``cuts_BN``.

    ``starts_BN`` is the row index at which the cut's segment starts. Costs one product a cut: what
    the tokens between the chunk's start and the cut change is in the trace.
    """
    I, C = trace.decay_IBHC.shape[0], trace.decay_IBHC.shape[-1]  # noqa: E741
    chunks_BN = jnp.minimum(cuts_BN // C, I - 1)
    pick = jax.vmap(lambda array_I, chunks_N: array_I[chunks_N], in_axes=(1, 0))
    states, changes, k, decay = (pick(array, chunks_BN) for array in trace)
    index_BNC = chunks_BN[..., None] * C + jnp.arange(C)
    between = (index_BNC >= starts_BN[..., None]) & (index_BNC < cuts_BN[..., None])
    seen_BNHC = between[:, :, None]
    to_cut = jax.lax.cumsum(jnp.where(seen_BNHC, decay, 0), axis=3, reverse=True)
    after = jnp.concatenate([to_cut[..., 1:], jnp.zeros_like(to_cut[..., :1])], axis=-1)
    carried = (chunks_BN * C > starts_BN)[..., None]  # else the chunk's state is another segment's
    lasts = jnp.where(carried, jnp.exp(to_cut[..., 0]), 0)[..., None, None]
    writes = k * jnp.where(seen_BNHC, jnp.exp(after), 0)[..., None]
    return states * lasts + jnp.matmul(writes.mT, changes)


def _cut(array: jax.Array, C: int) -> jax.Array:
    """Returns [I, B, H, C, ...] of [B, T, H, ...] (and [I, B, C] of [B, T]), zeros at the end."""
    T = array.shape[1]
    array = jnp.pad(array, [(0, 0), (0, -T % C)] + [(0, 0)] * (array.ndim - 2))
    array = array.reshape(array.shape[0], -1, C, *array.shape[2:]).swapaxes(0, 1)
    return array if array.ndim == 3 else array.swapaxes(2, 3)


def _decay_between(decay: jax.Array) -> jax.Array:
    """Returns [..., C, C]: entry (i, j) sums the decays of tokens j+1..i, 0 where there are none.

    Summed one by one: the difference of two running sums would lose the digits of a small decay
    that follows large ones.
    """
    C = decay.shape[-1]
    ones = jnp.tri(C, dtype=decay.dtype)
    return jnp.matmul(ones, decay[..., :, None] * jnp.tri(C, k=-1, dtype=decay.dtype))


def _inverse(lower: jax.Array) -> jax.Array:
    """Returns (1 + lower)^-1 for strictly lower triangular [..., C, C].

    Diagonal blocks of growing size are inverted exactly; two neighbours P, S with R below P join to
    [[P^-1, 0], [-S^-1 R P^-1, S^-1]]. Matrix products only, which every backend does well, in a
    loop, which TPUs compile ten times faster. The last line (one Newton step, which changes nothing
    but rounding) carries the gradient.
    """
    C = lower.shape[-1]
    index = jnp.arange(C)
    fixed = jax.lax.stop_gradient(lower)

    def join(level: jax.Array, inverse: jax.Array) -> jax.Array:
        block = index >> level  # of size 2 ** level
        below = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        return inverse - jnp.matmul(jnp.matmul(inverse, jnp.where(below, fixed, 0)), inverse)

    one = jnp.eye(C, dtype=lower.dtype)
    inverse = jax.lax.fori_loop(0, (C - 1).bit_length(), join, jnp.broadcast_to(one, lower.shape))
    return inverse + jnp.matmul(inverse, one - inverse - jnp.matmul(lower, inverse))
