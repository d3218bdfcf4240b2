"""Recorded search trajectories (Thought / Action / Observation) as SFT episodes on our corpus.

In: JSON-lines files of ``{question, reward, answer_gold?, steps: [{thought?, action: {name,
argument} | null, observation?}]}``. Out: ``Episode`` records, and why the others were dropped.

Mapping of a recorded action (``x`` its argument, case of the name ignored):

- ``Search[x]``, ``Retrieve[x]``: ``read(title)`` when ``x`` equals a title in our corpus up to
  case and punctuation (both actions open that very page), else ``search(query=x)``;
- ``Lookup[x]``: finds ``x`` on the current page, so ``read`` of the current page (the one read
  last, or else the first that the last search found) or, when that has been read, ``search`` for
  its title and ``x``;
- ``Finish[x]``: the answer. Any other action drops the trajectory.

A step that would repeat a call already made is merged into that call. The mapped calls are run on
our corpus and only our observations count: the trajectory is kept when it was successful (exact
match with the golds; where none is known, a recorded reward of 1) and its observations show the
answer. A verdict (yes, no, a letter) or an answer that the question itself names (a choice between
two) is in any text, so there all supporting titles must have been shown instead.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentspec.rewards.answers import exact_match
from agentspec.tasks.hotpot import Question, bare_question, question_key
from agentspec.tasks.jsonlines import DataError, field, read_records
from agentspec.tasks.paragraphs import plain
from agentspec.tasks.search_tools import SearchTools
from agentspec.types import ToolCall

Steps = tuple[tuple[str, ToolCall], ...]
_ABOUT_THE_LOOP = re.compile(
    r"adjacent node|(?:possible|available) actions?|\"(?:Search|Retrieve|Lookup|Finish|Start)"
    r"|further actions?|\bsteps\b|\bAction:|previous action",
    re.I,
)
_VERDICTS = frozenset({"yes", "no", "true", "false", "supports", "refutes", "not enough info"})


@dataclasses.dataclass(frozen=True)
class Episode:
    """One recorded episode in our tools: (thought, call) per step, then thought and answer."""

    id: str
    source: str
    question: str
    golds: tuple[str, ...]
    steps: Steps
    last_thought: str
    answer: str

    @property
    def key(self) -> str:
        """The question's key, see ``tasks.hotpot.question_key``."""
        return question_key(self.question)


@dataclasses.dataclass
class Counts:
    """What became of the recorded trajectories; ``dropped`` counts (set, reason)."""

    read: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    kept: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    dropped: collections.Counter[tuple[str, str]] = dataclasses.field(
        default_factory=collections.Counter
    )
    merged_steps: int = 0

    def text(self) -> str:
        """A line per set, and a line per reason below it."""
        lines = []
        for source in sorted(self.read):
            lines.append(f"{source}: read {self.read[source]}, kept {self.kept[source]}")
            reasons = [(n, why) for (name, why), n in self.dropped.items() if name == source]
            lines += [
                f"  dropped {n}: {why}" for n, why in sorted(reasons, key=lambda r: (-r[0], r[1]))
            ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class _Recorded:
    id: str
    source: str
    question: str
    success: bool
    gold: str | None
    steps: tuple[tuple[str, str, str], ...]  # thought, action in lower case ("" for none), argument
    body: str


class _Drop(Exception):
    """This trajectory is not kept; the message is the reason."""


def load_episodes(
    paths: Sequence[str | Path],
    tools: SearchTools,
    questions: Mapping[str, Question],
    held_out: Collection[str],
    *,
    per_question: int = 2,
    max_calls: int = 6,
    thought_chars: int = 160,
    problems: list[str] | None = None,
) -> tuple[list[Episode], Counts]:
    """The kept episodes in file order, and the counts.

    ``questions``: known questions by key, for golds and supporting titles. ``held_out``: keys of
    questions that must not be trained on. At most ``per_question`` episodes a question with at
    most ``max_calls`` calls. Raises ``DataError`` as ``read_records`` does.
    """
    counts, kept = Counts(), []
    bodies: set[str] = set()
    per_key: collections.Counter[str] = collections.Counter()
    calls_seen: set[tuple[str, str]] = set()
    for path in paths:
        for recorded in read_records(path, _recorded, problems):
            counts.read[recorded.source] += 1
            key = question_key(recorded.question)
            try:
                if recorded.body in bodies:
                    raise _Drop("repeats an earlier record")
                bodies.add(recorded.body)
                if key in held_out:
                    raise _Drop("its question is held out")
                episode, merged = _mapped(
                    recorded, tools, questions.get(key), max_calls, thought_chars
                )
                made = (key, repr([call for _, call in episode.steps]))
                if made in calls_seen:
                    raise _Drop("same calls as a kept episode")
                if per_key[key] == per_question:
                    raise _Drop(f"question has {per_question} episodes already")
            except _Drop as reason:
                counts.dropped[recorded.source, str(reason)] += 1
                continue
            calls_seen.add(made)
            per_key[key] += 1
            counts.kept[recorded.source] += 1
            counts.merged_steps += merged
            kept.append(episode)
    return kept, counts


def _recorded(row: dict[str, Any]) -> _Recorded:
    question = bare_question(field(row, "question", str))
    steps = field(row, "steps", list)
    gold = field(row, "answer_gold", str) if row.get("answer_gold") is not None else None
    read = [_step(step, f"steps[{i}].") for i, step in enumerate(steps)]
    last = str(steps[-1].get("observation")) if steps else ""
    failed = re.search(r"reward = (False|0)\b|INCORRECT", last)
    return _Recorded(
        id=field(row, "traj_id", str),
        source=field(row, "set", str),
        question=question,
        success=field(row, "reward", float) == 1.0 and not failed,
        gold=gold,
        steps=tuple(read),
        body=json.dumps([question_key(question), steps], sort_keys=True),
    )


def _step(step: Any, where: str) -> tuple[str, str, str]:
    if not isinstance(step, dict):
        raise DataError(f"key '{where[:-1]}' must be an object, got {step!r:.80}")
    thought, action = step.get("thought") or "", step.get("action")
    if not isinstance(thought, str):
        raise DataError(f"key '{where}thought' must be a string, got {thought!r:.80}")
    if action is None:
        return thought, "", ""
    if not isinstance(action, dict):
        raise DataError(f"key '{where}action' must be an object or null, got {action!r:.80}")
    name, argument = action.get("name") or "", action.get("argument") or ""
    for key, value in (("name", name), ("argument", argument)):
        if not isinstance(value, str):
            raise DataError(f"key '{where}action.{key}' must be a string, got {value!r:.80}")
    return thought, name.strip().lower(), argument.strip()


def _mapped(
    recorded: _Recorded,
    tools: SearchTools,
    known: Question | None,
    max_calls: int,
    thought_chars: int,
) -> tuple[Episode, int]:
    """The episode and its number of merged steps; ``_Drop`` with the reason."""
    steps: list[tuple[str, ToolCall]] = []
    shown: list[str] = []
    page, merged = "", 0
    if not recorded.steps or recorded.steps[-1][1] != "finish":
        raise _Drop("no finish at its end")
    *acts, (last_thought, _, answer) = recorded.steps
    if not plain(answer):
        raise _Drop("an empty answer")
    golds = known.golds if known else (recorded.gold,) if recorded.gold else (answer,)
    if not (exact_match(answer, golds) if known or recorded.gold else recorded.success):
        raise _Drop("not successful")
    for thought, name, argument in acts:
        call = _call(name, argument, tools, page, [call for _, call in steps])
        if call in [made for _, made in steps]:
            merged += 1
            continue
        observation = tools.run(call)
        if call.name == "read":
            page = call.arguments["title"]
        elif found := tools.corpus.search(call.arguments["query"], 1):
            page = found[0][0]
        steps.append((short_thought(thought, thought_chars, call), call))
        shown.append(observation)
    if not 1 <= len(steps) <= max_calls:
        raise _Drop("no call" if not steps else f"more than {max_calls} calls")
    _check_shown(" ".join(shown), recorded.question, answer, golds, known)
    return (
        Episode(
            id=recorded.id,
            source=recorded.source,
            question=known.text if known else recorded.question,
            golds=golds,
            steps=tuple(steps),
            last_thought=short_thought(last_thought, thought_chars),
            answer=answer,
        ),
        merged,
    )


def _call(
    name: str, argument: str, tools: SearchTools, page: str, made: Sequence[ToolCall]
) -> ToolCall:
    if name not in ("search", "retrieve", "lookup") or not argument:
        raise _Drop(f"action {name!r} has no tool" if name else "a step without an action")
    if name == "lookup":
        if not page:
            raise _Drop("a lookup before any page")
        read = ToolCall("read", {"title": page})
        return read if read not in made else ToolCall("search", {"query": f"{page} {argument}"})
    title = tools.corpus.title(argument)
    return ToolCall("read", {"title": title}) if title else ToolCall("search", {"query": argument})


def _check_shown(
    shown: str, question: str, answer: str, golds: Sequence[str], known: Question | None
) -> None:
    text, asked = f" {plain(shown)} ", f" {plain(question)} "
    words = [f" {plain(gold)} " for gold in golds]
    verdict = plain(answer) in _VERDICTS or len(plain(answer)) < 2
    if verdict or any(word in asked for word in words):
        titles = known.titles if known else ()
        if not titles or not all(f" {plain(title)} " in text for title in titles):
            raise _Drop("a verdict or choice that our observations do not bear out")
    elif not any(word in text for word in words):
        raise _Drop("answer not in our observations")


def short_thought(thought: str, max_chars: int, call: ToolCall | None = None) -> str:
    """The first sentences of a thought, at most ``max_chars`` characters.

    Sentences about the recording agent's own loop (its action names, step counts) are left out;
    when nothing remains, a plain one about ``call`` stands in, or about the answer without one.
    """
    sentences = re.split(r"(?<=[.!?])\s+(?=[\"“]?[A-Z0-9])", " ".join(thought.split()))
    kept = ""
    for sentence in sentences:
        longer = f"{kept} {sentence}".strip()
        if not sentence or _ABOUT_THE_LOOP.search(sentence):
            continue
        if kept and len(longer) > max_chars:
            break
        kept = longer
    if not kept:
        kept = f"I need to look up {next(iter(call.arguments.values()))}." if call else "I know it."
    if len(kept) > max_chars:
        cut = kept[:max_chars]
        border = cut.rfind(",") if cut.rfind(",") > max_chars // 2 else cut.rfind(" ")
        kept = cut[:border].rstrip(",;:") + "."
    return kept
