"""Records passed between rooms. No JAX here.

Dimension key, used as suffixes of array names everywhere: B rows, N groups, G members, T tokens,
S cache length, P pages, V vocabulary, D width, F ffn, L layers, H query heads, K key/value heads,
E head size, U turns, C candidates, R engine rows. Units end names: ``_s`` seconds, ``_tokens``,
``_bytes``, ``_frac``; ``logp`` is in nats.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Mode = Literal["agent", "speculator"]


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """One call: a tool's name and its named arguments, ``a = (n, sigma)`` in the paper."""

    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ToolSpec:
    """A declared tool. ``parameters`` is a JSON schema of type ``object``.

    ``read_only``: a call changes nothing. ``repeatable``: it may run more often than the agent
    asks (not metered, not logged as an act). Only tools that are both may be pre-executed.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    read_only: bool = False
    repeatable: bool = False
    time_limit_s: float = 30.0

    @property
    def preexecutable(self) -> bool:
        """Whether a call of this tool may run before the agent asks for it."""
        return self.read_only and self.repeatable


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a conversation. ``calls`` and ``thinking`` belong to assistant messages."""

    role: Role
    content: str
    calls: tuple[ToolCall, ...] = ()
    thinking: str = ""


@dataclasses.dataclass(frozen=True)
class ParsedTurn:
    """What one assistant turn says, see ``tokens.parse.parse_turn``."""

    thinking: str
    content: str
    calls: tuple[ToolCall, ...]
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one segment. Temperature 0 is greedy (log-probs are then those at 1).

    ``max_tokens``: the segment's most tokens, the stop id and forced ids included. ``stop_ids`` end
    it, the one hit included. ``top_k``: draw among the k likeliest ids (0: all); ``top_p``: then
    among the fewest of these whose shares reach p (1: all). ``min_tokens``: no stop id is
    drawn among the first that many tokens. ``forced``: the segment begins with these ids, with the
    log-probs that the model gives them; off by default, for a forced opening of a call forbids the
    speculator to abstain. Log-probs are of the full vocabulary, whatever the limits.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    forced: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """Sampled ids (the stop id included when one was hit) with their float32 log-probs."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    finish: Literal["stop", "length"]
    version: int = 0
    entropies: tuple[float, ...] = ()


class SequenceDropped(RuntimeError):
    """A speculator's sample was given up because the engine's cache ran out of pages."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One task of a world: ``data`` is whatever that world's ``reset`` needs, JSON-like."""

    id: str
    world: str
    data: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Score:
    """A world's verdict on a finished episode: reward before shaping, and success 0 or 1."""

    reward: float
    success: float
    details: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One prediction of the agent's next call; ``call`` is None for none or an unreadable one."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    call: ToolCall | None
    problems: tuple[str, ...] = ()
    ready_s: float = 0.0  # clock time at which the prediction was complete


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened during an episode, for timelines and accounts.

    ``kind`` is one of ``generate``, ``speculate``, ``preexecute``, ``tool``, ``wait``; it lasted
    from ``start_s`` to ``end_s`` on the episode's clock.
    """

    kind: str
    turn: int
    start_s: float
    end_s: float
    label: str = ""
    status: str = ""  # preexecute: hit | miss | failed | stale | cancelled


@dataclasses.dataclass
class Turn:
    """One agent turn of a trajectory.

    ``start``: index into the trajectory's ids of the turn's first sampled token, which is the
    ``turn_start`` cut of the speculator's prefix ``ids[:start]``. ``end``: one past the last
    sampled token. ``observations`` answer ``calls`` in order.
    """

    start: int
    end: int
    finish: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    observations: tuple[str, ...] = ()
    state_version: str = ""  # of the world when the turn began
    generate_s: float = 0.0
    tool_s: float = 0.0  # what the turn's tools take when run after the turn
    hidden_s: float = 0.0  # how much of tool_s pre-execution hid
    candidates: tuple[Candidate, ...] = ()  # the speculator's predictions, first candidate first
    hits: tuple[bool, ...] = ()  # per call of the turn: served by a pre-execution
    call_candidates: tuple[Candidate, ...] = ()  # one a call, from the prefix before that call
    agreement_calls: tuple[ToolCall | None, ...] = ()  # first calls of independent continuations


@dataclasses.dataclass
class Trajectory:
    """A finished episode, as token ids that were really sampled or appended, never re-encoded.

    ``ids``, ``mask``, ``logps`` have one entry per token; ``mask`` is 1 exactly on sampled tokens
    (end-of-turn included); ``logps`` is 0.0 where ``mask`` is 0.
    """

    task_id: str
    world: str
    ids: list[int]
    mask: list[int]
    logps: list[float]
    turns: list[Turn]
    score: Score
    final_state: str
    finish: str  # answered | max_turns | max_tokens | world
    seed: int = 0
    version: int = 0
    entropies: list[float] = dataclasses.field(default_factory=list)
    total_s: float = 0.0
    events: list[Event] = dataclasses.field(default_factory=list)

    @property
    def calls(self) -> list[ToolCall]:
        """All calls of the episode, in order."""
        return [call for turn in self.turns for call in turn.calls]


@dataclasses.dataclass(frozen=True)
class Branch:
    """A continuation of a trunk's first ``cut`` tokens; it sees those and itself only.

    Its first token must have mask 0 (it is the suffix), since the trunk predicts its own next one.
    """

    cut: int
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logps: tuple[float, ...]
    advantage: float = 1.0


@dataclasses.dataclass(frozen=True)
class TreeRow:
    """One training sequence: a trunk and the branches that leave it (idea 3 of the design).

    ``mask`` marks tokens whose loss counts. ``advantage`` weighs the trunk's tokens; for SFT it
    is 1. A trunk that only serves its branches has an all-zero mask.
    """

    ids: tuple[int, ...]
    mask: tuple[int, ...]
    logps: tuple[float, ...]
    advantage: float = 1.0
    branches: tuple[Branch, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Trunk and branch tokens together."""
        return len(self.ids) + sum(len(b.ids) for b in self.branches)
