"""Reading a turn: the cases of tool-call parsing (B01 to B13), and text that is broken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.tokens.parse import parse_turn
from agentspec.types import ToolCall, ToolSpec

SEARCH = '<tool_call>{"name":"search","arguments":{"q":"x"}}</tool_call>'


def _tool(name: str, **properties: object) -> ToolSpec:
    return ToolSpec(name, "", {"type": "object", "properties": properties})


def _xml(name: str, *pairs: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def test_b01_call_drafted_in_reasoning_is_not_a_call():
    turn = parse_turn(f"<think>try {SEARCH}</think>{SEARCH}")
    assert turn.calls == (ToolCall("search", {"q": "x"}),)
    assert turn.thinking == f"try {SEARCH}" and turn.content == "" and turn.problems == ()


@pytest.mark.parametrize(
    ("text", "opened", "calls", "problems"),
    [
        (f"<think>hm {SEARCH}", False, 0, ("unterminated_think",)),
        (f"hm {SEARCH}", True, 0, ("unterminated_think",)),
        (f"hm</think>{SEARCH}", True, 1, ()),
        (f"hm</think>{SEARCH}", False, 1, ()),
        (f"<think>a</think>{SEARCH}<think>b", False, 0, ("unterminated_think",)),
        (f"<think>a</think>b</think>{SEARCH}", False, 1, ()),
        (f"Looking. {SEARCH}", False, 1, ()),
        ("Oslo.", False, 0, ()),
        ("", False, 0, ()),
        ("", True, 0, ("unterminated_think",)),
    ],
)
def test_reasoning_blocks(text, opened, calls, problems):
    turn = parse_turn(text, opened_thinking=opened)
    assert (len(turn.calls), turn.problems) == (calls, problems)


def test_think_tag_inside_an_argument_opens_nothing():
    turn = parse_turn('<tool_call>{"name":"note","arguments":{"text":"a <think> b"}}</tool_call>')
    assert turn.calls == (ToolCall("note", {"text": "a <think> b"}),) and turn.problems == ()


def test_b03_value_that_holds_the_closing_markup():
    turn = parse_turn(
        '<tool_call>{"name":"note","arguments":{"text":"a } b </tool_call> c"}}</tool_call> done'
    )
    assert turn.calls == (ToolCall("note", {"text": "a } b </tool_call> c"}),)
    assert turn.content == "done" and turn.problems == ()


def test_b03_xml_value_that_holds_the_closing_markup():
    text = _xml("note", ("text", "a </parameter> b </tool_call> c </function> d"), ("k", "1"))
    turn = parse_turn(text, style="qwen_xml")
    assert turn.problems == ()
    expected = {"text": "a </parameter> b </tool_call> c </function> d", "k": "1"}
    assert turn.calls == (ToolCall("note", expected),)


def test_b05_xml_values_are_typed_by_schema_only():
    tool = _tool("f", zip={"type": "string"}, code={"type": "string"}, k={"type": "integer"})
    text = _xml("f", ("zip", "02134"), ("code", "1e5"), ("k", "5"))
    turn = parse_turn(text, (tool,), "qwen_xml")
    assert turn.calls == (ToolCall("f", {"zip": "02134", "code": "1e5", "k": 5}),)
    assert turn.problems == ()


def test_b05_exactly_one_newline_is_stripped_on_each_side():
    turn = parse_turn(_xml("f", ("a", "\n  x\n")), style="qwen_xml")
    assert turn.calls[0].arguments == {"a": "\n  x\n"}


@pytest.mark.parametrize(
    ("schema", "raw", "value", "problems"),
    [
        ({"type": "integer"}, "five", "five", ("type_mismatch",)),
        ({"type": "integer"}, "5.0", 5, ()),
        ({"type": "integer"}, "5.5", "5.5", ("type_mismatch",)),
        ({"type": "integer"}, "05", "05", ("type_mismatch",)),
        ({"type": "integer"}, "9007199254740993", 9007199254740993, ()),
        ({"type": "number"}, "1e5", 100000.0, ()),
        ({"type": "number"}, "NaN", "NaN", ("type_mismatch",)),
        ({"type": "number"}, "1e999", "1e999", ("type_mismatch",)),
        ({"type": "boolean"}, "true", True, ()),
        ({"type": "boolean"}, "True", True, ()),
        ({"type": "boolean"}, "1", "1", ("type_mismatch",)),
        ({"type": "array"}, '["a", 1]', ["a", 1], ()),
        ({"type": "array"}, '{"a": 1}', '{"a": 1}', ("type_mismatch",)),
        ({"type": "object"}, '{"a": 1, "a": 2}', {"a": 2}, ("duplicate_key",)),
        ({"type": ["integer", "null"]}, "None", None, ()),
        ({"type": ["string", "null"]}, "null", "null", ()),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7, ()),
        ({"enum": [1, 2]}, "2", 2, ()),
        ({"enum": ["1", "2"]}, "2", "2", ()),
        ({"$ref": "#/$defs/count"}, "3", 3, ()),
        ({}, "3", "3", ()),
    ],
)
def test_b05_xml_types(schema, raw, value, problems):
    parameters = {
        "type": "object",
        "properties": {"k": schema},
        "$defs": {"count": {"type": "integer"}},
    }
    turn = parse_turn(_xml("f", ("k", raw)), (ToolSpec("f", "", parameters),), "qwen_xml")
    assert turn.calls == (ToolCall("f", {"k": value}),) and turn.problems == problems
    assert type(turn.calls[0].arguments["k"]) is type(value)


def test_b07_empty_values():
    tool = _tool("f", k={"type": "integer"}, q={"type": "string"}, j={"type": "array"})
    text = (
        "<tool_call><function=f><parameter=k></parameter><parameter=q></parameter>"
        "<parameter=j>\n\n</parameter></function></tool_call>"
    )
    turn = parse_turn(text, (tool,), "qwen_xml")
    assert turn.calls == (ToolCall("f", {"q": ""}),) and turn.problems == ()


@pytest.mark.parametrize("rest", [',"arguments":null', ',"arguments":""', "", ',"arguments":{}'])
def test_b08_no_arguments(rest):
    turn = parse_turn('<tool_call>{"name":"now"' + rest + "}</tool_call>")
    assert turn.calls == (ToolCall("now", {}),) and turn.problems == ()


def test_b10_missing_brace_is_truncated_and_raw_newline_is_read():
    cut = parse_turn('<tool_call>{"name":"run","arguments":{"c":"ls"}</tool_call>')
    assert cut.calls == () and cut.problems == ("truncated",)
    raw = parse_turn('<tool_call>{"name":"run","arguments":{"c":"a\nb"}}</tool_call>')
    assert raw.calls == (ToolCall("run", {"c": "a\nb"}),) and raw.problems == ()


def test_b11_all_calls_in_order():
    turn = parse_turn(
        '<tool_call>\n{"name": "get_user", "arguments": {"id": "u1"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_order", "arguments": {"id": "o7"}}\n</tool_call>'
    )
    assert turn.calls == (ToolCall("get_user", {"id": "u1"}), ToolCall("get_order", {"id": "o7"}))
    xml = _xml("get_user", ("id", "u1")) + "\n" + _xml("get_order", ("id", "o7"))
    assert parse_turn(xml, style="qwen_xml").calls == turn.calls


def test_b13_repeated_key_last_wins_and_is_flagged():
    turn = parse_turn('<tool_call>{"name":"search","arguments":{"q":"a","q":"b"}}</tool_call>')
    assert turn.calls == (ToolCall("search", {"q": "b"}),)
    assert turn.problems == ("duplicate_key",)
    turn = parse_turn(_xml("search", ("q", "a"), ("q", "b")), style="qwen_xml")
    assert turn.calls == (ToolCall("search", {"q": "b"}),)
    assert turn.problems == ("duplicate_key",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>", "truncated"),
        ('<tool_call>{"name": "a", "argu', "truncated"),
        ('<tool_call>{"name": "a", "arguments": {}}', "truncated"),
        ('<tool_call>{"name": "a", "arguments": {"q": "x</tool_call>', "truncated"),
        ("<tool_call>search x</tool_call>", "invalid_json"),
        ('<tool_call>{"name": a}</tool_call>', "invalid_json"),
        ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "invalid_json"),
        ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "invalid_json"),
        ('<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', "invalid_json"),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "[" * 5000, "invalid_json"),
        ('<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "invalid_json"),
        ('<tool_call>{"arguments": {}}</tool_call>', "missing_name"),
        ('<tool_call>{"name": 3}</tool_call>', "missing_name"),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "invalid_arguments"),
        ('<tool_call>{"name": "a", "arguments": "{}"}</tool_call>', "invalid_arguments"),
        ('<tool_call>{"name": "a", "parameters": {"q": 1}}</tool_call>', "invalid_arguments"),
        ('<tool_call>{"name": "a"}}</tool_call>', "trailing_text"),
        ('<tool_call>{"name": "a"}, {"name": "b"}</tool_call>', "trailing_text"),
        ("hello</tool_call>", "stray_close"),
    ],
)
def test_broken_markup_is_a_problem_and_no_call(text, problem):
    turn = parse_turn(text)
    assert turn.calls == () and problem in turn.problems


def test_nesting_beyond_what_the_scorer_can_walk_is_refused():
    def nested(depth: int) -> str:
        value = "[" * depth + "]" * depth
        return '<tool_call>{"name": "a", "arguments": {"x": ' + value + "}}</tool_call>"

    assert parse_turn(nested(50)).problems == ()
    assert parse_turn(nested(150)).problems == ("invalid_json",)


def test_a_broken_call_does_not_hide_the_next():
    broken = '<tool_call>{"name": "a", "arguments": {"q": 1}</tool_call>'
    turn = parse_turn(f"{broken}\n{SEARCH}")
    assert turn.calls == (ToolCall("search", {"q": "x"}),)
    assert turn.problems == ("truncated",) and turn.content == broken
    turn = parse_turn('<tool_call>{"name": "a", "arguments": {}}' + SEARCH)
    assert turn.calls == (ToolCall("search", {"q": "x"}),)
    assert turn.problems == ("unclosed_call",)


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"search","arguments":{"q":"x"}}',
        '```json\n{"name":"search","arguments":{"q":"x"}}\n```',
        "<function=f>\n</function>",
    ],
)
def test_untagged_calls_are_text(text):
    for style in ("hermes", "qwen_xml"):
        turn = parse_turn(text, style=style)
        assert turn.calls == () and turn.problems == () and turn.content == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call><function=f><parameter=q>Oslo", "truncated"),
        ("<tool_call><function=f>", "truncated"),
        ("<tool_call><function=f><parameter=q>a</parameter></function>", "truncated"),
        ("<tool_call><function=f><parameter=q>a</function></tool_call>", "invalid_xml"),
        ("<tool_call><function=></function></tool_call>", "missing_name"),
        (SEARCH, "invalid_xml"),
        (
            "<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>",
            "invalid_xml",
        ),
    ],
)
def test_broken_xml(text, problem):
    turn = parse_turn(text, style="qwen_xml")
    assert turn.calls == () and turn.problems == (problem,)


def test_xml_without_parameters():
    turn = parse_turn("<tool_call>\n<function=now>\n</function>\n</tool_call>", style="qwen_xml")
    assert turn.calls == (ToolCall("now", {}),) and turn.problems == ()


def test_unknown_style_is_refused():
    with pytest.raises(ValueError, match="'hermes', 'qwen_xml'"):
        parse_turn("", style="llama")


_PIECES = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>",
           "<parameter=a>", "</parameter>", '{"name": "f", "arguments": {', '"q": "x"', "}", "\n",
           "text", '"', "\\")  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(_PIECES), max_size=14).map("".join), st.booleans())
def test_any_mixture_of_markup_is_read_without_an_exception(text, opened):
    for style in ("hermes", "qwen_xml"):
        turn = parse_turn(text, style=style, opened_thinking=opened)
        if "unterminated_think" in turn.problems:
            assert turn.calls == ()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "<tool_call>", "<think>", '"}}', "\\u0041"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=5), _JSON, max_size=4), st.booleans())
def test_what_is_written_is_what_is_read(arguments, ascii_only):
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
    if "</think>" in body:
        return
    turn = parse_turn(f"<think>\nx\n</think>\n\n<tool_call>\n{body}\n</tool_call>")
    assert turn.calls == (ToolCall("f", arguments),) and turn.problems == ()
