"""What speculation saved, hid and wasted, by the clock ("Speculate while you reason", latency).

In: finished trajectories with their events. Out: ``time_account``.

Statuses of ``speculate`` events, one per candidate and labelled by its rank: hit, failed, stale
(its call ran ahead and matched), late (it matched and might have run, but had not started when the
agent's call was known), match (the tool may not run ahead), miss, none (no call), repeat (an
earlier candidate has the same call); ``error`` when the speculator itself failed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentspec.types import Event, Trajectory


def time_account(
    trajectories: Sequence[Trajectory], plain: Sequence[Trajectory] | None = None
) -> dict[str, float]:
    """Times, hits and waste of episodes with speculation on; seconds, counts and shares.

    ``plain`` are the same episodes with speculation off, in the same order: then ``serial_s`` is
    their time; without them it is what these episodes would have taken with every call run after
    its turn. Shares of nothing are NaN. Tokens of a prediction that was cancelled half-way are not
    known and not counted.
    """
    speculated = [t.total_s for t in trajectories]
    if plain is None:
        serial = [serial_s(t) for t in trajectories]
        tool_s = sum(turn.tool_s for t in trajectories for turn in t.turns)
    else:
        if [t.task_id for t in plain] != [t.task_id for t in trajectories]:
            raise ValueError("the plain and the speculated episodes are not of the same tasks")
        serial = [t.total_s for t in plain]
        tool_s = sum(turn.tool_s for t in plain for turn in t.turns)
    hidden_s = sum(turn.hidden_s for t in trajectories for turn in t.turns)
    hits = [hit for t in trajectories for turn in t.turns for hit in turn.hits]
    statuses = [e.status for t in trajectories for e in t.events if e.kind == "preexecute"]
    guesses = [e.status for t in trajectories for e in t.events if e.kind == "speculate"]
    ready = sum(guesses.count(status) for status in ("hit", "failed", "stale"))
    wasted = [wasted_tokens(t) for t in trajectories]
    return {
        "episodes": float(len(trajectories)),
        "serial_s": sum(serial),
        "speculated_s": sum(speculated),
        "saved_frac": _ratio(sum(serial) - sum(speculated), sum(serial)),
        "tool_s": tool_s,
        "tool_frac": _ratio(tool_s, sum(serial)),
        "hidden_s": hidden_s,
        "hidden_frac": _ratio(hidden_s, tool_s),
        "hit_rate": _ratio(sum(hits), len(hits)),
        "ready_share": _ratio(ready, ready + guesses.count("late")),
        "preexecuted_calls": float(len(statuses)),
        "wasted_calls": float(len(statuses) - statuses.count("hit")),
        "speculated_tokens": float(
            sum(len(c.ids) for t in trajectories for turn in t.turns for c in turn.candidates)
        ),
        "wasted_tokens": float(sum(wasted)),
        "speculator_errors": float(guesses.count("error")),
        "serial_s_mean": _mean(serial),
        "serial_s_p99": _p99(serial),
        "speculated_s_mean": _mean(speculated),
        "speculated_s_p99": _p99(speculated),
    }


def serial_s(trajectory: Trajectory) -> float:
    """Seconds of the episode had each turn's calls run after the turn, at this run's generation."""
    waited = sum(e.end_s - e.start_s for e in trajectory.events if e.kind == "wait")
    return trajectory.total_s - waited + sum(turn.tool_s for turn in trajectory.turns)


def wasted_tokens(trajectory: Trajectory) -> int:
    """Sampled tokens of candidates whose call was not served from a pre-execution."""
    useful = {(e.turn, e.label) for e in trajectory.events if _served(e)}
    return sum(
        len(candidate.ids)
        for index, turn in enumerate(trajectory.turns)
        for rank, candidate in enumerate(turn.candidates)
        if (index, str(rank)) not in useful
    )


def _served(event: Event) -> bool:
    return event.kind == "speculate" and event.status == "hit"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _mean(values: Sequence[float]) -> float:
    return _ratio(sum(values), len(values))


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(np.asarray(values), 99)) if values else float("nan")
