"""The scripted agent of the world "lookup".

It knows how its question decomposes, and learns facts from observations alone. At nearly every
turn it draws among several calls: some equally good, some worse (a search for the bare name, a
page for a relation that it has no habit of reading), so an imitator is uncertain at temperature 1
and reinforcement learning has something to sharpen. It gives up honestly after a few misses.
"""

from __future__ import annotations

from agentspec.envs.experts import AssistantAct, as_list
from agentspec.tasks.hashing import pick
from agentspec.tasks.lookup import RELATIONS
from agentspec.types import Task, ToolCall

READ_HABIT = (0.8, 0.6, 0.35)  # chance of reading first, fixed for each relation
PHRASINGS = {"E R": 0.50, "SYN of E": 0.25, "E": 0.25}
OPENINGS = {"i need": 0.4, "next find": 0.35, "so far unknown is": 0.25}
RESULTS = ((0.8, 2), (0.2, 4))  # how many results it asks for
MISSES_ALLOWED = 2  # in one hop; then it answers "unknown"
GIVES_UP = 0.25  # chance of doing so after the first miss already


def read_habit(relation: str) -> float:
    """How often the expert reads a page first when it looks for this relation."""
    return READ_HABIT[list(RELATIONS).index(relation) % len(READ_HABIT)]


class LookupExpert:
    """Plays one episode; every choice is a hash of (seed, task, turn)."""

    def __init__(self, task: Task, seed: int) -> None:
        """Knows the question's entity and chain of relations, no fact."""
        self.task = task
        self.seed = seed
        self._chain: list[str] = list(task.data["chain"])
        self._entity: str = task.data["entity"]
        self._hop = 0
        self._turn = 0
        self._tried: list[str] = []  # in this hop: "read" or a phrasing
        self._page = ""
        self._known: dict[tuple[str, str], str] = {}

    def act(self, observations: list[str] | str | None) -> AssistantAct:
        """The next turn: a call, or the answer."""
        for text in as_list(observations):
            self._take_in(text)
        self._turn += 1
        found = ""
        while self._hop < len(self._chain):
            value = self._known.get((self._entity, self._chain[self._hop]))
            if value is None:
                break
            found = f"so the {self._chain[self._hop]} of {self._entity} is {value} ."
            self._entity, self._hop, self._tried = value, self._hop + 1, []
        if self._hop == len(self._chain):
            return AssistantAct(f"{found} done .", f"<answer>{self._entity}</answer>")
        if self._tried:
            found = "not found ."
        if len(self._tried) >= MISSES_ALLOWED or (self._tried and self._gives_up()):
            return AssistantAct("not found . i give up .", "<answer>unknown</answer>")
        form = self._choose()
        self._tried.append(form)
        relation = self._chain[self._hop]
        opening = pick([(w, text) for text, w in OPENINGS.items()], *self._key("opening"))
        plan = "open its page ." if form == "read" else "use a search ."
        need = f"{opening} the {relation} of {self._entity} . {plan}"
        return AssistantAct(f"{found} {need}" if found else need, "", (self._call(form, relation),))

    def _key(self, what: str) -> tuple[object, ...]:
        return self.seed, self.task.id, self._turn, what

    def _gives_up(self) -> bool:
        return pick([(GIVES_UP, True), (1 - GIVES_UP, False)], *self._key("give up"))

    def _choose(self) -> str:
        """How to look next: mostly with the other tool after a miss."""
        read = read_habit(self._chain[self._hop])
        if self._tried:
            read = 0.2 if self._tried[-1] == "read" else 0.65
        options = [(w * (1 - read), form) for form, w in PHRASINGS.items()]
        options = [(0.0 if form in self._tried else w, form) for w, form in options]
        if "read" not in self._tried:
            options.append((read, "read"))
        return pick(options, *self._key("form"))

    def _call(self, form: str, relation: str) -> ToolCall:
        if form == "read":
            self._page = self._entity
            return ToolCall("read", {"page": self._entity})
        self._page = ""
        query = {
            "E R": f"{self._entity} {relation}",
            "SYN of E": f"{RELATIONS[relation][0]} of {self._entity}",
            "E": self._entity,
        }[form]
        k = pick(RESULTS, *self._key("k"))
        return ToolCall("search", {"query": query, "k": k})

    def _take_in(self, text: str) -> None:
        """Learns the facts of an observation: a page's lines, or search results with names."""
        for line in text.split(" ; "):
            left, colon, value = line.partition(" : ")
            if colon:
                entity, _, relation = left.rpartition(" ")
                self._known[entity or self._page, relation] = value


def expert_pieces() -> list[str]:
    """Text pieces of the expert's thoughts, answers and calls."""
    search = '{"name": "search", "arguments": {"query": "'
    read = '{"name": "read", "arguments": {"page": "'
    openings = [piece for text in OPENINGS for piece in (f"{text} the ", f"\n{text} the ")]
    return [
        *openings, "\nso the ", "so the ", " is ", " . ", " .", " .\n", "\nnot found . ",
        "not found . ", "i give up .", "done .", "open its page .", "use a search .", "unknown",
        " of ", "<answer>", "</answer>",
        search, f"\n{search}", read, f"\n{read}", "\n", "\n\n",
        '", "k": 2}}', '", "k": 4}}', '", "k": 2}}\n', '", "k": 4}}\n', '", "k": ', "}}",
        '"}}', '"}}\n',
    ]  # fmt: skip
