"""What a waiting person sees: one live line on a terminal, a plain line now and then elsewhere.

In: stage, step, phase and the numbers of each step. Out: text on standard error; nothing else.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_SHOWN = {
    "loss": "loss {:.3f}",
    "reward": "reward {:.2f}",
    "speculator_reward": "R_sp {:.2f}",
    "success": "success {:.2f}",
    "hit_at_1": "Hit@1 {:.2f}",
    "sampled_hit_at_1": "sampled {:.2f}",
    "eval_success": "held-out success {:.2f}",
    "eval_hit_at_1": "held-out Hit@1 {:.2f}",
}


class StageProgress:
    """Progress of one stage. Use as a context manager; call ``show`` after each step."""

    def __init__(self, stage: str, first: float, total: float, every_s: float = 15.0) -> None:
        """``first`` of ``total`` units (steps, or tokens) are already done."""
        self._stage, self._first, self._total = stage, first, total
        self._every_s, self._last_s, self._start_s = every_s, 0.0, time.monotonic()
        self._kept: dict[str, float] = {}
        self._live: Progress | None = None
        if sys.stderr.isatty():
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=Console(stderr=True),
            )
            self._task = self._live.add_task(stage, total=total, completed=int(first), numbers="")

    def __enter__(self) -> StageProgress:
        """Starts the display."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Leaves the last line standing."""
        if self._live:
            self._live.stop()

    def show(self, done: float, phase: str, numbers: dict[str, float], last: bool = False) -> None:
        """``done`` units of this stage are finished; ``numbers`` are the newest step's."""
        self._kept |= {k: v for k, v in numbers.items() if k in _SHOWN}
        text = " ".join(f.format(self._kept[k]) for k, f in _SHOWN.items() if k in self._kept)
        if self._live:
            self._live.update(self._task, completed=done, numbers=f"{phase} {text}")
            return
        now_s = time.monotonic()
        if now_s - self._last_s < self._every_s and not last:
            return
        self._last_s = now_s
        spent_s = now_s - self._start_s
        left_s = spent_s * (self._total - done) / max(done - self._first, 1e-9)
        unit = f"{done:.0f}/{self._total:.0f}"
        print(
            f"[{self._stage}] {phase} {unit} | {text} | {spent_s:.0f} s, "
            f"about {max(left_s, 0):.0f} s left in this stage",
            file=sys.stderr,
            flush=True,
        )


def say(text: str) -> None:
    """One line to the person who waits."""
    print(text, file=sys.stderr, flush=True)
