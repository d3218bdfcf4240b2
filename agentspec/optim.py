"""AdamW whose learning rate is a function of the global step, and whose moments can start afresh.

Algorithm 1, line 2: at every switch of mode the optimizer's moments and bias-correction count are
re-initialised, the learning rate goes on [``optim.reset_schedule = false``]. The same moments
serve both modes. In: gradients; out: the next `state.TrainState`. Moments are float32 whatever the
parameters' dtype. Weight decay is decoupled and spares arrays of fewer than two dimensions (norms).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from agentspec.state import TrainState


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW of these settings; ``clip_norm`` 0 turns clipping off. `step` may be jitted.

    ``decay`` is ``constant`` or ``cosine`` (to ``final_lr_frac`` of ``lr`` at ``total_steps``),
    both after ``warmup_steps`` steps of linear warm-up whose first step is not 0.
    """

    lr: float = 3e-6
    decay: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    final_lr_frac: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    reset_schedule: bool = False

    def __post_init__(self) -> None:
        if self.decay not in ("constant", "cosine"):
            raise ValueError(f"optim decay must be constant or cosine, got {self.decay!r}")
        if self.decay == "cosine" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"cosine decay needs total_steps above warmup_steps, got {self.total_steps} "
                f"and {self.warmup_steps}"
            )
        for name in ("lr", "warmup_steps", "weight_decay", "clip_norm"):
            if getattr(self, name) < 0:
                raise ValueError(f"optim {name} must be at least 0, got {getattr(self, name)}")

    @property
    def transform(self) -> optax.GradientTransformationExtraArgs:
        """Clip by global norm, Adam, decoupled decay; the rate is applied in `step`."""
        pieces = [_clip(self.clip_norm)] if self.clip_norm else []
        pieces.append(optax.scale_by_adam(self.b1, self.b2, self.eps))
        if self.weight_decay:
            pieces.append(optax.add_decayed_weights(self.weight_decay, mask=_matrices))
        return optax.chain(*pieces)

    def init(self, params: Any) -> TrainState:
        """A state at step 0; moments float32, laid out like the parameters."""
        like = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        return TrainState(params, self.transform.init(like), jnp.zeros((), jnp.int32))

    def shardings(self, shapes: Any, params: Any) -> TrainState:
        """Where a state lies: moments like the parameters, the rest on every device.

        ``shapes`` and ``params``: trees of the parameters' shapes and shardings.
        """
        one = jax.tree.leaves(params)[0]
        whole: Any = (
            NamedSharding(one.mesh, PartitionSpec()) if isinstance(one, NamedSharding) else one
        )
        opt_state = optax.tree_utils.tree_map_params(
            self.transform,
            lambda _, where: where,
            jax.eval_shape(self.transform.init, shapes),
            params,
            transform_non_params=lambda _: whole,
        )
        return TrainState(params, opt_state, step=whole)

    def step(
        self, state: TrainState, grads: Any, norm: jax.Array | None = None
    ) -> tuple[TrainState, jax.Array]:
        """The next state and the learning rate used; ``step`` and the count both rise by 1.

        ``norm`` is the gradients' global norm, where the caller has it already.
        """
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        count = optax.tree_utils.tree_get(state.opt_state, "count")
        lr = learning_rate(self, count if self.reset_schedule else state.step)
        updates, opt_state = self.transform.update(grads, state.opt_state, state.params, norm=norm)
        params = jax.tree.map(lambda p, u: (p - lr * u).astype(p.dtype), state.params, updates)
        return TrainState(params, opt_state, state.step + 1), lr

    def reset(self, state: TrainState) -> TrainState:
        """See `reset` of this module."""
        return reset(state)


def _clip(most: float) -> optax.GradientTransformationExtraArgs:
    """Like ``clip_by_global_norm``, as one factor, which fuses into Adam; the norm may be given.

    Optax's own divides each gradient by the norm, which costs a pass and a copy of all gradients.
    """

    def update(
        grads: Any, state: Any, params: Any = None, *, norm: jax.Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(grads) if norm is None else norm
        factor = most / jnp.maximum(norm, most)
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def learning_rate(config: Optimizer, step: Any) -> jax.Array:
    """float32 scalar: the rate of the update numbered ``step`` (from 0)."""
    step = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum(1.0, (step + 1.0) / max(config.warmup_steps, 1))
    if config.decay == "constant":
        return config.lr * warm
    span = config.total_steps - config.warmup_steps
    done = jnp.clip((step - config.warmup_steps) / span, 0.0, 1.0)
    low = config.final_lr_frac
    return config.lr * warm * (low + (1.0 - low) * 0.5 * (1.0 + jnp.cos(jnp.pi * done)))


def reset(state: TrainState) -> TrainState:
    """The state with moments and bias-correction count as new; weights and ``step`` stay.

    Fresh AdamW state is zero throughout, and zeros in place of the old arrays keep their layout.
    """
    return dataclasses.replace(state, opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))


def update_count(state: TrainState) -> int:
    """Updates that the moments have seen since they were new."""
    return int(optax.tree_utils.tree_get(state.opt_state, "count"))


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2, params)
