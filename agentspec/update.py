"""Stage 6: one optimizer step from packed batches (Algorithm 1, line 6).

In: a `state.TrainState` and the `tokens.pack.PackedBatch`es of one step. Out: the next state and
the step's numbers. Micro-batches share one compiled shape and one denominator, counted over all of
them (and all hosts) first, so their gradients add up to the gradient of the one big batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from agentspec.losses.aggregate import count
from agentspec.losses.policy import policy_loss, truncated_weights
from agentspec.losses.sft import sft_loss, token_logps
from agentspec.losses.vocabulary import cut_head, logps_by_vocabulary, n_parts
from agentspec.mesh import LOGICAL_AXES, batch_sharding, param_shardings
from agentspec.metrics import merge
from agentspec.optim import Optimizer
from agentspec.settings import LossSettings
from agentspec.state import TrainState
from agentspec.tokens.pack import PackedBatch

Numbers = dict[str, float]


class NonFiniteError(FloatingPointError):
    """A loss or gradient that is not finite; the state it came from is left as it was."""


class Update:
    """One optimizer step, compiled once for the static shape of its batches. See `make_update`."""

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        loss: LossSettings,
        kind: str,
        temperature: float,
        importance_cap: float,
        max_tokens: int | None,
        reference: Any,
        mesh: Mesh | None,
    ) -> None:
        """See `make_update`."""
        self.model, self.optimizer, self.loss, self.kind = model, optimizer, loss, kind
        self.temperature, self.importance_cap = temperature, importance_cap
        self.max_tokens, self.mesh = max_tokens, mesh
        self._reference = None if reference is None else jax.tree.map(jnp.copy, reference)
        self._grads = jax.jit(self._value_and_grad)
        self._add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0)
        self._norm = jax.jit(optax.tree.norm)
        self._apply = jax.jit(optimizer.step, donate_argnums=0)

    def grads(
        self,
        params: Any,
        batch: PackedBatch,
        denominator: float | None = None,
        temperature: float | None = None,
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """Loss (float32 scalar), gradients like ``params``, metrics, all of one micro-batch.

        ``denominator`` is the whole step's; None takes this batch's own.
        """
        if denominator is None:
            denominator = self.denominator([batch])
        arrays = {name: self._put(array) for name, array in batch.arrays().items()}
        arrays["sequence_ids_BT"] = self._put(batch.sequence_ids_BT)
        t = self.temperature if temperature is None else temperature
        scalars = np.float32(denominator), np.float32(t if t > 0 else 1.0)
        (loss, metrics), grads = self._grads(params, self._reference, arrays, *scalars)
        return loss, grads, metrics

    def denominator(self, batches: Sequence[PackedBatch]) -> float:
        """What the step's loss is divided by, over all micro-batches and hosts; see `count`."""
        how, most = self.loss.aggregate, self.max_tokens
        total = sum(
            float(count(b.mask_BT, how, segment_ids_BT=b.sequence_ids_BT, max_tokens=most))
            for b in batches
        )
        if jax.process_count() > 1:
            total = float(multihost_utils.process_allgather(np.float32(total)).sum())
        return total

    def __call__(
        self,
        state: TrainState,
        batches: Sequence[PackedBatch],
        *,
        phase: str = "",
        temperature: float | None = None,
    ) -> tuple[TrainState, Numbers]:
        """The next state and the numbers of the step. The given state's arrays are donated.

        Without a single kept token (every group uniform) weights and moments stay as they are and
        only ``step`` rises; ``skipped`` is then 1. Raises NonFiniteError, naming step and phase,
        before anything is changed.
        """
        kept = [b for b in batches if b.mask_BT.any()] if jax.process_count() == 1 else batches
        denominator = self.denominator(kept)
        if denominator == 0:
            numbers = {"loss": 0.0, "grad_norm": 0.0, "trained_tokens": 0.0, "skipped": 1.0}
            return dataclasses.replace(state, step=state.step + 1), numbers
        total, losses, parts = None, [], []
        for batch in kept:
            loss, grads, metrics = self.grads(state.params, batch, denominator, temperature)
            total = grads if total is None else self._add(total, grads)
            losses.append(loss)
            parts.append(metrics)
        loss_sum = float(sum(float(x) for x in losses))
        norm = self._norm(total)
        grad_norm = float(norm)
        if not (math.isfinite(loss_sum) and math.isfinite(grad_norm)):
            bad = [i for i, x in enumerate(losses) if not math.isfinite(float(x))]
            raise NonFiniteError(
                f"step {int(state.step)}, phase {phase or self.kind}: loss {loss_sum}, "
                f"gradient norm {grad_norm}; micro-batches with a loss that is not finite: "
                f"{bad or 'none'} of {len(losses)}. The weights of the step before are unchanged."
            )
        state, lr = self._apply(state, total, norm)
        numbers = merge([{k: float(v) for k, v in m.items()} for m in parts])
        numbers |= {"loss": loss_sum, "grad_norm": grad_norm, "lr": float(lr), "skipped": 0.0}
        return state, numbers

    def _put(self, array: Any) -> Any:
        """The array; on a mesh cut by rows, of which every process gives its own."""
        if self.mesh is None:
            return array
        rows = array.shape[0] * jax.process_count()
        return jax.make_array_from_process_local_data(batch_sharding(self.mesh, rows), array)

    def _value_and_grad(self, params: Any, *rest: Any) -> Any:
        value, grads = jax.value_and_grad(self._loss, has_aux=True)(params, *rest)
        if self.mesh is not None:  # laid out like the parameters: a sum over devices, scattered
            axes, shapes = self.model.logical_axes, self.model.shapes
            where = param_shardings(axes, shapes, self.mesh)
            grads = jax.lax.with_sharding_constraint(grads, where)
        return value, grads

    def _loss(
        self, params: Any, reference: Any, batch: dict[str, Any], denominator: Any, temperature: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        c, mask_BT = self.loss, batch["mask_BT"]
        logp_BT, entropy_BT = self._logps(params, batch, temperature)
        how = {
            "segment_ids_BT": batch["sequence_ids_BT"],
            "how": c.aggregate,
            "max_tokens": self.max_tokens,
            "denominator": denominator,
        }
        keep_BT = mask_BT != 0
        n_tokens = keep_BT.sum(dtype=jnp.float32)
        fixed_BT = jax.lax.stop_gradient(logp_BT)

        def mean(values_BT: jax.Array) -> jax.Array:
            return jnp.where(keep_BT, values_BT, 0.0).sum() / jnp.maximum(n_tokens, 1.0)

        metrics = {"trained_tokens": n_tokens, "policy_entropy": mean(entropy_BT)}
        if self.kind == "sft":
            return sft_loss(logp_BT, mask_BT, **how), metrics
        sampler_BT, weights_BT, ref_BT = batch["old_logp_BT"], None, None
        if self.importance_cap:
            weights_BT = truncated_weights(fixed_BT, sampler_BT, mask_BT, self.importance_cap)
            metrics["importance_mean"] = mean(weights_BT)
        if c.kl:
            ref_BT = jax.lax.stop_gradient(self._logps(reference, batch, temperature)[0])
        loss, more = policy_loss(
            logp_BT,
            fixed_BT if c.old_logp == "trainer" else sampler_BT,
            batch["advantage_BT"],
            mask_BT,
            clip_low=c.clip_low,
            clip_high=c.clip_high,
            weights_BT=weights_BT,
            ref_logp_BT=ref_BT,
            kl_coef=c.kl,
            **how,
        )
        gap_BT = jnp.where(keep_BT, jnp.abs(fixed_BT - sampler_BT), 0.0)
        metrics |= more | {"logp_gap_mean": mean(gap_BT), "logp_gap_max": gap_BT.max()}
        return loss, metrics

    def _logps(
        self, params: Any, batch: dict[str, Any], temperature: Any
    ) -> tuple[jax.Array, jax.Array]:
        hidden_BTD = self.model.hidden(
            params,
            batch["ids_BT"],
            positions_BT=batch["positions_BT"],
            segment_ids_BT=batch["segment_ids_BT"],
            branch_ids_BT=batch["branch_ids_BT"],
            cuts_BT=batch["cuts_BT"],
            branches_BNJ=batch.get("branches_BNJ"),
        )
        chunk, model = self.loss.logits_chunk_tokens, self.model
        if 0 < chunk < hidden_BTD.shape[1]:
            axis, n = LOGICAL_AXES["vocab"], n_parts(hidden_BTD.shape[1], chunk)
            ways = 1 if axis is None or self.mesh is None else self.mesh.shape[axis]
            return logps_by_vocabulary(
                model.unembed_part,
                cut_head(model.head(params), n, ways),
                model.config.vocab_size,
                hidden_BTD,
                batch["targets_BT"],
                batch["mask_BT"],
                temperature=temperature,
            )
        return token_logps(
            lambda hidden: self.model.unembed(params, hidden),
            hidden_BTD,
            batch["targets_BT"],
            batch["mask_BT"],
            temperature=temperature,
        )


def make_update(
    model: Any,
    optimizer: Optimizer,
    loss: LossSettings,
    kind: str = "policy",
    *,
    temperature: float = 1.0,
    importance_cap: float = 0.0,
    max_tokens: int | None = None,
    reference_params: Any = None,
    mesh: Mesh | None = None,
) -> Update:
    """The update of one model, optimizer and loss.

    ``kind`` is ``policy`` (clipped surrogate, by advantage) or ``sft`` (mean NLL over the mask,
    at temperature 1). ``loss.old_logp``: ``trainer`` is the trainer's own, detached (one update a
    batch, so the ratio is 1); ``sampler`` is what the batch carries. ``importance_cap`` above 0
    weighs each token by min(trainer / sampler, cap), detached. ``temperature`` is the sampling
    temperature; 0 stands for log-probs at 1. ``max_tokens`` serves ``constant_length``.
    ``reference_params`` (copied) serve the KL term. ``mesh``: weights lie on it as `mesh` says,
    rows of a batch are cut over it, gradients lie like the weights. ``model`` is a
    `model.transformer.LanguageModel` (``hidden``, ``unembed``; on that mesh). Raises ValueError,
    naming the key, for settings that do not go together.
    """
    if kind not in ("policy", "sft"):
        raise ValueError(f"kind of update must be policy or sft, got {kind!r}")
    if loss.old_logp not in ("trainer", "sampler"):
        raise ValueError(f"loss.old_logp must be trainer or sampler, got {loss.old_logp!r}")
    if importance_cap and loss.old_logp == "sampler":
        raise ValueError("importance_cap needs loss.old_logp = trainer, got sampler")
    count([[1]], loss.aggregate, max_tokens=max_tokens)  # refuses an unknown or incomplete one
    policy = kind == "policy"
    if policy and loss.kl and reference_params is None:
        raise ValueError(f"loss.kl is {loss.kl}, which needs reference_params")
    return Update(
        model,
        optimizer,
        loss,
        kind,
        temperature if policy else 1.0,
        importance_cap if policy else 0.0,
        max_tokens,
        reference_params if policy and loss.kl else None,
        mesh,
    )
