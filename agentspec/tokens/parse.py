"""Reads one assistant turn: its reasoning, its content, its calls. In: text; out: ``ParsedTurn``.

Rollout, rewards, metrics and pre-execution all call this one function. Broken markup is counted as
a problem and stays in the content; it never raises and never yields a shortened value.

Problems, and whether the call at fault is kept:
``unterminated_think``  a reasoning block was opened and never closed; no call of the turn counts
``truncated``           a call's text or its closing tag is missing at the end; dropped
``unclosed_call``       another call opens where the closing tag should be; dropped
``invalid_json``        not JSON, not an object, or not representable (NaN, overflow); dropped
``invalid_xml``         not the ``<function=..><parameter=..>`` form; dropped
``missing_name``        no name, or one that is not a non-empty string; dropped
``invalid_arguments``   ``arguments`` is no object, or absent beside unknown keys; dropped
``trailing_text``       text between the call and its closing tag; dropped
``leading_text``        text between the opening tag and the first brace; kept
``duplicate_key``       a key or parameter occurs twice, the last one wins; kept
``type_mismatch``       an XML value does not fit its declared type and stays a string; kept
``stray_close``         a ``</tool_call>`` that closes nothing
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from agentspec.types import ParsedTurn, ToolCall, ToolSpec

Style = Literal["hermes", "qwen_xml"]
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

PROBLEMS = (
    "unterminated_think", "truncated", "unclosed_call", "invalid_json", "invalid_xml",
    "missing_name", "invalid_arguments", "trailing_text", "leading_text", "duplicate_key",
    "type_mismatch", "stray_close",
)  # fmt: skip
_MARKUP = re.compile("|".join(map(re.escape, (CALL_OPEN, CALL_CLOSE, THINK_OPEN))))
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>")
_PARAMETER_END = re.compile(
    r"</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>\s*(?:</tool_call>|$)))\s*"
)
_FUNCTION_END = re.compile(r"</function>")
_MAX_NESTING = 100


class _BrokenError(Exception):
    """A call that cannot be read, with the name of its problem."""


def parse_turn(
    text: str,
    tools: Sequence[ToolSpec] = (),
    style: Style = "hermes",
    opened_thinking: bool = False,
) -> ParsedTurn:
    """What one assistant turn says: calls are read only after the last ``</think>``, in order.

    Args:
        text: the turn as sampled, without its end-of-turn token.
        tools: declared tools; their schemas type the values of the XML style.
        style: ``hermes`` (JSON in ``<tool_call>``) or ``qwen_xml`` (``<function=..>`` in it).
        opened_thinking: the prompt itself ended inside a reasoning block.
    """
    if style not in ("hermes", "qwen_xml"):
        raise ValueError(f"style is {style!r}; allowed: 'hermes', 'qwen_xml'")
    before, closed, after = text.rpartition(THINK_CLOSE)
    if opened_thinking and not closed:
        return ParsedTurn(_reasoning(text), "", (), ("unterminated_think",))
    content: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    at = 0
    while (mark := _MARKUP.search(after, at)) is not None:
        content.append(after[at : mark.start()])
        if mark.group() == THINK_OPEN:
            thinking = before + closed + after[mark.start() :] if closed else after[mark.end() :]
            spoken = "" if closed else after[: mark.start()].strip()
            return ParsedTurn(_reasoning(thinking), spoken, (), ("unterminated_think",))
        if mark.group() == CALL_CLOSE:
            problems.append("stray_close")
            at = mark.end()
            continue
        read = _read_json_call if style == "hermes" else _read_xml_call
        try:
            call, at = read(after, mark.end(), tools, problems)
            calls.append(call)
        except _BrokenError as broken:
            problems.append(str(broken))
            at = _end_of_broken(after, mark.end())
            content.append(after[mark.start() : at])
    content.append(after[at:])
    spoken = "".join(content).strip()
    return ParsedTurn(_reasoning(before), spoken, tuple(calls), tuple(dict.fromkeys(problems)))


def _reasoning(text: str) -> str:
    return text.strip().removeprefix(THINK_OPEN).strip()


def _end_of_broken(text: str, start: int) -> int:
    """Where to read on after a broken call: behind its closing tag, or at the next opening one."""
    mark = _MARKUP.search(text, start)
    if mark is None:
        return len(text)
    return mark.end() if mark.group() == CALL_CLOSE else mark.start()


def _close_call(text: str, at: int) -> int:
    """The position behind the closing tag that must follow at ``at``."""
    rest = text[at:].lstrip()
    if rest.startswith(CALL_CLOSE):
        return len(text) - len(rest) + len(CALL_CLOSE)
    if not rest:
        raise _BrokenError("truncated")
    raise _BrokenError("unclosed_call" if rest.startswith(CALL_OPEN) else "trailing_text")


# --- Hermes: a JSON object ----------------------------------------------------------------------


def _read_json_call(
    text: str, start: int, tools: Sequence[ToolSpec], problems: list[str]
) -> tuple[ToolCall, int]:
    """The call whose ``<tool_call>`` ends at ``start``, and the position behind its closing tag."""
    brace = text.find("{", start)
    close = text.find(CALL_CLOSE, start)
    if brace < 0 or 0 <= close < brace:
        raise _BrokenError("invalid_json" if close >= 0 or text[start:].strip() else "truncated")
    found: list[str] = ["leading_text"] if text[start:brace].strip() else []
    value, end = _decode(text, brace, found)
    end = _close_call(text, end)
    call = _call_of(value)
    problems.extend(found)
    return call, end


def _decode(text: str, at: int, problems: list[str]) -> tuple[Any, int]:
    """One JSON value from ``at`` on, and where it ends; the only place that decodes JSON."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(items)
        if len(value) < len(items):
            problems.append("duplicate_key")
        return value

    decoder = json.JSONDecoder(
        strict=False, object_pairs_hook=pairs, parse_float=_finite, parse_constant=_refuse
    )
    try:
        value, end = decoder.raw_decode(text, at)
        if _nesting(value) > _MAX_NESTING:
            raise ValueError("nested too deeply for the code that walks it")
        if "\\u" in text[at:end]:  # a lone surrogate could not be encoded again
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        rest = text[error.pos :].lstrip(" \t\r\n,")
        cut = error.msg.startswith("Unterminated string") or not rest or rest.startswith(CALL_CLOSE)
        raise _BrokenError("truncated" if cut else "invalid_json") from None
    except (ValueError, RecursionError):
        raise _BrokenError("invalid_json") from None
    return value, end


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is beyond the range of a double")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _nesting(value: Any) -> int:
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [v for c in level for v in (c.values() if isinstance(c, dict) else c)]
    return depth


def _call_of(value: dict[str, Any]) -> ToolCall:
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _BrokenError("missing_name")
    if "arguments" not in value and set(value) - {"name", "id", "type"}:
        raise _BrokenError("invalid_arguments")  # say "parameters": running with {} would shorten
    arguments = value.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        raise _BrokenError("invalid_arguments")
    return ToolCall(name, arguments)


# --- Qwen3.5: <function=name><parameter=key>value</parameter></function> ------------------------


def _read_xml_call(
    text: str, start: int, tools: Sequence[ToolSpec], problems: list[str]
) -> tuple[ToolCall, int]:
    """As ``_read_json_call``. A value ends where its closing tag is followed by more markup."""
    head = _FUNCTION.match(text, start)
    if head is None:
        raise _BrokenError(_cut_or(text, start, "invalid_xml"))
    name, at = head.group(1).strip(), head.end()
    if not name:
        raise _BrokenError("missing_name")
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    declared = schema.get("properties", {})
    arguments: dict[str, Any] = {}
    seen: set[str] = set()
    found: list[str] = []
    while (key_tag := _PARAMETER.match(text, at)) is not None:
        end_tag = _PARAMETER_END.search(text, key_tag.end())
        if end_tag is None:
            raise _BrokenError(_cut_or(text, key_tag.end(), "invalid_xml"))
        key = key_tag.group(1).strip()
        if key in seen:
            found.append("duplicate_key")
            arguments.pop(key, None)
        seen.add(key)
        raw = text[key_tag.end() : end_tag.start()].removeprefix("\n").removesuffix("\n")
        if _PARAMETER.search(raw):  # an earlier parameter was never closed: it would swallow this
            raise _BrokenError("invalid_xml")
        types = _declared_types(declared.get(key, {}), schema)
        if raw.strip() or "string" in types:
            arguments[key] = _typed(raw, types, found)
        at = end_tag.end()
    function_end = _FUNCTION_END.match(text, at)
    if function_end is None:
        raise _BrokenError(_cut_or(text, at, "invalid_xml"))
    end = _close_call(text, function_end.end())
    problems.extend(found)
    return ToolCall(name, arguments), end


def _cut_or(text: str, at: int, problem: str) -> str:
    """``truncated`` when the call is never closed, else ``problem``."""
    return problem if CALL_CLOSE in text[at:] else "truncated"


def _declared_types(schema: Any, root: dict[str, Any], depth: int = 0) -> tuple[str, ...]:
    """JSON types that a schema allows; one that declares none allows a string."""
    if not isinstance(schema, dict) or depth > 8:
        return ("string",)
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part, {}) if isinstance(target, dict) else {}
        return _declared_types(target, root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str):
        return (declared,)
    if isinstance(declared, list):
        return tuple(declared)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            found = [t for s in schema[key] for t in _declared_types(s, root, depth + 1)]
            return tuple(dict.fromkeys(found))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return tuple(dict.fromkeys(_type_of(value) for value in values)) or ("string",)


def _typed(raw: str, types: tuple[str, ...], problems: list[str]) -> Any:
    """``raw`` as the declared type says; unfit text stays a string with ``type_mismatch``."""
    if "string" in types:
        return raw
    text = raw.strip()
    if text in ("True", "False", "None"):  # how Qwen's own template writes these values
        text = {"True": "true", "False": "false", "None": "null"}[text]
    found: list[str] = []
    try:
        value, end = _decode(text, 0, found)
    except _BrokenError:
        problems.append("type_mismatch")
        return raw
    if end == len(text):
        kind = _type_of(value)
        if kind in types or (kind == "integer" and "number" in types):
            problems.extend(found)
            return value
        if kind == "number" and "integer" in types and value.is_integer():
            problems.extend(found)
            return int(value)
    problems.append("type_mismatch")
    return raw


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"
