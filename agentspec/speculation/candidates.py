"""Predictions of the agent's next call, and how often they come true.

In: completions of a speculator, or finished trajectories whose turns hold candidates. Out:
``Candidate`` records and the hit metrics of "Speculate while you reason"; every comparison is
``rewards.calls.same_call``. A turn without candidates is one at which the speculator was not asked,
and counts nowhere (a speculator that failed leaves a candidate with a problem).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from agentspec.rewards.calls import same_call
from agentspec.types import Candidate, Completion, ParsedTurn, ToolCall, ToolSpec, Trajectory, Turn

Specs = Mapping[str, ToolSpec] | Sequence[ToolSpec]


class Speculator(Protocol):
    """Predicts the agent's next call from its present prefix."""

    async def propose(self, seq: Any, turn_index: int, seed: int) -> list[Candidate]:
        """The candidates, best first, ``ready_s`` on the loop's clock; [] when not asked.

        An abstention is a candidate without call and problem. ``seq`` is the agent's own handle:
        fork or read it before the first ``await``, and never change it.
        """
        ...


@runtime_checkable
class StreamingSpeculator(Protocol):
    """A speculator whose first candidates can be used before the last are there."""

    def stream(self, seq: Any, turn_index: int, seed: int) -> AsyncGenerator[Candidate, None]:
        """The candidates of ``propose`` in their order, each as soon as it is complete."""
        ...


def candidate_from(completion: Completion, parsed: ParsedTurn, ready_s: float = 0.0) -> Candidate:
    """The prediction that a completion makes: its first call.

    No call and no problem is an abstention; a completion cut before any call has a problem.
    """
    problems = tuple(parsed.problems)
    if not parsed.calls and completion.finish != "stop" and not problems:
        problems = ("cut",)
    call = parsed.calls[0] if parsed.calls else None
    return Candidate(tuple(completion.ids), tuple(completion.logps), call, problems, ready_s)


def by_name(specs: Specs) -> dict[str, ToolSpec]:
    """The tools by name."""
    return dict(specs) if isinstance(specs, Mapping) else {spec.name: spec for spec in specs}


def matches(candidate: Candidate | None, call: ToolCall, specs: Mapping[str, ToolSpec]) -> bool:
    """Whether the candidate predicts exactly this call."""
    if candidate is None or candidate.call is None:
        return False
    return same_call(candidate.call, call, specs.get(call.name))


def hit_at_1(
    trajectories: Iterable[Trajectory],
    specs: Specs,
    *,
    k: int = 1,
    read_only: bool = False,
    skip_first_turn: bool = False,
    tool: str | None = None,
) -> float:
    """Share of tool-calling turns whose first call the first ``k`` candidates hold; NaN if no turn.

    ``read_only`` and ``tool`` select turns by the call that the agent made.
    """
    tools = by_name(specs)
    turns = [
        turn
        for turn in _calling_turns(trajectories, skip_first_turn)
        if turn.candidates
        and (not read_only or _read_only(turn.calls[0], tools))
        and (tool is None or turn.calls[0].name == tool)
    ]
    return _mean([_hit(turn, tools, k) for turn in turns])


def hit_at_1_calls(trajectories: Iterable[Trajectory], specs: Specs) -> float:
    """Share of all calls predicted from the prefix that ends before them; NaN if none was asked."""
    tools = by_name(specs)
    return _mean(
        [
            matches(candidate, call, tools)
            for turn in _calling_turns(trajectories, False)
            if turn.call_candidates
            for candidate, call in zip(turn.call_candidates, turn.calls, strict=True)
        ]
    )


def self_agreement(trajectories: Iterable[Trajectory], specs: Specs) -> float:
    """How often an independent continuation makes the first call that the agent made; NaN if none.

    Over tool-calling turns with ``agreement_calls``. It is the ceiling of a speculator that
    samples. A greedy one bets on the likeliest call and may exceed it: its ceiling is the mean mass
    of the modal call, which is never below the agreement.
    """
    tools = by_name(specs)
    return _mean(
        [
            _mean([_same(other, turn.calls[0], tools) for other in turn.agreement_calls])
            for turn in _calling_turns(trajectories, False)
            if turn.agreement_calls
        ]
    )


def parse_failure_frac(trajectories: Iterable[Trajectory]) -> float:
    """Share of asked turns whose first candidate could not be read; NaN if none was asked."""
    return _mean([_unreadable(turn.candidates[0]) for turn in _asked_turns(trajectories)])


def hit_report(trajectories: Sequence[Trajectory], specs: Specs, k: int = 1) -> dict[str, float]:
    """All numbers that belong beside Hit@1, shares from 0 to 1; NaN where nothing was counted.

    ``hit_over_agreement`` divides Hit@1 by self-agreement over the turns that have both.
    """
    tools = by_name(specs)
    turns = [turn for turn in _calling_turns(trajectories, False) if turn.candidates]
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    agreed = [turn for turn in turns if turn.agreement_calls]
    agreement = self_agreement(trajectories, tools)
    agreed_hits = _mean([_hit(turn, tools, 1) for turn in agreed])
    report = {
        "success": _mean([t.score.success for t in trajectories]),
        "calling_turns": float(len(turns)),
        "hit_at_1": hit_at_1(trajectories, tools),
        "hit_at_1_calls": hit_at_1_calls(trajectories, tools),
        "hit_at_1_read_only": hit_at_1(trajectories, tools, read_only=True),
        "hit_at_1_later": hit_at_1(trajectories, tools, skip_first_turn=True),
        "hit_at_1_read_only_later": hit_at_1(
            trajectories, tools, read_only=True, skip_first_turn=True
        ),
        "parse_failure": parse_failure_frac(trajectories),
        "abstain": _mean([_abstained(t.candidates[0]) for t in _asked_turns(trajectories)]),
        "read_only_frac": _mean([_read_only(call, tools) for call in calls]),
        "self_agreement": agreement,
        "hit_over_agreement": agreed_hits / agreement if agreement > 0 else float("nan"),
    }
    if k > 1:
        report[f"hit_at_{k}"] = hit_at_1(trajectories, tools, k=k)
    for name in sorted({turn.calls[0].name for turn in turns}):
        report[f"hit_at_1/{name}"] = hit_at_1(trajectories, tools, tool=name)
        report[f"calling_turns/{name}"] = float(sum(t.calls[0].name == name for t in turns))
    return report


def _calling_turns(trajectories: Iterable[Trajectory], skip_first: bool) -> list[Turn]:
    return [
        turn
        for trajectory in trajectories
        for turn in trajectory.turns[1 if skip_first else 0 :]
        if turn.calls
    ]


def _hit(turn: Turn, tools: Mapping[str, ToolSpec], k: int) -> bool:
    return any(matches(candidate, turn.calls[0], tools) for candidate in turn.candidates[:k])


def _same(other: ToolCall | None, call: ToolCall, tools: Mapping[str, ToolSpec]) -> bool:
    return other is not None and same_call(other, call, tools.get(call.name))


def _read_only(call: ToolCall, tools: Mapping[str, ToolSpec]) -> bool:
    return call.name in tools and tools[call.name].read_only


def _asked_turns(trajectories: Iterable[Trajectory]) -> list[Turn]:
    return [turn for trajectory in trajectories for turn in trajectory.turns if turn.candidates]


def _unreadable(candidate: Candidate) -> bool:
    return candidate.call is None and bool(candidate.problems)


def _abstained(candidate: Candidate) -> bool:
    return candidate.call is None and not candidate.problems


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
