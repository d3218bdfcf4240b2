"""Every metric's name, unit and reduction, the file they are written to, and a watch over them.

``reduction`` says how parts of one step (micro-batches) become one number: ``mean`` is weighted by
trained tokens. `Writer` refuses names that are not listed here. Shares end in ``_frac`` (0 to 1).

`CollapseMonitor` watches for the way joint training goes wrong. The two modes share their weights,
and predictability is the cheaper reward: with too large a step Hit@1 goes on rising while success
falls and turns lose their form. The policy becomes predictable, not right.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric's unit, how its parts are reduced, and one line on what it means."""

    unit: str
    reduction: Reduction
    meaning: str


METRICS: dict[str, Metric] = {
    # update
    "loss": Metric("nats", "sum", "the step's loss; parts carry the step's one denominator"),
    "grad_norm": Metric("1", "last", "global gradient norm before clipping"),
    "lr": Metric("1", "last", "learning rate of the update"),
    "skipped": Metric("0/1", "last", "1 where no token was kept, so that nothing moved"),
    "trained_tokens": Metric("tokens", "sum", "tokens of mask 1"),
    "policy_entropy": Metric("nats", "mean", "entropy of the policy at trained tokens"),
    "ratio_mean": Metric("1", "mean", "probability ratio, policy over old policy"),
    "ratio_max": Metric("1", "max", "largest probability ratio"),
    "ratio_min": Metric("1", "min", "smallest probability ratio"),
    "clip_low_frac": Metric("frac", "mean", "tokens whose ratio was clipped from below"),
    "clip_high_frac": Metric("frac", "mean", "tokens whose ratio was clipped from above"),
    "kl": Metric("nats", "mean", "k3 estimate of KL(policy | reference)"),
    "importance_mean": Metric("1", "mean", "truncated importance weight"),
    "logp_gap_mean": Metric("nats", "mean", "|trainer - sampler| log-prob"),
    "logp_gap_max": Metric("nats", "max", "largest |trainer - sampler| log-prob"),
    # collection
    "reward": Metric("1", "mean", "agent reward R_ag"),
    "speculator_reward": Metric("1", "mean", "speculator reward R_sp"),
    "success": Metric("frac", "mean", "episodes that succeeded"),
    "hit_at_1": Metric("frac", "mean", "tool-calling turns whose first candidate matches"),
    "parse_failure_frac": Metric("frac", "mean", "predictions that do not parse"),
    "sampled_hit_at_1": Metric("frac", "mean", "the same for one sampled prediction"),
    "sampled_parse_failure_frac": Metric("frac", "mean", "sampled predictions that do not parse"),
    "malformed_frac": Metric("frac", "mean", "agent turns with a parse problem"),
    "dropped_groups_frac": Metric("frac", "mean", "uniform groups, which carry no signal"),
    "prefixes": Metric("prefixes", "sum", "prefixes that formed a speculator group"),
    "no_call_prefixes": Metric("prefixes", "sum", "drawn prefixes whose turn made no call"),
    "turns": Metric("turns", "mean", "agent turns an episode"),
    "episode_tokens": Metric("tokens", "mean", "tokens an episode"),
    "entropy": Metric("nats", "mean", "entropy at sampled agent tokens, by the sampler"),
    "collect_s": Metric("s", "last", "wall time of collecting and scoring"),
    "step_s": Metric("s", "last", "wall time of the whole step"),
    "eval_hit_at_1": Metric("frac", "mean", "Hit@1 on held-out tasks"),
    "eval_success": Metric("frac", "mean", "success on held-out tasks"),
}


def merge(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One step's numbers from its micro-batches', each reduced as `METRICS` says."""
    weights = [part.get("trained_tokens", 1.0) for part in parts]
    out: dict[str, float] = {}
    for name in parts[0] if parts else ():
        values = [part[name] for part in parts]
        match METRICS[name].reduction:
            case "mean":
                pairs = zip(values, weights, strict=True)
                out[name] = sum(v * w for v, w in pairs) / max(sum(weights), 1e-9)
            case "sum":
                out[name] = sum(values)
            case "max":
                out[name] = max(values)
            case "min":
                out[name] = min(values)
            case "last":
                out[name] = values[-1]
    return out


class Writer:
    """Appends JSON lines: ``{"stage", "step", "phase", name: number, ...}``, flushed one by one.

    Opened at ``step``, the next update to be made, it first drops this stage's rows of that step
    and later (a resumed run makes them again) and a last line cut short by a kill. Rows of other
    stages stay.
    """

    def __init__(self, path: str | os.PathLike[str], *, stage: str = "", step: int = 0) -> None:
        """Opens or makes the file. Raises ValueError, with the line, for one that is not JSON."""
        self.path, self.stage = Path(path), stage
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [r for r in read_rows(self.path) if r["stage"] != stage or r["step"] < step]
        partial = self.path.with_name(self.path.name + ".tmp")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        partial.replace(self.path)
        self._kept = [row for row in rows if row["stage"] == stage]

    def write(self, step: int, phase: str, numbers: Mapping[str, float]) -> None:
        """Adds the row of one step. A number that is not finite becomes null.

        Raises ValueError for a name that `METRICS` lacks.
        """
        for name in numbers:
            if name not in METRICS:
                near = difflib.get_close_matches(name, METRICS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"metric {name!r} is not listed in metrics.METRICS{hint}")
        values = {k: float(v) if math.isfinite(v) else None for k, v in numbers.items()}
        row = {"stage": self.stage, "step": step, "phase": phase, **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def replay(self, observe: Callable[[dict[str, Any]], Any]) -> None:
        """Feeds the stage's kept rows to ``observe``, oldest first."""
        for row in self._kept:
            observe(row)


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a metrics file, [] where there is none; a cut-off last line is left out.

    Raises ValueError with file and line for any other line that is not JSON.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            row["stage"], row["step"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number} is not a metrics line: {error!r}") from error
        rows.append(row)
    return rows


@dataclasses.dataclass(frozen=True)
class CollapseLimits:
    """When to warn. Means over ``window`` steps are compared: the first of the run and the last.

    ``success_frac``: success below this share of its start is a collapse, named "predictable, not
    right" unless Hit@1 and speculator reward fell with it by more than ``hit_fall``.
    ``malformed_rise``: rise of the share of malformed turns, to at least 1.5 times its start.
    ``dropped_frac``: share of groups without signal.
    """

    window: int = 8
    success_frac: float = 0.5
    hit_fall: float = 0.05
    malformed_rise: float = 0.1
    dropped_frac: float = 0.95


class CollapseMonitor:
    """Feed it every row with `observe`; the same rows give the same warnings, each once a spell."""

    def __init__(self, limits: CollapseLimits | None = None) -> None:
        """``limits``: None for the defaults."""
        self.limits = limits or CollapseLimits()
        self._series: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._active: set[str] = set()

    def observe(self, row: Mapping[str, Any]) -> list[str]:
        """New warnings after this row.

        Reads ``step``, ``phase`` and, where present and not None, ``success``, ``hit_at_1``,
        ``sampled_hit_at_1``, ``speculator_reward``, ``malformed_frac``, ``entropy``,
        ``dropped_groups_frac``.
        """
        phase = str(row.get("phase", ""))
        for name in ("success", "malformed_frac", "entropy"):  # agent episodes in both phases
            self._add(name, "", row)
        for name in ("hit_at_1", "sampled_hit_at_1", "speculator_reward", "dropped_groups_frac"):
            self._add(name, phase, row)
        found = self._success_lost() | self._malformed() | self._dropped(phase)
        stale = {
            key for key in self._active if not key.startswith("dropped") or key.endswith(phase)
        }
        new = [text for key, text in found.items() if key not in self._active]
        self._active = (self._active - stale) | set(found)
        return [f"step {row.get('step')}: {text}" for text in new]

    def _add(self, name: str, phase: str, row: Mapping[str, Any]) -> None:
        if row.get(name) is not None:
            self._series[name, phase].append(float(row[name]))

    def _change(self, name: str, phase: str = "") -> tuple[float, float] | None:
        """Means over the first and the last window, once two whole windows do not overlap."""
        series, n = self._series[name, phase], self.limits.window
        return (_mean(series[:n]), _mean(series[-n:])) if len(series) >= 2 * n else None

    def _success_lost(self) -> dict[str, str]:
        success = self._change("success")
        if success is None or success[1] >= self.limits.success_frac * success[0]:
            return {}
        changes = []
        for name, phase in list(self._series):
            change = self._change(name, phase)
            if name in ("hit_at_1", "sampled_hit_at_1", "speculator_reward") and change is not None:
                changes.append((name, change))
        if not changes:
            return {}
        level = _mean([b - a for _, (a, b) in changes]) >= -self.limits.hit_fall
        kind = "predictable, not right" if level else "collapse"
        seen = ", ".join(f"{name} {a:.2f} -> {b:.2f}" for name, (a, b) in changes)
        entropy = self._change("entropy")
        if entropy:
            seen += f", entropy {entropy[0]:.2f} -> {entropy[1]:.2f}"
        return {
            kind: f"{kind}: success {success[0]:.2f} -> {success[1]:.2f} while {seen}. "
            "Try a lower learning rate or more agent steps."
        }

    def _malformed(self) -> dict[str, str]:
        change = self._change("malformed_frac")
        if change is None:
            return {}
        start, now = change
        if now < max(start + self.limits.malformed_rise, 1.5 * start):
            return {}
        return {"malformed": f"malformed turns: share {start:.2f} -> {now:.2f}"}

    def _dropped(self, phase: str) -> dict[str, str]:
        series, n = self._series["dropped_groups_frac", phase], self.limits.window
        if len(series) < n or _mean(series[-n:]) <= self.limits.dropped_frac:
            return {}
        return {
            f"dropped {phase}": f"no signal: {_mean(series[-n:]):.0%} of the {phase} groups of the "
            f"last {n} {phase} steps were uniform, so there is next to no gradient"
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
