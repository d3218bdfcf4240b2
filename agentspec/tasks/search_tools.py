"""The two tools of the search world, as plain functions of a corpus.

In: a call. Out: the observation, short enough for a small model. Both tools are read-only and
repeatable. Recorded trajectories are re-executed with these same functions.
"""

from __future__ import annotations

import dataclasses

from agentspec.tasks.paragraphs import Corpus, clip
from agentspec.types import ToolCall, ToolSpec

SEARCH = ToolSpec(
    name="search",
    description="Finds the pages that match a query best.",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
        "additionalProperties": False,
    },
    read_only=True,
    repeatable=True,
)
READ = ToolSpec(
    name="read",
    description="Reads the page of a title.",
    parameters={
        "type": "object",
        "properties": {"title": {"type": "string"}},
        "required": ["title"],
        "additionalProperties": False,
    },
    read_only=True,
    repeatable=True,
)


@dataclasses.dataclass(frozen=True)
class SearchTools:
    """``search`` and ``read`` over one corpus.

    ``hits`` lines a search, each of at most ``search_chars`` characters of text after the title;
    a page is cut to ``read_chars`` characters.
    """

    corpus: Corpus
    hits: int = 3
    search_chars: int = 120
    read_chars: int = 400

    def run(self, call: ToolCall) -> str:
        """The observation of a call; a wrong name or argument is an observation that says so."""
        key = {"search": "query", "read": "title"}.get(call.name)
        if key is None:
            return f"error: there is no tool {call.name!r}; the tools are search and read"
        value = call.arguments.get(key)
        if not isinstance(value, str) or not value.strip() or len(call.arguments) > 1:
            return f'error: {call.name} takes {{"{key}": text}} and nothing else'
        return self.search(value) if key == "query" else self.read(value)

    def search(self, query: str) -> str:
        """Lines ``title: beginning of the text``, best first."""
        found = self.corpus.search(query, self.hits)
        if not found:
            return f"nothing found for {clip(query, 60)!r}"
        return "\n".join(f"{title}: {clip(text, self.search_chars)}" for title, text in found)

    def read(self, title: str) -> str:
        """The page's text; for an unknown title the titles that a search for it finds."""
        if (known := self.corpus.title(title)) is not None:
            return clip(self.corpus.page(known), self.read_chars)
        near = " | ".join(found for found, _ in self.corpus.search(title, self.hits))
        return f"no page {clip(title, 60)!r}" + (f"; near: {near}" if near else "")
