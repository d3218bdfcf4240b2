"""Scoring answers: cases B75, B76, B78, B80, B82 and the reading of ``<answer>``."""

from __future__ import annotations

import pytest

from agentspec.rewards.answers import answer_f1, check_golds, exact_match, extract_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>Oslo</answer>", "Oslo"),
        ("<answer>Rome</answer> no: <answer>\nOslo </answer> done", "Oslo"),
        ("Oslo", None),
        ("", None),
        ("<answer></answer>", ""),
        ("<answer>Oslo", None),
        ("<answer>Rome</answer> or <answer>Os", None),
        ("<answer>x<answer>Oslo</answer>", "Oslo"),
        ("<think><answer>Rome</answer></think><answer>Oslo</answer>", "Oslo"),
        ("<think>maybe <answer>Rome</answer></think>I do not know", None),
        ("<think>maybe <answer>Rome</answer>", None),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


def test_b75_an_answer_that_is_an_article():
    assert [exact_match(p, ["A"]) for p in ("A", "B", "")] == [1.0, 0.0, 0.0]
    assert [answer_f1(p, ["A"]) for p in ("A", "B", "")] == [1.0, 0.0, 0.0]
    assert exact_match("the", ["A"]) == 0.0
    assert exact_match("The Beatles", ["beatles"]) == 1.0


def test_b76_yes_no_rule():
    assert answer_f1("no, it was Oslo", ["no"]) == 0.0
    assert answer_f1("No.", ["no"]) == 1.0
    assert exact_match("no, it was Oslo", ["no"]) == 0.0


def test_b80_official_mode_stays_official():
    assert exact_match("1990\u20131995", ["1990-1995"]) == 0.0
    assert exact_match("Beyonce\u0301", ["Beyonc\u00e9"]) == 0.0
    assert exact_match("1,000", ["1000"]) == 1.0


def test_b82_no_answer_and_empty_gold():
    assert exact_match(extract_answer("no tag"), [""]) == 0.0
    assert answer_f1(None, ["Oslo"]) == 0.0
    for golds in ([""], ["Oslo", " "], []):
        with pytest.raises(ValueError, match="non-empty"):
            exact_match("Oslo", golds)
        with pytest.raises(ValueError, match=r"train\.jsonl:17"):
            check_golds(golds, where="train.jsonl:17")


def test_best_of_several_golds():
    assert exact_match("oslo", ["Rome", "Oslo."]) == 1.0
    assert exact_match("Oslo", "Oslo") == 1.0
    # against "Oslo Norway": P 2/3, R 1
    assert answer_f1("in Oslo, Norway", ["Rome", "Oslo Norway"]) == pytest.approx(0.8)
