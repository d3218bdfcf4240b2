"""The embedded world "lookup": find facts by a search tool and by reading pages.

In: a question of one to three hops. Out: the exact match of the last ``<answer>``. Both tools are
read-only, repeatable and functions of their arguments alone, so every call may be pre-executed.
Neither finds everything: a fifth of the facts is not indexed and a sixth of the pages are stubs.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache

from agentspec.envs.arguments import call_problem, object_schema, problem_pieces
from agentspec.envs.base import Expert, World
from agentspec.envs.lookup_expert import LookupExpert, expert_pieces
from agentspec.rewards.answers import exact_match, extract_answer
from agentspec.tasks import lookup as questions
from agentspec.tasks.hashing import stable_hash
from agentspec.tasks.lookup import RELATIONS, Knowledge
from agentspec.types import Message, Score, Task, ToolCall, ToolSpec

SPECS: tuple[ToolSpec, ...] = (
    ToolSpec(
        "search",
        "Finds facts whose words overlap with the query; returns the k best.",
        object_schema(
            {"query": {"type": "string", "description": "a few words"}},
            k={"type": "integer", "minimum": 1, "maximum": 8, "default": 2},
        ),
        read_only=True,
        repeatable=True,
    ),
    ToolSpec(
        "read",
        "Reads the page of one person, film, company, city or country.",
        object_schema({"page": {"type": "string", "description": "its full name"}}),
        read_only=True,
        repeatable=True,
    ),
)

_IGNORED = {"the", "of"}


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower())) - _IGNORED


class Library:
    """The two tools over one ``Knowledge``; immutable, shared by all episodes."""

    def __init__(self, knowledge: Knowledge) -> None:
        """Indexes the facts by their words, each relation under both of its words."""
        self.knowledge = knowledge
        self._index = [
            (*key, value, _words(f"{' '.join(key)} {RELATIONS[key[1]][0]} {value}"))
            for key, value in knowledge.facts.items()
            if key not in knowledge.unindexed
        ]
        self.search = lru_cache(maxsize=4096)(self._search)
        content = [
            sorted([*key, value] for key, value in knowledge.facts.items()),
            sorted(map(list, knowledge.unindexed)),
            sorted(knowledge.stubs),
        ]
        self.revision = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def _search(self, query: str, k: int) -> str:
        """At most ``k`` fact lines by word overlap; ties and the lines' order by hash."""
        wanted = _words(query)
        found = []
        for entity, relation, value, words in self._index:
            overlap = len(wanted & words)
            if overlap:
                tie = stable_hash(self.knowledge.seed, sorted(wanted), entity, relation)
                found.append((-overlap, tie, f"{entity} {relation} : {value}"))
        best = sorted(found)[:k]
        lines = [line for _, _, line in sorted(best, key=lambda item: item[1])]
        return " ; ".join(lines) if lines else "nothing found"

    def read(self, page: str) -> str:
        """The facts of one entity, or what stands there instead."""
        name = " ".join(page.lower().split())
        if name not in self.knowledge.kinds or not self.knowledge.relations_of(name):
            return "no such page"
        if name in self.knowledge.stubs:
            return "stub"
        facts = self.knowledge.facts
        return " ; ".join(f"{r} : {facts[name, r]}" for r in self.knowledge.relations_of(name))


class LookupWorld:
    """One episode over a shared library; all that changes is what the agent said last."""

    def __init__(self, library: Library) -> None:
        """A world that waits for ``reset``."""
        self.tools: tuple[ToolSpec, ...] = SPECS
        self._library = library
        self._task: Task | None = None
        self._said = ""

    def reset(self, task: Task) -> list[Message]:
        """Starts the task; returns its question."""
        self._task, self._said = task, ""
        return [Message("user", task.data["question"])]

    async def step(self, call: ToolCall) -> str:
        """The observation of one call."""
        problem = call_problem(call, SPECS)
        if problem is not None:
            return problem
        if call.name == "search":
            return self._library.search(call.arguments["query"], int(call.arguments.get("k", 2)))
        return self._library.read(call.arguments["page"])

    async def reply(self, content: str) -> Message | None:
        """None: a turn without calls is the answer."""
        self._said = content
        return None

    def fork(self) -> LookupWorld:
        """An independent copy; the library is shared."""
        copy = LookupWorld(self._library)
        copy._task, copy._said = self._task, self._said
        return copy

    @property
    def state_version(self) -> str:
        """The digest of the knowledge; no call changes it."""
        return self._library.revision

    def score(self) -> Score:
        """Exact match of the answer given in the final turn; 0 where none was given."""
        if self._task is None:
            raise RuntimeError("lookup: score() before reset()")
        answer = extract_answer(self._said)
        right = exact_match(answer, self._task.data["answers"])
        return Score(right, right, {"answer": answer, "answers": self._task.data["answers"]})


class LookupWorlds:
    """Maker of lookup episodes over one knowledge."""

    def __init__(self, knowledge: Knowledge) -> None:
        """Builds the library once."""
        self.specs: tuple[ToolSpec, ...] = SPECS
        self.knowledge = knowledge
        self._library = Library(knowledge)

    def new(self) -> World:
        """A fresh world."""
        return LookupWorld(self._library)

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split."""
        return questions.build_tasks(self.knowledge, split)

    def expert_tasks(self) -> list[Task]:
        """The tasks to imitate the expert on: those of the training split."""
        return self.tasks("train")

    def expert(self, task: Task, seed: int) -> Expert:
        """The scripted policy for one episode."""
        return LookupExpert(task, seed)

    def pieces(self) -> list[str]:
        """Text pieces of the world and its expert: names, relations, glue."""
        names = questions.FIRST_NAMES + questions.LAST_NAMES
        names += questions.FILM_HEADS + questions.FILM_TAILS
        names += questions.COMPANY_HEADS + questions.COMPANY_TAILS
        names += questions.CITIES + questions.COUNTRIES + questions.LANGUAGES
        relations = [word for r, (synonym, _, _) in RELATIONS.items() for word in (r, synonym)]
        glue = [
            "what is the ", " of the ", " of ", " ?", " ", " : ", " ; ", "nothing found", "stub",
            "no such page", "query", "page", "k",
        ]  # fmt: skip
        return [*names, *relations, *glue, *expert_pieces(), *problem_pieces(SPECS)]


def build_world(
    seed: int = 0, unindexed_share: float = 0.2, stub_share: float = 1 / 6
) -> LookupWorlds:
    """The maker of lookup episodes for one knowledge seed."""
    return LookupWorlds(questions.build_knowledge(seed, unindexed_share, stub_share))
