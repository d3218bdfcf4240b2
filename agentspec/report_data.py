"""What a report is made from: reads and checks a run's metrics.jsonl and results.json.

In: work directories. Out: ``Run`` records, and ``Summary`` rows over one or several runs (mean and
range). A run still in training has no results.json, and perhaps a last line of metrics.jsonl that
is half written: both are fine. Anything else that is wrong is a ``ReportError`` naming the file
and line or key.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS = ("base", "sft_light", "sft", "sft_more", "joint")
STAGES = ("base", "sft_light", "sft", "joint", "sft_more")


_ROW_LISTS = ("rows", "rows_other_temperatures")


class ReportError(ValueError):
    """A file that a report cannot be made from; the message names file and line or key."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of the table. ``kind``: frac (0 to 1), nats, or s (seconds)."""

    key: str
    title: str
    short: str  # for 80 columns of a terminal
    kind: str
    meaning: str


COLUMNS = (
    Column("success", "Task success", "task success", "frac", "share of tasks that were solved"),
    Column("hit_at_1", "Hit@1", "Hit@1", "frac", "share of tool-calling turns predicted exactly"),
    Column("hit_at_1_read_only", "Hit@1 read-only", "Hit@1 read-only", "frac", "read-only calls"),
    Column("parse_failure_frac", "Parse failures", "parse fail.", "frac", "unreadable predictions"),
    Column("self_agreement", "Self-agreement", "self agree", "frac", "two draws, same call"),
    Column("hit_over_agreement", "Hit@1 / agreement", "Hit@1 /agr.", "frac", "may exceed 1"),
    Column("entropy", "Entropy", "entr. nats", "nats", "mean per token that the agent sampled"),
    Column("serial_s", "Serial", "serial s", "s", "mean time of an episode, no speculation"),
    Column("speculated_s", "Speculated", "spec. s", "s", "the same episodes with speculation"),
    Column("hidden_tool_frac", "Hidden tool time", "hidden tools", "frac", "share of tool time"),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One work directory. ``metrics``: stage -> records in step order; ``config``: key -> value."""

    name: str
    metrics: dict[str, list[dict[str, Any]]]
    results: dict[str, Any]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The evaluated rows of all temperatures, [] before the evaluation."""
        return [row for key in _ROW_LISTS for row in self.results.get(key, [])]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean, lowest and highest of one value over ``n`` runs."""

    mean: float
    low: float
    high: float
    n: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """One table row over all runs. ``by_tool``: Hit@1 of each tool; ``n_tasks``: of each run."""

    row: str
    world: str
    temperature: float
    values: dict[str, Spread]
    by_tool: dict[str, Spread]
    n_tasks: int | None = None


def read_run(workdir: Path) -> Run:
    """Reads one work directory; raises ``ReportError`` when it holds nothing to report."""
    if not workdir.is_dir():
        raise ReportError(f"{workdir}: no such directory")
    metrics_path, results_path = workdir / "metrics.jsonl", workdir / "results.json"
    if not metrics_path.exists() and not results_path.exists():
        raise ReportError(f"{workdir}: holds neither metrics.jsonl nor results.json; train first")
    metrics = _read_metrics(metrics_path) if metrics_path.exists() else {}
    results = _read_results(results_path) if results_path.exists() else {}
    config_path = workdir / "config.json"
    config = _read_object(config_path) if config_path.exists() else {}
    return Run(str(workdir), metrics, results, config)


def _read_metrics(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Stage -> records by step. Records of one step are merged: a resumed run repeats some."""
    text = _text(path)
    lines = text.split("\n")
    if lines.pop():  # no newline at the end: that line is still being written
        text = text[: text.rfind("\n") + 1]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ReportError(f"{where}: not JSON: {error.msg}, column {error.colno}") from None
        if not isinstance(record, dict):
            raise ReportError(f"{where}: got {_shown(record)}, an object is wanted")
        stage, step = record.get("stage"), record.get("step")
        if not isinstance(stage, str):
            raise ReportError(f"{where}: stage is {_shown(stage)}, a string is wanted")
        if isinstance(step, bool) or not isinstance(step, int):
            raise ReportError(f"{where}: step is {_shown(step)}, a whole number is wanted")
        found.setdefault(stage, {}).setdefault(step, {}).update(record)
    ordered = sorted(found, key=lambda s: STAGES.index(s) if s in STAGES else len(STAGES))
    return {stage: [found[stage][step] for step in sorted(found[stage])] for stage in ordered}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}"
        raise ReportError(f"{where}: not JSON: {error.msg}, column {error.colno}") from None
    if not isinstance(value, dict):
        raise ReportError(f"{path}: the file is {_shown(value)}, an object is wanted")
    return value


def _read_results(path: Path) -> dict[str, Any]:
    results = _read_object(path)
    check = _Checker(path)
    for name in _ROW_LISTS:
        check.kind(results.get(name, []), list, name, "a list")
        for i, row in enumerate(results.get(name, [])):
            check.row(row, f"{name}[{i}]")
    check.crossing(results.get("crossing") or {})
    timeline = results.get("timeline") or {}
    check.kind(timeline, dict, "timeline", "an object")
    for lane in ("plain", "speculated"):
        check.kind(timeline.get(lane, []), list, f"timeline.{lane}", "a list")
        for i, event in enumerate(timeline.get(lane, [])):
            check.event(event, f"timeline.{lane}[{i}]")
    return results


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ReportError(f"{path}:{line}: not UTF-8") from None


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclasses.dataclass(frozen=True)
class _Checker:
    """Checks of results.json; every complaint names the file and the key."""

    path: Path

    def kind(self, value: object, kind: type, key: str, wanted: str) -> None:
        if not isinstance(value, kind):
            raise ReportError(f"{self.path}: {key} is {_shown(value)}, {wanted} is wanted")

    def number(self, value: object, key: str, optional: bool = False) -> None:
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            wanted = "a number or null" if optional else "a number"
            raise ReportError(f"{self.path}: {key} is {_shown(value)}, {wanted} is wanted")

    def row(self, row: Any, key: str) -> None:
        self.kind(row, dict, key, "an object")
        self.kind(row.get("row"), str, f"{key}.row", "a string")
        self.kind(row.get("world"), str, f"{key}.world", "a string")
        self.number(row.get("temperature"), f"{key}.temperature")
        for name in (*(column.key for column in COLUMNS), "n_tasks"):
            self.number(row.get(name), f"{key}.{name}", optional=True)
        by_tool = row.get("hit_at_1_by_tool") or {}
        self.kind(by_tool, dict, f"{key}.hit_at_1_by_tool", "an object")
        for tool, share in by_tool.items():
            self.number(share, f"{key}.hit_at_1_by_tool.{tool}", optional=True)

    def crossing(self, crossing: Any) -> None:
        self.kind(crossing, dict, "crossing", "an object")
        if not crossing:
            return
        for key in ("agents", "speculators", "hit_at_1"):
            self.kind(crossing.get(key), list, f"crossing.{key}", "a list")
        agents, speculators = crossing["agents"], crossing["speculators"]
        shape = (len(agents), len(speculators))
        rows = crossing["hit_at_1"]
        if len(rows) != shape[0] or any(
            not isinstance(row, list) or len(row) != shape[1] for row in rows
        ):
            raise ReportError(
                f"{self.path}: crossing.hit_at_1 must hold {shape[0]} rows (agents) of {shape[1]} "
                "numbers (speculators)"
            )
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                self.number(value, f"crossing.hit_at_1[{i}][{j}]", optional=True)

    def event(self, event: Any, key: str) -> None:
        self.kind(event, dict, key, "an object")
        self.kind(event.get("kind"), str, f"{key}.kind", "a string")
        for name in ("turn", "start_s", "end_s"):
            self.number(event.get(name), f"{key}.{name}")
        if event["end_s"] < event["start_s"]:
            raise ReportError(
                f"{self.path}: {key} ends at {event['end_s']} s, before it starts at "
                f"{event['start_s']} s"
            )


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """Table rows by world, temperature (highest first) and row, each over the runs that have it."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for run in runs:
        for row in run.rows:
            key = (row["row"], row["world"], float(row["temperature"]))
            groups.setdefault(key, []).append(row)
    worlds = list(dict.fromkeys(world for _, world, _ in groups))
    names = list(dict.fromkeys([*ROWS, *(name for name, _, _ in groups)]))
    summaries = []
    for key in sorted(groups, key=lambda k: (worlds.index(k[1]), -k[2], names.index(k[0]))):
        rows = groups[key]
        tools = dict.fromkeys(t for row in rows for t in row.get("hit_at_1_by_tool") or {})
        values = {c.key: spread([row.get(c.key) for row in rows]) for c in COLUMNS}
        by_tool = {
            tool: spread([(row.get("hit_at_1_by_tool") or {}).get(tool) for row in rows])
            for tool in tools
        }
        summaries.append(
            Summary(
                *key,
                values={k: s for k, s in values.items() if s is not None},
                by_tool={k: s for k, s in by_tool.items() if s is not None},
                n_tasks=rows[0].get("n_tasks"),
            )
        )
    return summaries


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and range of the finite values; None where there is none."""
    finite = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return None
    return Spread(math.fsum(finite) / len(finite), min(finite), max(finite), len(finite))


def mean_crossing(runs: Sequence[Run]) -> dict[str, Any]:
    """The runs' crossing tables averaged; {} where none has one, or where their labels differ."""
    tables = [run.results["crossing"] for run in runs if run.results.get("crossing")]
    if not tables:
        return {}
    first = tables[0]
    if any(
        t["agents"] != first["agents"] or t["speculators"] != first["speculators"] for t in tables
    ):
        return {}
    means: list[list[float | None]] = []
    for i in range(len(first["agents"])):
        cells = [
            spread([t["hit_at_1"][i][j] for t in tables]) for j in range(len(first["speculators"]))
        ]
        means.append([None if cell is None else cell.mean for cell in cells])
    return {"agents": first["agents"], "speculators": first["speculators"], "hit_at_1": means}


def number(value: float, kind: str) -> str:
    """A value as text: nats with 3 digits, all else with 2."""
    return f"{value:.3f}" if kind == "nats" else f"{value:.2f}"


def cell(value: Spread | None, kind: str) -> tuple[str, str]:
    """A table cell: the mean, and the range where there is more than one run."""
    if value is None:
        return "–", ""
    both = f"{number(value.low, kind)}–{number(value.high, kind)}" if value.n > 1 else ""
    return number(value.mean, kind), both
