"""The report as one HTML page: no network, no script, light and dark; all text is escaped.

In: ``Run`` records. Out: the page's text. With several runs the tables hold mean and range, and
every run keeps its own curves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from agentspec.report_charts import PHASES, curve, is_number, timeline
from agentspec.report_data import (
    COLUMNS,
    Run,
    Spread,
    Summary,
    cell,
    mean_crossing,
    number,
    summarise,
)

# Metrics shown openly and their titles; all others are folded away.
CURVES = {
    "loss": "Loss",
    "reward": "Agent reward",
    "success": "Task success",
    "speculator_reward": "Speculator reward",
    "hit_at_1": "Hit@1",
    "entropy": "Entropy (nats)",
    "policy_entropy": "Policy entropy (nats)",
    "eval_hit_at_1": "Hit@1, held out",
    "eval_success": "Task success, held out",
    "parse_failure_frac": "Predictions that do not parse",
    "malformed_frac": "Malformed turns",
    "dropped_groups_frac": "Dropped groups",
    "logp_gap": "Log-prob gap (nats)",
    "logp_gap_mean": "Log-prob gap (nats)",
}
_NOT_CURVES = ("stage", "step", "phase", "time_s")


def render(runs: Sequence[Run]) -> str:
    """The whole page. ``runs`` holds at least one run."""
    summaries = summarise(runs)
    names = ", ".join(run.name for run in runs)
    body = [
        f"<h1>agentspec</h1><p class='sub'>{escape(names)}"
        + (f" · {len(runs)} runs: mean, and lowest to highest below it" if len(runs) > 1 else "")
        + "</p>",
        _tiles(summaries),
        _tables(summaries),
        _by_tool(summaries),
        _crossing(mean_crossing(runs)),
    ]
    if not summaries:
        body.append("<p class='note'>No results.json yet: the evaluation has not been run.</p>")
    for run in runs:
        parts = [_timeline(run), _curves(run), _settings(run)]
        if len(runs) == 1:
            body += parts
        elif any(parts):
            inside = "".join(parts)
            body.append(f"<details><summary>{escape(run.name)}</summary>{inside}</details>")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>agentspec · {escape(names)}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _tiles(summaries: Sequence[Summary]) -> str:
    """The last row of all worlds (or the first) at the first temperature, against ``sft``."""
    if not summaries:
        return ""
    temperature = summaries[0].temperature
    world = "all" if any(s.world == "all" for s in summaries) else summaries[0].world
    rows = [s for s in summaries if (s.world, s.temperature) == (world, temperature)]
    last = rows[-1]
    before = next((s for s in rows if s.row == "sft" and s is not last), None)
    tiles = []
    for key in ("success", "hit_at_1", "hit_over_agreement", "hidden_tool_frac"):
        column = next(c for c in COLUMNS if c.key == key)
        value = last.values.get(key)
        if value is None:
            continue
        change = ""
        if before is not None and key in before.values:
            change = f"{value.mean - before.values[key].mean:+.2f} against sft"
        tiles.append((column.title, number(value.mean, column.kind), change))
    serial, speculated = last.values.get("serial_s"), last.values.get("speculated_s")
    if serial and speculated and serial.mean > 0:
        saved = 1 - speculated.mean / serial.mean
        tiles.append(
            ("Episode time", f"{speculated.mean:.2f} s", f"{-saved:+.0%} of {serial.mean:.2f} s")
        )
    cards = "".join(
        f"<div class='tile'><span>{escape(title)}</span><b>{escape(value)}</b>"
        f"<small>{escape(change) or '&nbsp;'}</small></div>"
        for title, value, change in tiles
    )
    caption = f"Row {last.row}, world {world}, agent at temperature {temperature:g}"
    return f"<p class='caption'>{escape(caption)}</p><div class='tiles'>{cards}</div>"


def _tables(summaries: Sequence[Summary]) -> str:
    if not summaries:
        return ""
    head = "".join(
        f"<th title='{escape(c.meaning)}'>{escape(c.title)}"
        + (f" <small>{c.kind}</small>" if c.kind != "frac" else "")
        + "</th>"
        for c in COLUMNS
    )
    rows, group = [], None
    for s in summaries:
        if (s.world, s.temperature) != group:
            group = (s.world, s.temperature)
            title = f"{s.world} · agent at temperature {s.temperature:g}"
            if s.n_tasks is not None:
                title += f" · {s.n_tasks} tasks"
            rows.append(
                f"<tr class='group'><th colspan='{len(COLUMNS) + 1}'>{escape(title)}</th></tr>"
            )
        cells = "".join(f"<td>{_cell(s.values.get(c.key), c.kind)}</td>" for c in COLUMNS)
        rows.append(f"<tr><th>{escape(s.row)}</th>{cells}</tr>")
    return (
        "<h2>Results</h2><div class='wide'><table><thead><tr><th></th>"
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _by_tool(summaries: Sequence[Summary]) -> str:
    parts = []
    for key in dict.fromkeys((s.world, s.temperature) for s in summaries):
        group = [s for s in summaries if (s.world, s.temperature) == key and s.by_tool]
        tools = list(dict.fromkeys(tool for s in group for tool in s.by_tool))
        if not tools:
            continue
        head = "".join(f"<th>{escape(tool)}</th>" for tool in tools)
        rows = "".join(
            f"<tr><th>{escape(s.row)}</th>" + "".join(_meter(s, tool) for tool in tools) + "</tr>"
            for s in group
        )
        title = escape(f"{key[0]} · agent at temperature {key[1]:g}")
        parts.append(
            f"<div class='wide'><table class='tools'><thead><tr class='group'><th>{title}</th>"
            f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        )
    if not parts:
        return ""
    return (
        "<h2>Hit@1 by tool</h2><p class='note'>A greedy speculator bets on the agent's most likely "
        "call, so the share differs much between tools.</p><div class='pairs'>"
        + "".join(parts)
        + "</div>"
    )


def _cell(value: Spread | None, kind: str) -> str:
    mean, both = cell(value, kind)
    return f"{mean}<small>{both}</small>" if both else mean


def _meter(summary: Summary, tool: str) -> str:
    value = summary.by_tool.get(tool)
    if value is None:
        return "<td>–</td>"
    width = 100 * min(max(value.mean, 0.0), 1.0)
    return (
        f"<td><span class='meter'><i style='width:{width:.1f}%'></i></span> "
        f"{_cell(value, 'frac')}</td>"
    )


def _crossing(crossing: dict[str, Any]) -> str:
    if not crossing:
        return ""
    head = "".join(f"<th>{escape(str(s))}</th>" for s in crossing["speculators"])
    rows = []
    for agent, values in zip(crossing["agents"], crossing["hit_at_1"], strict=True):
        cells = "".join(
            "<td>–</td>"
            if v is None
            else f"<td style='--heat:{min(max(v, 0.0), 1.0):.3f}'>{v:.2f}</td>"
            for v in values
        )
        rows.append(f"<tr><th>{escape(str(agent))}</th>{cells}</tr>")
    return (
        "<h2>Agents crossed with speculators</h2><p class='note'>Hit@1 of each stage's speculator "
        "(columns) on each stage's agent (rows); the diagonal is self-speculation.</p>"
        f"<table class='heat'><thead><tr><th>agent \\ speculator</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _timeline(run: Run) -> str:
    lanes = run.results.get("timeline") or {}
    drawing = timeline(lanes.get("plain", []), lanes.get("speculated", []))
    if not drawing:
        return ""
    model = run.results.get("latency_model") or {}
    times = ", ".join(f"{k} = {v}" for k, v in model.items()) if isinstance(model, dict) else ""
    note = f" Times follow the latency model {times}." if times else ""
    keys = "".join(
        f"<span><i class='key {k}'></i>{text}</span>"
        for k, text in (
            ("generate", "agent generates"),
            ("tool", "tool runs after the turn"),
            ("wait", "agent waits"),
            ("speculate", "speculator predicts"),
            ("preexecute is-hit", "pre-executed, hit ✓"),
            ("preexecute is-miss", "pre-executed, not used ✗"),
        )
    )
    return (
        "<h2>One episode, without and with speculation</h2>"
        f"<p class='note'>Point at a bar for its call and times.{escape(note)}</p>"
        f"<p class='legend'>{keys}</p><div class='wide'>{drawing}</div>"
    )


def _curves(run: Run) -> str:
    if not run.metrics:
        return ""
    parts = [
        "<h2>Training</h2><p class='note'>By step of each stage. Thin: as logged (averaged in "
        "bins where there are many steps); thick: mean over 7 points.</p>"
    ]
    for stage, records in run.metrics.items():
        keys = list(dict.fromkeys(k for r in records for k in r if is_number(r[k])))
        known = [k for k in CURVES if k in keys]
        other = [k for k in keys if k not in CURVES and k not in _NOT_CURVES]
        phases = [p for p in PHASES if any(r.get("phase") == p for r in records)]
        legend = "".join(f"<span><i class='key {p}'></i>{p}</span>" for p in phases)
        parts.append(
            f"<section><h3>{escape(stage)} <small>{len(records)} steps</small></h3>"
            f"<p class='legend'>{legend}</p>{_figures(records, known)}"
        )
        if other:
            parts.append(
                f"<details><summary>{len(other)} more</summary>{_figures(records, other)}</details>"
            )
        parts.append("</section>")
    return "".join(parts)


def _figures(records: Sequence[dict[str, Any]], keys: Sequence[str]) -> str:
    drawings = [(key, curve(records, key)) for key in keys]
    figures = "".join(
        f"<figure><figcaption>{escape(CURVES.get(key, key))}</figcaption>{drawing}</figure>"
        for key, drawing in drawings
        if drawing
    )
    return f"<div class='curves'>{figures}</div>"


def _settings(run: Run) -> str:
    if not run.config:
        return ""
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in sorted(run.config.items()))
    return f"<details><summary>Config</summary><pre>{escape(text)}</pre></details>"


STYLE = """
:root{color-scheme:light dark;--paper:#fbfbf9;--card:#fff;--ink:#1d2327;--dim:#667079;
--line:#dfe2e0;--agent:#2f6fb2;--spec:#c9771b;--sft:#6d7f8a;--hit:#1d8a5b;--bad:#b9473c}
@media(prefers-color-scheme:dark){:root{--paper:#14171a;--card:#1c2024;--ink:#e7eaec;--dim:#98a2aa;
--line:#31373c;--agent:#6ba6e6;--spec:#e8a352;--sft:#8fa2ae;--hit:#4fc28f;--bad:#e5796e}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:14px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:22px;margin:0}h2{font-size:17px;margin:34px 0 6px}h3{font-size:14px;margin:18px 0 2px}
h3 small,th small,td small{color:var(--dim);font-weight:400}
td small{display:block;font-size:11px}
.sub,.note,.caption{color:var(--dim);margin:2px 0 10px;overflow-wrap:anywhere}
.caption{margin:18px 0 6px}
.tiles{display:flex;flex-wrap:wrap;gap:10px}
.tile{flex:1 1 150px;background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:10px 14px;display:flex;flex-direction:column}
.tile span,.tile small{color:var(--dim);font-size:12px}
.tile b{font-size:24px;font-weight:600;line-height:1.3}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;background:var(--card);
border:1px solid var(--line);margin-bottom:12px}
.wide>table{width:100%}
th,td{padding:5px 10px;text-align:right;border-top:1px solid var(--line);white-space:nowrap}
thead th{white-space:normal;vertical-align:bottom;font-size:12px;color:var(--dim);font-weight:600}
th:first-child{text-align:left;font-weight:600}
.group th{text-align:left;color:var(--dim);font-size:12px;padding-top:12px}
.tools .group th:not(:first-child){text-align:right}
.meter{display:inline-block;width:56px;height:7px;border-radius:4px;background:var(--line);
overflow:hidden;vertical-align:middle}
.meter i{display:block;height:100%;background:var(--agent)}
.pairs{display:grid;grid-template-columns:repeat(auto-fill,minmax(440px,1fr));gap:0 12px}
.heat th:not(:first-child){text-align:center}
.heat td{text-align:center;min-width:86px;padding:12px;
background:color-mix(in srgb,var(--agent) calc(var(--heat,0)*62%),var(--card))}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:4px 0 8px;color:var(--dim);font-size:12px}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:5px;
vertical-align:-1px;background:var(--sft)}
.key.agent,.key.generate{background:var(--agent)}.key.speculator,.key.speculate{background:var(--spec)}
.key.tool{background:var(--sft)}.key.wait{background:none;border:1px dashed var(--dim)}
.key.is-hit{background:var(--hit)}.key.is-miss{background:none;border:1px solid var(--bad)}
.key.agent,.key.speculator,.key.sft,.key.pretrain{opacity:.45}
.curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:10px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px}
figcaption{font-size:12px;font-weight:600;padding-left:4px;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto}
.timeline{min-width:760px;background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:8px}
svg text{font:10px system-ui,sans-serif;fill:var(--ink)}
svg .axis{fill:var(--dim)}svg .lane{font-size:12px;font-weight:600}
svg .total{font-size:12px;font-weight:600}
.grid{stroke:var(--line);stroke-width:1}
.band{fill:var(--sft);opacity:.08}.band.agent{fill:var(--agent);opacity:.13}
.band.speculator{fill:var(--spec);opacity:.13}
.curve{fill:none;stroke:var(--ink);stroke-width:1.8;stroke-linejoin:round}
.raw{fill:none;stroke:var(--ink);stroke-width:.8;opacity:.3}
.dot{fill:var(--ink)}
.hover rect{fill:transparent}.hover circle{fill:var(--ink);opacity:0}.hover:hover circle{opacity:1}
.bar rect{fill:var(--sft)}.bar text{fill:#fff;pointer-events:none}
.bar.generate rect{fill:var(--agent)}.bar.speculate rect{fill:var(--spec)}
.bar.wait rect{fill:none;stroke:var(--dim);stroke-dasharray:3 2}.bar.wait text{fill:var(--dim)}
.bar.preexecute rect{fill:none;stroke:var(--dim)}.bar.preexecute text{fill:var(--ink)}
.bar.is-hit rect{fill:var(--hit);stroke:none}.bar.is-hit text{fill:#fff}
.bar.is-miss rect,.bar.is-failed rect,.bar.is-stale rect{stroke:var(--bad)}
.bar:hover rect{opacity:.75}
@media(prefers-color-scheme:dark){.bar text,.bar.is-hit text{fill:#10161a}}
details{margin:10px 0}summary{cursor:pointer;color:var(--dim)}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;
overflow:auto}
"""
