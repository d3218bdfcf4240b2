"""HotpotQA questions: loading, and splits that no question crosses.

In: JSON-lines files of ``{question, answer, answer_aliases?, id?, dataset?, supporting_facts?}``.
Out: ``Question`` records and a seeded split. Paper: search QA.

A row can become a task when its ``dataset`` is ``hotpotqa`` (or missing) and every title of its
``supporting_facts`` has a page in the corpus. All other rows only lend their answer to recorded
trajectories about the same question.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from agentspec.tasks.jsonlines import DataError, field, read_records, strings
from agentspec.tasks.paragraphs import Corpus, plain


@dataclasses.dataclass(frozen=True)
class Question:
    """One question; ``golds`` has the answer first, then its aliases."""

    id: str
    text: str
    golds: tuple[str, ...]
    titles: tuple[str, ...] = ()
    dataset: str = ""

    @property
    def key(self) -> str:
        """What two spellings of one question have in common, see ``question_key``."""
        return question_key(self.text)


@dataclasses.dataclass(frozen=True)
class Splits:
    """Questions by use; no ``question_key`` is in two of them, nor among the SFT questions."""

    train: tuple[Question, ...]
    validation: tuple[Question, ...]
    test: tuple[Question, ...]


def bare_question(text: str) -> str:
    """``text`` without what trajectory files add: a ``Question:`` before it, a retry note after."""
    text = re.split(r"You have attempted to answer (?:the )?following question", text)[0]
    return " ".join(re.sub(r"^\s*(?:question|claim)\s*:\s*", "", text, flags=re.I).split())


def question_key(text: str) -> str:
    """Equal for two texts that ask the same question in the same words.

    Case, accents, punctuation and spaces do not count, nor what ``bare_question`` removes.
    """
    return plain(bare_question(text))


def load_questions(
    paths: Sequence[str | Path], problems: list[str] | None = None
) -> list[Question]:
    """The questions of all files, first spelling of each kept, in file order.

    Raises ``DataError`` naming file, line and key (an empty answer included); with ``problems``
    such lines are noted there and the others kept.
    """
    found: dict[str, Question] = {}
    for path in paths:
        for question in read_records(path, _question, problems):
            known = found.setdefault(question.key, question)
            if question.titles and not known.titles:
                found[question.key] = question
    return list(found.values())


def _question(row: dict[str, Any]) -> Question:
    text = bare_question(field(row, "question", str))
    golds = (field(row, "answer", str), *strings(row, "answer_aliases"))
    for gold in golds:
        if not plain(gold):
            raise DataError(f"key 'answer' has no letter or digit, got {gold!r}")
    facts = field(row, "supporting_facts", list) if row.get("supporting_facts") else []
    for i, fact in enumerate(facts):
        if not (isinstance(fact, list) and fact and isinstance(fact[0], str)):
            raise DataError(f"key 'supporting_facts[{i}]' must be [title, sentence], got {fact!r}")
    identity = row.get("id")
    return Question(
        id=identity if isinstance(identity, str) else _digest(question_key(text)),
        text=text,
        golds=golds,
        titles=tuple(dict.fromkeys(fact[0] for fact in facts)),
        dataset=str(row.get("dataset") or "hotpotqa"),
    )


def answerable(questions: Iterable[Question], corpus: Corpus) -> list[Question]:
    """The HotpotQA questions whose supporting pages are all in the corpus."""
    return [
        question
        for question in questions
        if question.dataset == "hotpotqa"
        and question.titles
        and all(corpus.title(title) is not None for title in question.titles)
    ]


def hold_out(
    questions: Sequence[Question], n_validation: int, n_test: int, seed: int
) -> tuple[tuple[Question, ...], tuple[Question, ...], tuple[Question, ...]]:
    """(rest, validation, test), by a hash of seed and question, whatever the files' order.

    Held-out questions are drawn before anyone looks at which of them a recorded agent solved.
    Raises ``DataError`` when nothing would be left to train on.
    """
    order = sorted(questions, key=lambda question: _digest(f"{seed}:{question.key}"))
    held = n_validation + n_test
    if len(order) <= held:
        raise DataError(
            f"world.n_validation={n_validation} + world.n_test={n_test} leave nothing of the "
            f"{len(order)} HotpotQA questions whose supporting pages are all in the corpus"
        )
    return tuple(order[held:]), tuple(order[n_test:held]), tuple(order[:n_test])


def split_questions(
    rest: Sequence[Question],
    validation: Sequence[Question],
    test: Sequence[Question],
    sft: Collection[str],
) -> Splits:
    """The splits, with the questions of the SFT episodes (``sft``: their keys) left out of train.

    Raises ``ValueError`` when a question is in two of the four.
    """
    parts = Splits(
        train=tuple(question for question in rest if question.key not in sft),
        validation=tuple(validation),
        test=tuple(test),
    )
    keys = [question.key for part in (parts.train, validation, test) for question in part]
    keys += list(sft)
    if len(keys) != len(set(keys)):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"{len(twice)} questions are in two splits, such as {twice[0]!r}")
    return parts


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
