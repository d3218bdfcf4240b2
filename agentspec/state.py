"""What training carries from step to step: one plain pytree, taken whole by jit and checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Weights, optimizer state and the number of updates made (int32 scalar, never reset).

    ``step`` counts all updates of the run, of both modes; the count inside ``opt_state`` restarts
    at each `optim.reset` and equals ``step`` where none has happened and no update was skipped.
    """

    params: Any
    opt_state: Any
    step: jax.Array

    def replace(self, **changes: Any) -> TrainState:
        """The same state but for the fields given."""
        return dataclasses.replace(self, **changes)
