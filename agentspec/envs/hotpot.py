"""The world "hotpot": real HotpotQA questions, BM25 search and pages of real paragraphs.

In: data files (see ``tasks.hotpot``, ``tasks.paragraphs``, ``tasks.hotpot_episodes``), a question.
Out: the exact match of the last ``<answer>``, by HotpotQA's own normalisation. Both tools are
read-only, repeatable and functions of their arguments, so every call may be pre-executed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from agentspec.envs.experts import AssistantAct
from agentspec.rewards.answers import answer_f1, exact_match, extract_answer
from agentspec.tasks.hotpot import (
    Question,
    Splits,
    answerable,
    hold_out,
    load_questions,
    split_questions,
)
from agentspec.tasks.hotpot_episodes import Counts, Episode, load_episodes
from agentspec.tasks.paragraphs import load_corpus
from agentspec.tasks.search_tools import READ, SEARCH, SearchTools
from agentspec.types import Message, Score, Task, ToolCall, ToolSpec

SPECS = (SEARCH, READ)
INSTRUCTION = (
    "Use the tools search(query) and read(title), then say the answer in as few words as "
    "possible: <answer>...</answer>\n"
)


class HotpotWorld:
    """One episode over shared tools; all that changes is what the agent said last."""

    def __init__(self, tools: SearchTools) -> None:
        """A world that waits for ``reset``."""
        self.tools: tuple[ToolSpec, ...] = SPECS
        self._search_tools = tools
        self._task: Task | None = None
        self._said = ""

    def reset(self, task: Task) -> list[Message]:
        """Starts the task; returns one user message, the instruction and the question."""
        self._task, self._said = task, ""
        return [Message("user", f"{INSTRUCTION}Question: {task.data['question']}")]

    async def step(self, call: ToolCall) -> str:
        """The observation of one call."""
        return self._search_tools.run(call)

    async def reply(self, content: str) -> Message | None:
        """None: a turn without calls is the answer."""
        self._said = content
        return None

    def fork(self) -> HotpotWorld:
        """An independent copy; the corpus is shared."""
        copy = HotpotWorld(self._search_tools)
        copy._task, copy._said = self._task, self._said
        return copy

    @property
    def state_version(self) -> str:
        """The digest of the corpus and of how much of it the tools show; no call changes it."""
        t = self._search_tools
        return f"{t.corpus.revision}/{t.hits}/{t.search_chars}/{t.read_chars}"

    def score(self) -> Score:
        """Reward and success: exact match of the final turn's answer; ``f1`` is in the details."""
        if self._task is None:
            raise RuntimeError("hotpot: score() before reset()")
        golds = self._task.data["golds"]
        answer = extract_answer(self._said)
        right = float(exact_match(answer, golds)) if answer is not None else 0.0
        f1 = float(answer_f1(answer, golds)) if answer is not None else 0.0
        return Score(right, right, {"answer": answer, "golds": golds, "f1": f1})


class RecordedExpert:
    """Replays one recorded episode: its calls one a turn, then its answer."""

    def __init__(self, episode: Episode) -> None:
        """``episode``: steps mapped to this world's tools."""
        self._episode = episode
        self._turn = 0

    def act(self, observations: list[str] | str | None) -> AssistantAct:
        """The next recorded turn, whatever came back; after the last one the answer again."""
        turn, steps = self._turn, self._episode.steps
        self._turn += 1
        if turn < len(steps):
            thought, call = steps[turn]
            return AssistantAct(thinking=thought, content="", calls=(call,))
        answer = f"<answer>{self._episode.answer}</answer>"
        return AssistantAct(thinking=self._episode.last_thought, content=answer, calls=())


@dataclasses.dataclass(frozen=True)
class HotpotData:
    """Worlds, tasks and experts of one data set (a ``WorldSource``).

    ``episodes``: recorded episodes for SFT. ``counts``: what became of the recorded trajectories.
    ``problems``: malformed lines, each ``file:line: key ...``, when loaded with ``strict=False``.
    """

    search_tools: SearchTools
    splits: Splits
    episodes: tuple[Episode, ...]
    counts: Counts
    n_questions: int
    problems: tuple[str, ...] = ()
    specs: tuple[ToolSpec, ...] = SPECS

    def new(self) -> HotpotWorld:
        """A fresh world."""
        return HotpotWorld(self.search_tools)

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split: train (for RL), validation or test, none of them in SFT."""
        parts = {part.name: part.name for part in dataclasses.fields(Splits)}
        if split not in parts:
            raise ValueError(f"hotpot: split must be one of {tuple(parts)}, got {split!r}")
        questions: tuple[Question, ...] = getattr(self.splits, split)
        return [
            Task(f"hotpot-{q.id}", "hotpot", {"question": q.text, "golds": list(q.golds)})
            for q in questions
        ]

    def expert_tasks(self) -> list[Task]:
        """One task per recorded episode; a question may come more than once."""
        return [
            Task(
                f"hotpot-sft-{i}",
                "hotpot",
                {"question": e.question, "golds": list(e.golds), "episode": i},
            )
            for i, e in enumerate(self.episodes)
        ]

    def expert(self, task: Task, seed: int) -> RecordedExpert:
        """The recorded policy of an expert task; ``seed`` changes nothing, a record is fixed."""
        if "episode" not in task.data:
            raise ValueError(
                f"task {task.id!r} has no recorded episode; expert() plays expert_tasks() only"
            )
        return RecordedExpert(self.episodes[task.data["episode"]])

    def pieces(self) -> list[str]:
        """Nothing: open text needs a model with a tokenizer of its own (``model.path``)."""
        return []

    def report(self) -> str:
        """The counts: questions by split, recorded trajectories by set and reason."""
        s = self.splits
        calls = sum(len(episode.steps) for episode in self.episodes)
        asked = len({episode.key for episode in self.episodes})
        lines = [
            f"hotpot: {self.n_questions} questions, {len(self.search_tools.corpus.paragraphs)} "
            "paragraphs",
            f"splits: train {len(s.train)}, validation {len(s.validation)}, test {len(s.test)}; "
            f"SFT {len(self.episodes)} recorded episodes on {asked} other questions, {calls} "
            f"calls, {self.counts.merged_steps} repeated steps merged",
            self.counts.text(),
        ]
        if self.problems:
            lines += [f"malformed lines: {len(self.problems)}", *self.problems]
        return "\n".join(lines)


def load_hotpot(
    corpus: str | Path,
    questions: Sequence[str | Path],
    trajectories: Sequence[str | Path],
    *,
    seed: int = 0,
    n_test: int = 48,
    n_validation: int = 24,
    hits: int = 3,
    search_chars: int = 160,
    read_chars: int = 500,
    per_question: int = 2,
    max_calls: int = 4,
    thought_chars: int = 120,
    strict: bool = True,
) -> HotpotData:
    """The data set of these files (JSON lines, plain or gzip).

    Test and validation questions are drawn by ``seed`` from those that the corpus can answer;
    recorded trajectories about the others become SFT episodes (at most ``per_question`` each, of
    at most ``max_calls`` calls), and ``train`` is what remains. Raises ``DataError`` naming file,
    line and key for a malformed line; without ``strict`` these are listed in ``problems`` and the
    report instead, and every other line is used.
    """
    problems: list[str] | None = None if strict else []
    tools = SearchTools(load_corpus(corpus, problems=problems), hits, search_chars, read_chars)
    known = load_questions(questions, problems)
    rest, validation, test = hold_out(answerable(known, tools.corpus), n_validation, n_test, seed)
    episodes, counts = load_episodes(
        trajectories,
        tools,
        {question.key: question for question in known},
        {question.key for question in (*validation, *test)},
        per_question=per_question,
        max_calls=max_calls,
        thought_chars=thought_chars,
        problems=problems,
    )
    return HotpotData(
        search_tools=tools,
        splits=split_questions(rest, validation, test, {e.key for e in episodes}),
        episodes=tuple(episodes),
        counts=counts,
        n_questions=len(known),
        problems=tuple(problems or ()),
    )
