"""Drawings of the report as inline SVG: training curves and the timeline of an episode.

In: plain numbers and records. Out: SVG text whose colours are classes of ``report_page.STYLE``, so
that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

PHASES = ("agent", "speculator", "sft", "pretrain")
MAX_POINTS = 100  # per curve; more are averaged in bins
_W, _H = 320, 150  # one curve
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 8, 22
_BAR, _GAP = 20, 4  # one track of the timeline
_AGENT_KINDS = ("generate", "tool", "wait")


def curve(records: Sequence[dict[str, Any]], key: str) -> str:
    """One metric against the step, phases as bands behind it; "" where it has no finite value."""
    points = _points(records, key)
    if not points:
        return ""
    steps = [int(record["step"]) for record in records]
    low_x, high_x = min(steps), max(max(steps), min(steps) + 1)
    ticks = nice_ticks(min(v for _, v, _ in points), max(v for _, v, _ in points))
    low_y, high_y = ticks[0], ticks[-1]

    def x(step: float) -> float:
        return _LEFT + (step - low_x) / (high_x - low_x) * (_W - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high_y - value) / (high_y - low_y) * (_H - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_W} {_H}" role="img" aria-label="{escape(key)} by step">']
    for phase, first, last in bands(records):
        left, right = x(max(first - 0.5, low_x)), x(min(last + 0.5, high_x))
        parts.append(
            f'<rect class="band {_class(phase, PHASES)}" x="{left:.1f}" y="{_TOP}" '
            f'width="{right - left:.1f}" height="{_H - _TOP - _BOTTOM}"/>'
        )
    for tick in ticks:
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_W - _RIGHT}" y1="{y(tick):.1f}" '
            f'y2="{y(tick):.1f}"/><text class="axis" x="{_LEFT - 5}" y="{y(tick) + 3.5:.1f}" '
            f'text-anchor="end">{tick:.4g}</text>'
        )
    for end, anchor in ((low_x, "start"), (high_x, "end")):
        parts.append(
            f'<text class="axis" x="{x(end):.1f}" y="{_H - 6}" text-anchor="{anchor}">{end}</text>'
        )
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value, _ in points)
    smooth = running_mean([value for _, value, _ in points])
    if len(points) > 8:
        parts.append(f'<polyline class="raw" points="{path}"/>')
        path = " ".join(f"{x(p[0]):.1f},{y(v):.1f}" for p, v in zip(points, smooth, strict=True))
    if len(points) == 1:
        parts.append(
            f'<circle class="dot" cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="3"/>'
        )
    parts.append(f'<polyline class="curve" points="{path}"/>')
    half = (_W - _LEFT - _RIGHT) / (2 * max(len(points), 2))
    for step, value, phase in points:
        title = f"step {step:g}{', ' + phase if phase else ''}: {value:.4g}"
        parts.append(
            f'<g class="hover"><rect x="{x(step) - half:.1f}" y="{_TOP}" width="{2 * half:.1f}" '
            f'height="{_H - _TOP - _BOTTOM}"/><circle cx="{x(step):.1f}" cy="{y(value):.1f}" '
            f'r="3"/><title>{escape(title)}</title></g>'
        )
    return "".join([*parts, "</svg>"])


def _points(records: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float, str]]:
    """(step, value, phase) of the finite values, averaged in bins when there are many."""
    found = [
        (float(r["step"]), float(r[key]), str(r.get("phase") or ""))
        for r in records
        if is_number(r.get(key)) and math.isfinite(r[key])
    ]
    size = math.ceil(len(found) / MAX_POINTS)
    if size <= 1:
        return found
    bins = [found[i : i + size] for i in range(0, len(found), size)]
    return [
        (
            math.fsum(p[0] for p in part) / len(part),
            math.fsum(p[1] for p in part) / len(part),
            part[0][2] if len({p[2] for p in part}) == 1 else "",
        )
        for part in bins
    ]


def is_number(value: object) -> bool:
    """Whether a metric's value can be drawn: an int or float, no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def bands(records: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """(phase, first step, last step) of each run of steps with one phase."""
    found: list[tuple[str, int, int]] = []
    for record in records:
        phase, step = str(record.get("phase") or ""), int(record["step"])
        if found and found[-1][0] == phase:
            found[-1] = (phase, found[-1][1], step)
        else:
            found.append((phase, step, step))
    return found


def running_mean(values: Sequence[float], window: int = 7) -> list[float]:
    """Centred mean over ``window`` values, fewer at the ends."""
    half = window // 2
    return [
        math.fsum(part) / len(part)
        for part in (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    ]


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round axis values (steps of 1, 2 or 5 times a power of ten) that enclose [low, high]."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-12):
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [float(f"{i * size:.12g}") for i in range(first, last + 1)]


def timeline(plain: Sequence[dict[str, Any]], speculated: Sequence[dict[str, Any]]) -> str:
    """One episode twice on one time axis: without speculation above, with it below."""
    width, left = 960, 108
    events = [*plain, *speculated]
    start = min((e["start_s"] for e in events), default=0.0)
    end = max((e["end_s"] for e in events), default=0.0)
    if end <= start:
        return ""
    ticks = [t for t in nice_ticks(0.0, end - start, 8) if t <= (end - start) * 1.001]

    def x(time_s: float) -> float:
        return left + (time_s - start) / (end - start) * (width - left - 70)

    parts, y = [], 18.0
    for name, lane in (("without", plain), ("with", speculated)):
        tracks = lane_tracks(lane)
        if not tracks:
            continue
        parts.append(f'<text class="lane" x="0" y="{y + 14:.0f}">{name}</text>')
        parts.append(f'<text class="lane" x="0" y="{y + 29:.0f}">speculation</text>')
        own = [e["end_s"] for e in lane if e["kind"] not in ("speculate", "preexecute")]
        done = max(own, default=start)  # a prediction may outlive the episode; nobody waits for it
        parts.append(
            f'<text class="total" x="{x(done) + 6:.1f}" y="{y + 14:.0f}">'
            f"{done - start:.2f} s</text>"
        )
        for number, track in enumerate(tracks):
            parts += [_bar(event, x, y + number * (_BAR + _GAP)) for event in track]
        y += max(len(tracks) * (_BAR + _GAP), 34)
        y += 14
    axis = []
    for tick in ticks:
        axis.append(
            f'<line class="grid" x1="{x(start + tick):.1f}" x2="{x(start + tick):.1f}" y1="12" '
            f'y2="{y - 8:.0f}"/><text class="axis" x="{x(start + tick):.1f}" y="{y + 6:.0f}" '
            f'text-anchor="middle">{tick:g} s</text>'
        )
    return (
        f'<svg class="timeline" viewBox="0 0 {width} {y + 14:.0f}" role="img" '
        'aria-label="one episode without and with speculation">' + "".join(axis + parts) + "</svg>"
    )


def lane_tracks(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Tracks of one lane, no two bars of a track overlapping; the agent's own come first."""
    tracks: list[list[dict[str, Any]]] = []
    for own in (True, False):
        first = len(tracks)
        chosen = [e for e in events if (e["kind"] in _AGENT_KINDS) == own]
        for event in sorted(chosen, key=lambda e: (e["start_s"], e["end_s"])):
            for track in tracks[first:]:
                if event["start_s"] >= track[-1]["end_s"] - 1e-9:
                    track.append(event)
                    break
            else:
                tracks.append([event])
    return tracks


_MARKS = {"hit": "✓", "miss": "✗", "failed": "!", "stale": "!", "cancelled": "–"}


def _bar(event: dict[str, Any], x: Any, y: float) -> str:
    left, right = x(event["start_s"]), x(event["end_s"])
    width = max(right - left, 1.5)
    label, status = str(event.get("label") or ""), str(event.get("status") or "")
    kind = event["kind"]
    title = f"turn {event['turn']:g} · {kind}{' · ' + status if status else ''}"
    title += f"\n{event['start_s']:.3f} to {event['end_s']:.3f} s"
    title += f" ({event['end_s'] - event['start_s']:.3f} s)"
    if label:
        title += f"\n{label}"
    text = " ".join(t for t in (_MARKS.get(status, ""), label or kind) if t)
    room = int((width - 6) / 5.6)
    if len(text) > room:
        text = text[: room - 1] + "…" if room > 3 else text[:1] if status and room >= 1 else ""
    style = _class(kind, (*_AGENT_KINDS, "speculate", "preexecute"))
    if status:
        style += f" is-{_class(status, tuple(_MARKS))}"
    return (
        f'<g class="bar {style}"><rect x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{_BAR}" rx="3"/><text x="{left + 4:.1f}" y="{y + 14:.1f}">{escape(text)}</text>'
        f"<title>{escape(title)}</title></g>"
    )


def _class(name: str, known: Sequence[str]) -> str:
    """A CSS class: only names that we know, never text of a file."""
    return name if name in known else "other"
