"""The report: reading and its errors, means over runs, drawings, escaping, the command itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentspec import report, report_charts, report_data

ROOT = Path(__file__).resolve().parents[2]
EVIL = "<script>alert(\"x\")</script> & 'y'"


def row(name: str, temperature: float = 1.0, world: str = "lookup", **values):
    return {"row": name, "world": world, "temperature": temperature, **values}


def event(kind: str, start_s: float, end_s: float, **more):
    return {"kind": kind, "turn": 0, "start_s": start_s, "end_s": end_s, **more}


def write(workdir: Path, metrics: str | None = None, results=None) -> Path:
    workdir.mkdir(parents=True, exist_ok=True)
    if metrics is not None:
        (workdir / "metrics.jsonl").write_text(metrics)
    if results is not None:
        text = results if isinstance(results, str) else json.dumps(results)
        (workdir / "results.json").write_text(text)
    return workdir


def full_results(hit: float = 0.5, success: float = 0.4):
    return {
        "config": "tiny",
        "rows_other_temperatures": [row("joint", 0.0, success=success, hit_at_1=hit)],
        "rows": [
            row("joint", success=success, hit_at_1=hit, serial_s=4.0, speculated_s=3.0,
                hit_at_1_by_tool={"read": 0.75, EVIL: 0.25, "note": None}),
            row("sft", success=0.3, hit_at_1=0.25, entropy=0.1234, parse_failure_frac=None),
            row("base", success=0.2, hit_at_1=0.0),
        ],
        "crossing": {
            "agents": ["base", "sft", EVIL],
            "speculators": ["base", "sft", "joint"],
            "hit_at_1": [[0.0, 0.1, 0.2], [0.0, hit, 0.4], [None, 0.5, 1.0]],
        },
        "latency_model": {"token_s": 0.02},
        "timeline": {
            "plain": [event("generate", 0, 1, label=EVIL), event("tool", 1, 3)],
            "speculated": [
                event("generate", 0, 1),
                event("speculate", 0, 0.25),
                event("preexecute", 0.25, 2.25, status="hit", label="read"),
                event("preexecute", 0.5, 1.5, status="miss"),
                event("wait", 1, 2.25),
            ],
        },
    }  # fmt: skip


METRICS = "".join(
    json.dumps({"stage": stage, "step": step, "phase": phase, "time_s": 0.1, **values}) + "\n"
    for stage, step, phase, values in [
        ("joint", 0, "agent", {"reward": 0.5, "loss": 0.1}),
        ("joint", 1, "speculator", {"speculator_reward": 0.25, "loss": float("nan")}),
        ("base", 0, "pretrain", {"loss": 2.0, "odd<metric>": 1}),
        ("base", 1, "pretrain", {"loss": 1.0}),
    ]
)


class Page(HTMLParser):
    """Tags that open and close, table rows as text, and everything a browser would load."""

    VOID = {"meta", "br", "rect", "line", "circle", "polyline"}

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "data")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.rows and self.rows[-1] and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def page(*workdirs: Path) -> tuple[str, Page]:
    report.write_report(workdirs)
    text = report.default_out(list(workdirs)).read_text()
    return text, Page(text)


def test_page_is_whole_offline_and_escaped(tmp_path):
    workdir = write(tmp_path / "run", METRICS, full_results())
    (workdir / "config.json").write_text(json.dumps({"chat.suffix": EVIL, "seed": 3}))
    text, parsed = page(workdir)
    assert "\nseed = 3</pre>" in text
    assert "script" not in parsed.tags
    assert parsed.links == [] and "url(" not in text and "@import" not in text
    assert not re.search(r"https?://", text)
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert "odd<metric>" not in text
    assert parsed.tags.count("svg") == 1 + 2 + 3  # timeline; base: loss, odd; joint: three metrics


def test_table_rows_are_in_order_with_their_values(tmp_path):
    _, parsed = page(write(tmp_path / "run", None, full_results()))
    rows = [r for r in parsed.rows if len(r) == 11]
    assert [r[0] for r in rows] == ["", "base", "sft", "joint", "joint"]
    assert rows[2] == ["sft", "0.30", "0.25", "–", "–", "–", "–", "0.123", "–", "–", "–"]
    assert rows[3][1:3] == ["0.40", "0.50"]
    assert rows[3][8:10] == ["4.00", "3.00"]
    titles = [r[0] for r in parsed.rows if len(r) == 1]
    assert titles == ["lookup · agent at temperature 1", "lookup · agent at temperature 0"]


def test_tools_and_crossing(tmp_path):
    text, parsed = page(write(tmp_path / "run", None, full_results()))
    assert ["joint", " 0.75", " 0.25"] in parsed.rows  # note has no calls: no column
    assert ["sft", "0.00", "0.50", "0.40"] in parsed.rows
    assert [EVIL, "–", "0.50", "1.00"] in parsed.rows
    assert "--heat:1.000" in text
    assert "-25% of 4.00 s" in text  # 3.0 s against 4.0 s
    assert "+0.25 against sft" in text  # Hit@1 0.50 against 0.25


def test_unfinished_run_renders_what_is_there(tmp_path):
    text, parsed = page(write(tmp_path / "run", METRICS + '{"stage": "joint", "st'))
    assert "the evaluation has not been run" in text
    assert "<h3>base <small>2 steps" in text and "<h3>joint <small>2 steps" in text
    assert text.index("<h3>base") < text.index("<h3>joint")
    assert parsed.tags.count("table") == 0


def test_resumed_steps_are_merged_last_one_wins(tmp_path):
    lines = [
        {"stage": "sft", "step": 1, "loss": 5.0},
        {"stage": "sft", "step": 0, "loss": 6.0},
        {"stage": "sft", "step": 1, "loss": 4.0, "hit_at_1": 0.5},
    ]
    run = report_data.read_run(
        write(tmp_path / "run", "".join(json.dumps(line) + "\n" for line in lines))
    )
    assert [r["loss"] for r in run.metrics["sft"]] == [6.0, 4.0]
    assert run.metrics["sft"][1]["hit_at_1"] == 0.5


GOOD = '{"stage": "sft", "step": 0}\n'


@pytest.mark.parametrize(
    ("metrics", "results", "message"),
    [
        (GOOD + "{oops}\n" + GOOD, None, "metrics.jsonl:2: not JSON"),
        (GOOD + "\n[1]\n", None, "metrics.jsonl:3: got [1], an object is wanted"),
        ('{"step": 0}\n', None, "metrics.jsonl:1: stage is null, a string is wanted"),
        ('{"stage": "sft", "step": true}\n', None, "step is true, a whole number is wanted"),
        (None, '{"rows": [\n  {"row": }\n]}', "results.json:2: not JSON"),
        (None, [1], "results.json: the file is [1], an object is wanted"),
        (None, {"rows": {}}, "results.json: rows is {}, a list is wanted"),
        (None, {"rows": [row("sft"), {"row": "a"}]}, "rows[1].world is null"),
        (None, {"rows": [row("sft", hit_at_1="high")]}, 'rows[0].hit_at_1 is "high"'),
        (None, {"rows": [row("sft", hit_at_1_by_tool={"t": "x"})]}, "hit_at_1_by_tool.t is"),
        (
            None,
            {"crossing": {"agents": ["a"], "speculators": ["b", "c"], "hit_at_1": [[1.0]]}},
            "crossing.hit_at_1 must hold 1 rows (agents) of 2 numbers",
        ),
        (None, {"timeline": {"plain": [event("tool", 2, 1)]}}, "timeline.plain[0] ends at 1 s"),
        (None, {"timeline": {"speculated": [{}]}}, "timeline.speculated[0].kind is null"),
        (None, None, "holds neither metrics.jsonl nor results.json"),
    ],
)
def test_errors_name_file_and_line_or_key(tmp_path, metrics, results, message):
    workdir = write(tmp_path / "run", metrics, results)
    with pytest.raises(report_data.ReportError, match=re.escape(message)) as caught:
        report.write_report([workdir])
    assert str(workdir) in str(caught.value)
    assert not (workdir / "report.html").exists()


def test_text_that_is_not_utf8_names_the_line(tmp_path):
    workdir = write(tmp_path / "run", GOOD)
    (workdir / "metrics.jsonl").write_bytes(GOOD.encode() + b'{"a": "\xff"}\n')
    with pytest.raises(report_data.ReportError, match=r"metrics\.jsonl:2: not UTF-8"):
        report_data.read_run(workdir)


def test_several_runs_give_mean_and_range_and_keep_their_curves_apart(tmp_path):
    dirs = [
        write(tmp_path / f"seed_{i}", METRICS, full_results(hit, success))
        for i, (hit, success) in enumerate([(0.5, 0.4), (0.75, 0.4), (0.25, 0.1)])
    ]
    text, parsed = page(*dirs)
    joint = next(r for r in parsed.rows if r[0] == "joint" and len(r) == 11)
    assert joint[1] == "0.300.10–0.40"  # (0.4 + 0.4 + 0.1) / 3
    assert joint[2] == "0.500.25–0.75"
    assert ["sft", "0.00", "0.50", "0.40"] in parsed.rows  # crossing: mean of .5, .75, .25
    assert text.count("<h2>Training</h2>") == 3
    assert (tmp_path / "report.html").exists()


def test_a_row_that_one_run_lacks_is_the_mean_of_the_others():
    runs = [
        report_data.Run("a", {}, {"rows": [row("joint", hit_at_1=0.2), row("sft", hit_at_1=0.1)]}),
        report_data.Run("b", {}, {"rows": [row("joint", hit_at_1=float("nan"))]}),
    ]
    sft, joint = report_data.summarise(runs)
    assert (sft.row, joint.row) == ("sft", "joint")
    assert joint.values["hit_at_1"] == report_data.Spread(0.2, 0.2, 0.2, 1)


def test_crossings_with_other_labels_are_not_averaged():
    table = {"agents": ["a"], "speculators": ["b"], "hit_at_1": [[0.5]]}
    other = table | {"agents": ["c"]}
    runs = [report_data.Run(n, {}, {"crossing": t}) for n, t in (("x", table), ("y", other))]
    assert report_data.mean_crossing(runs) == {}
    assert report_data.mean_crossing(runs[:1])["hit_at_1"] == [[0.5]]


def test_phase_bands_and_running_mean():
    phases = ["agent"] * 2 + ["speculator"] * 3 + ["agent"]
    records = [{"step": i, "phase": p} for i, p in enumerate(phases)]
    assert report_charts.bands(records) == [
        ("agent", 0, 1),
        ("speculator", 2, 4),
        ("agent", 5, 5),
    ]
    # window 3: (0+3)/2, (0+3+6)/3, (3+6)/2
    assert report_charts.running_mean([0.0, 3.0, 6.0], window=3) == [1.5, 3.0, 4.5]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.5, 1.0]),
        (0.03, 0.17, [0.0, 0.05, 0.1, 0.15, 0.2]),
        (-1.0, 7.0, [-2.0, 0.0, 2.0, 4.0, 6.0, 8.0]),
        (5.0, 5.0, [4.5, 5.0, 5.5]),
        (1e-14, 4e-14, [1e-14, 2e-14, 3e-14, 4e-14]),
        (0.0, 0.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_axis_ticks_are_round_and_enclose_the_values(low, high, expected):
    ticks = report_charts.nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high
    assert ticks == pytest.approx(expected, rel=1e-9, abs=0)


def test_bars_of_one_track_do_not_overlap_and_the_agent_comes_first():
    events = full_results()["timeline"]["speculated"]
    tracks = report_charts.lane_tracks(events)
    assert [[e["kind"] for e in track] for track in tracks] == [
        ["generate", "wait"],
        ["speculate", "preexecute"],
        ["preexecute"],
    ]


def test_both_lanes_share_one_time_axis():
    lanes = full_results()["timeline"]
    svg = report_charts.timeline(lanes["plain"], lanes["speculated"])
    # 3 s over 960 - 108 - 70 = 782 units: generate (1 s) is 260.7 wide in both lanes.
    assert svg.count('width="260.7"') == 2 + 1  # and the missed pre-execution, 1 s as well
    assert ">3.00 s<" in svg and ">2.25 s<" in svg


def test_long_curves_are_averaged_down_and_gaps_left_out():
    records = [{"step": i, "phase": "sft", "loss": float(i)} for i in range(1000)]
    svg = report_charts.curve(records, "loss")
    assert svg.count("<title>") == 100
    assert "step 4.5, sft: 4.5" in svg  # mean of steps 0 to 9
    assert report_charts.curve([{"step": 0, "loss": float("nan")}], "loss") == ""
    assert report_charts.curve([{"step": 0, "loss": True}], "loss") == ""


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentspec.report", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_command_prints_the_table_and_where_the_page_is(tmp_path):
    workdir = write(tmp_path / "run", METRICS, full_results())
    done = command(f"--workdir={workdir}", f"--out={tmp_path}/new/page.html")
    assert done.returncode == 0, done.stderr
    assert "lookup, agent at temperature 1" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.strip().startswith("sft"))
    assert line.split() == ["sft", "0.30", "0.25", "–", "–", "–", "–", "0.123", "–", "–", "–"]
    assert f"report: {tmp_path}/new/page.html" in done.stdout
    assert (tmp_path / "new" / "page.html").exists()


def test_command_fails_with_one_line(tmp_path):
    workdir = write(tmp_path / "run", "{oops}\n")
    done = command(f"--workdir={workdir}")
    assert done.returncode == 1
    assert done.stderr.strip().startswith(f"error: {workdir}/metrics.jsonl:1: not JSON")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "--workdir" in command("--help").stdout
