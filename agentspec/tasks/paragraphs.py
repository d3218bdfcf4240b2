"""The paragraphs behind the search tools: a BM25 index to search, and titles to read.

In: a JSON-lines file of ``{title, text, from?}``. Out: a ``Corpus``, immutable and shared by all
episodes of a process; equal queries give equal bytes. Stage: tasks (paper: search QA).
"""

from __future__ import annotations

import functools
import hashlib
import html
import logging
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np

from agentspec.tasks.jsonlines import field, read_records

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it tells of every index it builds
_STOPWORDS = frozenset(
    "a an and are as at be been by did do does for from had has have he her his how in is it its "
    "of on or she that the their they this to was were what when where which who whom whose why "
    "will with".split()
)


def plain(text: str) -> str:
    """``text`` as lower-case words and numbers, single-spaced.

    Without accents and punctuation; HTML entities count as what they stand for.
    """
    folded = unicodedata.normalize("NFKD", html.unescape(text)).casefold()
    bare = "".join(c for c in folded if not unicodedata.combining(c))
    return " ".join(re.findall(r"[^\W_]+", bare))


def clip(text: str, max_chars: int) -> str:
    """``text`` on one line; beyond ``max_chars`` cut at a word border and marked by `` ...``."""
    flat = " ".join(text.split())
    if len(flat) <= max_chars:
        return flat
    return flat[: max_chars + 1].rsplit(" ", 1)[0][:max_chars].rstrip(",;:") + " ..."


class Corpus:
    """Paragraphs with their index. Paragraphs of one title are one page, in the order given."""

    def __init__(self, paragraphs: Sequence[tuple[str, str]]) -> None:
        """``paragraphs``: (title, text) pairs."""
        if not paragraphs:
            raise ValueError("a corpus needs at least one paragraph, got none")
        self.paragraphs = tuple(paragraphs)
        self._page: dict[str, list[int]] = {}
        for i, (title, _) in enumerate(self.paragraphs):
            self._page.setdefault(plain(title), []).append(i)
        words = [_words(f"{title} {text}") for title, text in self.paragraphs]
        self._index = bm25s.BM25()
        self._index.index(words, show_progress=False)
        self._vocabulary = frozenset(word for row in words for word in row)
        digest = hashlib.sha256()
        for title, text in self.paragraphs:
            digest.update(f"{title}\0{text}\0".encode())
        self.revision = digest.hexdigest()[:16]

    def title(self, text: str) -> str | None:
        """The title that equals ``text`` up to case, accents and punctuation, or None."""
        page = self._page.get(plain(text))
        return self.paragraphs[page[0]][0] if page else None

    def page(self, title: str) -> str:
        """All text under ``title`` (up to case and the like); ``KeyError`` when there is none."""
        return " ".join(dict.fromkeys(self.paragraphs[i][1] for i in self._page[plain(title)]))

    def search(self, query: str, k: int = 3) -> list[tuple[str, str]]:
        """The ``k`` best (title, text) by BM25, titles distinct, ties by place in the corpus.

        Only paragraphs that share a word with the query count, so there may be fewer, or none.
        """
        known = [word for word in _words(query) if word in self._vocabulary]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best: dict[str, int] = {}
        for i in np.lexsort((np.arange(len(scores)), -scores)):
            if scores[i] <= 0 or len(best) == k:
                break
            best.setdefault(plain(self.paragraphs[i][0]), int(i))
        return [self.paragraphs[i] for i in best.values()]


def _words(text: str) -> list[str]:
    words = plain(text).split()
    return [word for word in words if word not in _STOPWORDS] or words


def load_corpus(
    path: str | Path, first: str = "hotpotqa", problems: list[str] | None = None
) -> Corpus:
    """The corpus of a JSON-lines file, built once per process for each file content.

    Where one title has several paragraphs, those whose ``from`` is ``first`` come first on its
    page. HTML entities (``&amp;``) become characters. Raises ``DataError`` with file, line and key
    for a line without a title or a text; with ``problems`` such lines are noted there instead.
    """
    stat = Path(path).stat() if Path(path).is_file() else None
    stamp = (stat.st_size, stat.st_mtime_ns) if stat else (0, 0)
    corpus, found = _corpus(str(path), first, problems is None, stamp)
    if problems is not None:
        problems += found
    return corpus


@functools.lru_cache(maxsize=2)
def _corpus(
    path: str, first: str, strict: bool, stamp: tuple[int, int]
) -> tuple[Corpus, tuple[str, ...]]:
    problems: list[str] = []
    rows = read_records(
        path,
        lambda row: (field(row, "title", str), field(row, "text", str), row.get("from")),
        None if strict else problems,
    )
    rows.sort(key=lambda row: row[2] != first)
    unescaped = [(html.unescape(title), html.unescape(text)) for title, text, _ in rows]
    return Corpus(unescaped), tuple(problems)
