"""Scoring calls: cases B08, B22, B72 to B74, B78, B80, canonical form, reward, token-F1."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.rewards.calls import (
    call_reward,
    canonical_call,
    repeat_count,
    same_call,
    token_f1,
)
from agentspec.tokens.parse import parse_turn
from agentspec.types import ToolCall, ToolSpec

WITH_DEFAULT = ToolSpec(
    "search",
    "",
    {
        "type": "object",
        "properties": {"q": {"type": "string"}, "k": {"type": "integer", "default": 3}},
    },
)


def _search(**arguments: object) -> ToolCall:
    return ToolCall("search", arguments)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (33.0, 33, True),
        (33, "33", False),
        (True, 1, False),
        (False, 0.0, False),
        (None, "null", False),
        ([1, 2], [2, 1], False),
        ([1.0, {"x": 2}], [1, {"x": 2.0}], True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (9007199254740993, 9007199254740992, False),
        (9007199254740993, 9007199254740992.0, False),
        (1e20, 100000000000000000000, True),
        (-0.0, 0, True),
        (0.1, 0.1, True),
        ("Oslo", "oslo", False),
        ("a ", "a", False),
        ("é", "e\u0301", False),
        ({}, None, False),
    ],
)
def test_equality_of_values(a, b, equal):
    assert same_call(_search(v=a), _search(v=b)) is equal
    assert (canonical_call(_search(v=a)) == canonical_call(_search(v=b))) is equal


def test_names_and_missing_keys_differ():
    assert not same_call(ToolCall("a"), ToolCall("b"))
    assert not same_call(_search(q=None), _search())


def test_b22_escaped_and_plain_letters_parse_to_equal_calls():
    escaped, plain = (
        parse_turn(f'<tool_call>{{"name":"search","arguments":{{"q":"{q}"}}}}</tool_call>').calls[0]
        for q in ("caf\\u00e9", "café")
    )
    assert same_call(escaped, plain) and call_reward(escaped, plain) == 1.0
    assert token_f1(escaped.arguments["q"], "café") == 1.0


def test_b08_no_arguments_on_either_side():
    assert call_reward(ToolCall("now"), ToolCall("now")) == 1.0
    assert call_reward(ToolCall("now"), ToolCall("now"), "union") == 1.0
    assert call_reward(ToolCall("now", {"x": 1}), ToolCall("now")) == 1.0
    assert call_reward(ToolCall("now", {"x": 1}), ToolCall("now"), "union") == 0.0


def test_b72_an_invented_argument_costs_in_union_only():
    gold, predicted = _search(city="Oslo"), _search(city="Oslo", units="c")
    assert call_reward(predicted, gold, "union") == 0.5  # (1 + 0) / 2
    assert call_reward(predicted, gold) == 1.0
    assert call_reward(gold, predicted) == 0.5  # a missing key scores 0


def test_b73_partial_and_wrong_name():
    gold = _search(query="Norway capital", k=3)
    # {capital, of, norway} against {norway, capital}: P 2/3, R 1, F1 0.8; (0.8 + 1) / 2
    predicted = _search(query="capital of Norway", k=3)
    assert call_reward(predicted, gold) == pytest.approx(0.9)
    assert call_reward(ToolCall("find", dict(predicted.arguments)), gold) == 0.0
    assert call_reward(None, gold) == 0.0


def test_b74_declared_defaults():
    gold, predicted = _search(q="x"), _search(q="x", k=3)
    assert same_call(predicted, gold, WITH_DEFAULT) and same_call(gold, predicted, WITH_DEFAULT)
    assert not same_call(predicted, gold)
    for keys in ("target", "union"):
        assert call_reward(predicted, gold, keys, WITH_DEFAULT) == 1.0
    # A missing key takes its default, on either side: k 3 = 3, q differs: (0 + 1) / 2.
    assert call_reward(_search(q="y"), _search(q="x", k=3), "target", WITH_DEFAULT) == 0.5
    assert call_reward(_search(q="y", k=3), _search(q="x"), "union", WITH_DEFAULT) == 0.5
    assert call_reward(_search(q="y"), _search(q="x", k=3)) == 0.0
    # Another tool's schema says nothing about this call.
    assert not same_call(predicted, gold, ToolSpec("find", "", WITH_DEFAULT.parameters))


def test_nested_defaults_are_filled_in():
    inner = {"type": "object", "properties": {"n": {"default": 1}}}
    properties = {"o": inner, "l": {"type": "array", "items": inner}}
    spec = ToolSpec("search", "", {"type": "object", "properties": properties})
    assert same_call(_search(o={}, l=[{}]), _search(o={"n": 1.0}, l=[{"n": 1}]), spec)
    assert not same_call(_search(o={}), _search(), spec)


def test_values_that_are_no_strings_compare_as_json_text():
    gold = _search(ids=[1, 2], on=True)
    assert call_reward(_search(ids=[1.0, 2], on=False), gold) == 0.5
    assert call_reward(_search(ids=[1, 3], on=True), gold) == 0.75  # 1 of 2 items: (0.5 + 1) / 2
    assert call_reward(_search(v=[1, 234]), _search(v=[1234])) == 0.0
    # As texts 33 and "33" are equal, but the calls do not match.
    assert call_reward(_search(v="33"), _search(v=33)) == 1.0


def test_reward_refuses_an_unknown_key_set():
    with pytest.raises(ValueError, match="'target', 'union'"):
        call_reward(None, _search(), "all")


def test_scoring_changes_no_call():
    a, b = _search(o={"n": 1.0}), _search(o={"n": 2.0}, k=[1])
    before = copy.deepcopy((a, b))
    call_reward(a, b, "union", WITH_DEFAULT)
    canonical_call(a, WITH_DEFAULT)
    assert (a, b) == before


def test_repeat_count():
    calls = [_search(q="x", k=3), _search(k=3.0, q="x"), _search(q="y"), _search(q="x", k=3)]
    assert repeat_count(calls) == 2
    assert repeat_count([]) == 0


@pytest.mark.parametrize(
    ("a", "b", "f1"),
    [
        ("", "", 1.0),
        ("", "x", 0.0),
        ("x", "", 0.0),
        ("!!!", "", 1.0),
        ("New York City", "new york", 0.8),  # P 2/3, R 1
        ("x x y", "x y y", 2 / 3),  # multisets share x, y
        ("The Beatles", "beatles", 1.0),
        ("A", "A", 1.0),
        ("A", "B", 0.0),
        ("the", "", 0.0),
        ("U.S.", "us", 1.0),
        ("don't", "dont", 1.0),
        ("3.14", "314", 0.0),
        ("3.14.", "3.14", 1.0),
        ("-5", "5", 0.0),
        (".5", "5", 0.0),
        ("10:30", "1030", 0.0),
        ("２０２４", "2024", 1.0),
        ("«Oslo»", "Oslo", 1.0),
        ("no, it was Oslo", "no", 0.4),  # B76: P 1/4, R 1; the yes/no rule is not for arguments
    ],
)
def test_token_f1_default(a, b, f1):
    assert token_f1(a, b) == pytest.approx(f1)
    assert token_f1(b, a) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("a", "b", "f1"),
    [
        ("1,000", "1000", 1.0),
        ("0,1", "01", 0.0),
        ("1,234,567.5", "1234567.5", 1.0),
        ("12,34", "1234", 0.0),
        ("1,000,5", "10005", 0.0),
    ],
)
def test_b78_commas_go_from_thousands_groups_only(a, b, f1):
    assert token_f1(a, b) == f1


def test_b80_dashes_and_composed_letters():
    nfc, nfd = "Beyonc\u00e9", "Beyonce\u0301"
    assert token_f1("1990\u20131995", "1990-1995") == 1.0
    assert token_f1("1990-1995", "1990-1996") == 0.0
    assert token_f1(nfc, nfd) == 1.0
    assert token_f1("1990\u20131995", "1990-1995", mode="official") == 0.0
    assert token_f1(nfc, nfd, mode="official") == 0.0


@pytest.mark.parametrize(
    ("a", "b", "f1"),
    [
        ("no, it was Oslo", "no", 0.0),  # B76
        ("Yes.", "yes", 1.0),
        ("the capital of Norway", "Norway capital", 0.8),
        ("3.14", "314", 1.0),
        ("0,1", "01", 1.0),
        ("", "", 0.0),
        ("A", "a", 0.0),  # the article is removed, nothing is left
        ("a-b", "ab", 1.0),
    ],
)
def test_token_f1_official(a, b, f1):
    assert token_f1(a, b, mode="official") == pytest.approx(f1)


def test_token_f1_refuses_an_unknown_mode():
    with pytest.raises(ValueError, match="'default', 'official'"):
        token_f1("a", "b", mode="squad")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_token_f1_is_symmetric_and_bounded(a, b):
    score = token_f1(a, b)
    assert 0.0 <= score <= 1.0 and score == pytest.approx(token_f1(b, a))
    assert token_f1(a, a) == 1.0
