"""One stage of a job on disk: its state, its place in the task stream, its saves and its end.

A stage lives in ``workdir/checkpoints/<name>``. Everything that the next step depends on is in the
checkpoint: state, step, index into the stream, tokens trained, held-out history, best weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from agentspec.checkpoint import Checkpointer, abstract, restore_params
from agentspec.job import Job
from agentspec.optim import Optimizer
from agentspec.settings import StageSettings
from agentspec.state import TrainState
from agentspec.update import Update, make_update


class Stage:
    """See the module's text. ``count`` after each update, then ``save_when_due``."""

    def __init__(self, job: Job, workdir: Path, name: str) -> None:
        """Opens the stage, restoring its newest checkpoint if there is one."""
        self.job, self.workdir, self.name = job, workdir, name
        self.settings: StageSettings = job.settings.stage(name)
        self.step = self.next_task = self.tokens = 0
        self.best_step, self.best_hit, self.looks = 0, -1.0, 0
        self.done = False
        self.best: Any = None
        c, o = self.settings, job.settings.optim
        self.optimizer = Optimizer(
            lr=c.lr,
            decay=c.decay,
            warmup_steps=c.warmup_steps,
            total_steps=c.steps,
            b1=o.b1,
            b2=o.b2,
            eps=o.eps,
            weight_decay=o.weight_decay,
            clip_norm=o.clip_norm,
            reset_schedule=o.reset_schedule,
        )
        self._saved_step = -1
        self._checkpointer = Checkpointer(
            workdir / "checkpoints" / name, keep=job.settings.checkpoint.keep
        )
        self._checkpointer.recover()
        if self._checkpointer.latest() is not None:
            self._restore()
        else:
            params = self.start_params()
            places = self._places
            self.state: TrainState = jax.jit(
                self.optimizer.init, out_shardings=places, donate_argnums=0
            )(params)
            if self.settings.patience:
                self.best = _copy(self.state.params)

    @property
    def flat(self) -> bool:
        """Whether ``patience`` looks in a row brought no new best."""
        patience = self.settings.patience
        return bool(patience) and self.looks >= patience

    def start_params(self) -> Any:
        """The weights that the stage begins with."""
        if not self.settings.start:
            return self.job.initial_params()
        start = self.workdir / "checkpoints" / self.settings.start
        return restore_params(start, abstract(self.job.model.shapes, self.job.param_shardings))

    def make_update(self, loss: str) -> Update:
        """The jitted update of this stage for loss ``policy`` or ``sft``."""
        s = self.job.settings
        return make_update(
            self.job.model,
            self.optimizer,
            s.loss,
            loss,
            temperature=s.agent.temperature,
            max_tokens=s.episode.max_tokens,
            reference_params=self.start_params() if s.loss.kl else None,
            mesh=self.job.model.mesh,
        )

    def count(self, step: int, tokens: int) -> None:
        """Notes that ``step`` updates are done and that the last one trained ``tokens``."""
        self.step = step
        self.tokens += tokens

    def look(self, hit: float, patience: int) -> None:
        """Notes a held-out Hit@1; a new best keeps its weights."""
        if not patience:
            return
        self.looks += 1
        if hit > self.best_hit:
            self.best_hit, self.best_step, self.looks = hit, self.step, 0
            self.best = _copy(self.state.params)

    def tokens_of(self, name: str) -> int:
        """Tokens that the finished stage ``name`` trained."""
        other = Checkpointer(self.workdir / "checkpoints" / name, keep=1)
        try:
            return int(other.read_meta()["tokens"])
        finally:
            other.close()

    def save_when_due(self) -> None:
        """Saves every ``checkpoint.every`` steps, in the background."""
        if self.step % self.job.settings.checkpoint.every == 0:
            self._save()

    def finish(self) -> None:
        """Saves the stage's weights as finished and waits until they are on disk."""
        if self.best is not None and self.best_hit >= 0.0:  # some look measured something
            self.state = self.state.replace(params=self.best)
        self.done = True
        self.best = None
        self._save()
        self._checkpointer.wait()

    def close(self) -> None:
        """Waits for saves under way; a failed one raises here."""
        self._checkpointer.close()

    @property
    def _places(self) -> TrainState:
        """Where the state's arrays lie."""
        return self.optimizer.shardings(self.job.model.shapes, self.job.param_shardings)

    def _tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {"state": self.state}
        if self.best is not None:
            tree["best"] = self.best
        return tree

    def _save(self) -> None:
        keys = ("step", "next_task", "tokens", "best_step", "best_hit", "looks", "done")
        meta = {key: getattr(self, key) for key in keys} | {"stage": self.name}
        # A step may be there already: damaged and passed over, or saved before it was finished.
        self._checkpointer.save(self.step, self._tree(), meta, force=True)

    def _restore(self) -> None:
        meta = self._checkpointer.read_meta()
        params = self.job.model.shapes
        state = jax.eval_shape(self.optimizer.init, params)
        tree: dict[str, Any] = {"state": abstract(state, self._places)}
        if self.settings.patience and not meta["done"]:
            tree["best"] = abstract(params, self.job.param_shardings)
        restored, meta = self._checkpointer.restore(tree)
        for key, value in meta.items():
            if key != "stage":
                setattr(self, key, value)
        self.state, self.best = restored["state"], restored.get("best")


@contextlib.contextmanager
def open_stage(job: Job, workdir: Path, name: str) -> Iterator[Stage]:
    """The stage of that name, closed at the end whatever happens."""
    stage = Stage(job, workdir, name)
    try:
        yield stage
    finally:
        stage.close()


def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
