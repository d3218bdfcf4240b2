"""Scores answers of search QA. In: a completion and the gold answers; out: exact match and F1.

The published (official) normal form, and no credit for saying nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentspec.rewards.calls import official_normalize, token_f1
from agentspec.tokens.parse import THINK_CLOSE, THINK_OPEN

_OPEN, _CLOSE = "<answer>", "</answer>"


def extract_answer(completion: str) -> str | None:
    """The text of the last ``<answer>`` of what the agent wrote, stripped; None without one.

    Pass the completion only, never the prompt. Reasoning does not count, nor does an answer that
    was cut before its closing tag.
    """
    spoken = completion.rpartition(THINK_CLOSE)[2].partition(THINK_OPEN)[0]
    _, opened, rest = spoken.rpartition(_OPEN)
    answer, closed, _ = rest.partition(_CLOSE)
    return answer.strip() if opened and closed else None


def check_golds(golds: str | Sequence[str], where: str = "gold answers") -> list[str]:
    """The gold answers as a list; ValueError, with ``where`` (file:line), if one is empty."""
    found = [golds] if isinstance(golds, str) else list(golds)
    if not found or not all(isinstance(gold, str) and gold.strip() for gold in found):
        raise ValueError(f"{where}: got {found!r}; allowed: one or more non-empty texts")
    return found


def exact_match(predicted: str | None, golds: str | Sequence[str]) -> float:
    """1.0 when the normalised prediction equals a normalised gold answer, else 0.0.

    No answer, or an empty one, is 0. Where the official normal form leaves nothing (a gold answer
    ``A``), the texts themselves are compared, so that not every such text equals every other.
    """
    if predicted is None:
        return 0.0
    candidates = check_golds(golds)
    return float(any(_equal(predicted, gold) for gold in candidates))


def answer_f1(predicted: str | None, golds: str | Sequence[str]) -> float:
    """Best official token-F1 over the gold answers, HotpotQA's yes/no rule included; 0 for none."""
    if predicted is None:
        return 0.0
    candidates = check_golds(golds)
    scores = [token_f1(predicted, gold, mode="official") for gold in candidates]
    return max(max(scores), exact_match(predicted, candidates))


def _equal(predicted: str, gold: str) -> bool:
    left, right = official_normalize(predicted), official_normalize(gold)
    if left and right:
        return left == right
    return predicted.strip().lower() == gold.strip().lower()
