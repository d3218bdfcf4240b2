"""Entry point: prints a run's table and writes its report.html, which needs no network.

In: ``--workdir`` (one run, or several of the same config with other seeds) holding what
``train`` and ``evaluate`` wrote. Out: the table in the terminal (with several runs mean and range)
and one HTML file with it, the curves, the crossing of agents and speculators, and a timeline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from rich import box
from rich.console import Console
from rich.table import Table

from agentspec import entry
from agentspec.report_data import COLUMNS, ReportError, Run, Summary, cell, read_run, summarise
from agentspec.report_page import render


def write_report(workdirs: Sequence[str | Path], out: str | Path | None = None) -> list[Run]:
    """Writes the page and returns the runs read; raises ``ReportError`` for what cannot be read."""
    runs = [read_run(Path(workdir)) for workdir in workdirs]
    path = Path(out) if out else default_out([Path(workdir) for workdir in workdirs])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(runs), encoding="utf-8")
    return runs


def default_out(workdirs: Sequence[Path]) -> Path:
    """report.html in the only work directory, or in the nearest one above all of them."""
    if len(workdirs) == 1:
        return workdirs[0] / "report.html"
    return Path(os.path.commonpath([p.resolve() for p in workdirs])) / "report.html"


def tables(summaries: Sequence[Summary]) -> list[Table]:
    """One terminal table per world and temperature."""
    found: dict[tuple[str, float], Table] = {}
    for summary in summaries:
        key = (summary.world, summary.temperature)
        if key not in found:
            found[key] = table = Table(
                title=f"{key[0]}, agent at temperature {key[1]:g}",
                title_justify="left",
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                padding=(0, 1),
                collapse_padding=True,
            )
            table.add_column("row", no_wrap=True)
            for column in COLUMNS:
                table.add_column(column.short, justify="right", overflow="fold")
        texts = [cell(summary.values.get(c.key), c.kind) for c in COLUMNS]
        cells = [f"{mean}\n{both}" if both else mean for mean, both in texts]
        found[key].add_row(summary.row, *cells)
    return list(found.values())


def print_tables(runs: Sequence[Run], console: Console) -> None:
    """Prints the tables, or says that the evaluation has not been run."""
    shown = tables(summarise(runs))
    for table in shown:
        console.print(table)
    if not shown:
        console.print("no results.json yet: the page shows the training curves only")


def main(_: Sequence[str]) -> None:
    """Reads ``--workdir``, prints, writes."""
    workdirs, given = flags.FLAGS.workdir, flags.FLAGS.out
    out = Path(given) if given else default_out([Path(w) for w in workdirs])
    runs = write_report(workdirs, out)
    # Outside a terminal (a log file, a pipe) rich would squeeze the table into 80 columns.
    width = None if sys.stdout.isatty() else 130
    print_tables(runs, Console(width=width))
    print(f"report: {out.resolve()}")


if __name__ == "__main__":
    flags.DEFINE_multi_string(
        "workdir",
        None,
        "Directory of a run: metrics.jsonl from train, results.json from evaluate. Repeat it for "
        "runs of other seeds: the tables then show mean and range.",
    )
    flags.DEFINE_string(
        "out",
        None,
        "Where the page goes. Default: report.html in the work directory, or in the directory that "
        "all work directories share.",
    )
    entry.run(main, ["workdir"], errors=(ReportError,))
