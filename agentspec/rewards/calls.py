"""Scores calls: canonical form, match, and the speculator's reward. In: calls; out: numbers.

Paper, "Speculate while you reason", R_sp = R_name x R_args. Rollout,
reward, metric and pre-execution all use these functions and no others.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from agentspec.types import ToolCall, ToolSpec

ArgumentKeys = Literal["target", "union"]
F1Mode = Literal["default", "official"]

_ARTICLES = frozenset(("a", "an", "the"))
_OFFICIAL_ARTICLES = re.compile(r"\b(a|an|the)\b")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_NUMBER_SIGN = re.compile(r"(?<![\w.\-)\]])(?:-\.?|\.)(?=\d)|(?<=\d)[^\w\s](?=\d)")


def canonical_call(call: ToolCall, spec: ToolSpec | None = None) -> str:
    """The one JSON text of a call: equal texts are equal calls.

    Declared defaults of ``spec`` (where it is the called tool's) are filled in, keys sorted,
    integral floats written as integers; nothing else is changed.
    """
    schema = spec.parameters if spec is not None and spec.name == call.name else {}
    return _text({"name": call.name, "arguments": _canonical(call.arguments, schema)})


def same_call(a: ToolCall, b: ToolCall, spec: ToolSpec | None = None) -> bool:
    """Whether two calls are equal; the other half of a match is an equal ``state_version``."""
    return a.name == b.name and canonical_call(a, spec) == canonical_call(b, spec)


def repeat_count(calls: Iterable[ToolCall], specs: Mapping[str, ToolSpec] | None = None) -> int:
    """How many of ``calls`` exactly repeat an earlier one; ``specs`` by name fill in defaults."""
    texts = [canonical_call(call, (specs or {}).get(call.name)) for call in calls]
    return len(texts) - len(set(texts))


def call_reward(
    predicted: ToolCall | None,
    target: ToolCall,
    argument_keys: ArgumentKeys = "target",
    spec: ToolSpec | None = None,
) -> float:
    """The speculator's reward in [0, 1]: 0 for another name, 1 for a match, else mean token-F1.

    Args:
        predicted: the predicted call; None (abstention, parse failure) scores 0.
        target: the agent's own call.
        argument_keys: ``target`` (the paper) averages over the target's keys; ``union`` over the
            keys of both, so that an invented argument costs.
        spec: the called tool; a key that is missing takes its declared default.
    """
    if argument_keys not in ("target", "union"):
        raise ValueError(f"argument_keys is {argument_keys!r}; allowed: 'target', 'union'")
    if predicted is None or predicted.name != target.name:
        return 0.0
    if same_call(predicted, target, spec):
        return 1.0
    schema = spec.parameters if spec is not None and spec.name == target.name else {}
    properties = schema.get("properties", {})
    keys = dict.fromkeys(target.arguments)
    if argument_keys == "union":
        keys |= dict.fromkeys(predicted.arguments)
    if not keys:
        return 1.0
    return sum(_key_score(key, predicted, target, properties) for key in keys) / len(keys)


def _key_score(
    key: str, predicted: ToolCall, target: ToolCall, properties: dict[str, Any]
) -> float:
    declared = properties.get(key)
    texts = []
    for call in (predicted, target):
        if key in call.arguments:
            value = call.arguments[key]
        elif isinstance(declared, dict) and "default" in declared:
            value = declared["default"]
        else:
            return 0.0
        texts.append(value if isinstance(value, str) else _text(_canonical(value, declared)))
    return token_f1(texts[0], texts[1])


def token_f1(predicted: str, target: str, mode: F1Mode = "default") -> float:
    """F1 of the two texts' token multisets, in [0, 1].

    ``default``, for arguments: NFKC, lower case, punctuation dropped except inside a number (its
    sign included; any dash counts as ``-``; thousands commas go), articles dropped unless nothing
    would be left. Both empty 1, one empty 0. ``official``: the published SQuAD v1.1 and HotpotQA
    scripts, the latter's rule for yes, no and noanswer included; there two empty texts give 0.
    """
    if mode == "official":
        left, right = official_normalize(predicted), official_normalize(target)
        if left != right and {left, right} & {"yes", "no", "noanswer"}:
            return 0.0
        return _f1(left.split(), right.split())
    if mode != "default":
        raise ValueError(f"mode is {mode!r}; allowed: 'default', 'official'")
    a, b = _tokens(predicted), _tokens(target)
    return float(a == b) if not a or not b else _f1(a, b)


def official_normalize(text: str) -> str:
    """The published scripts' normal form: lower case, no ASCII punctuation, no articles."""
    kept = "".join(char for char in text.lower() if char not in string.punctuation)
    return " ".join(_OFFICIAL_ARTICLES.sub(" ", kept).split())


def _f1(predicted: list[str], target: list[str]) -> float:
    same = sum((Counter(predicted) & Counter(target)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(target)
    return 2 * precision * recall / (precision + recall)


def _tokens(text: str) -> list[str]:
    text = unicodedata.normalize("NFKC", text).lower()
    text = "".join("-" if _is_dash(char) else char for char in text)
    text = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)
    kept = {i for mark in _NUMBER_SIGN.finditer(text) for i in range(*mark.span())}
    chars = (c for i, c in enumerate(text) if i in kept or not _is_punctuation(c))
    tokens = "".join(chars).split()
    return [token for token in tokens if token not in _ARTICLES] or tokens


def _is_dash(char: str) -> bool:
    return char == "\u2212" or unicodedata.category(char) == "Pd"


def _is_punctuation(char: str) -> bool:
    return char in string.punctuation or unicodedata.category(char).startswith("P")


def _canonical(value: Any, schema: Any) -> Any:
    """``value`` with numbers in one form and the schema's defaults filled in, at every depth."""
    schema = schema if isinstance(schema, dict) else {}
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        defaults = {
            key: declared["default"]
            for key, declared in properties.items()
            if isinstance(declared, dict) and "default" in declared
        }
        return {k: _canonical(v, properties.get(k)) for k, v in (defaults | value).items()}
    if isinstance(value, list | tuple):
        return [_canonical(item, schema.get("items")) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _text(value: Any) -> str:
    """Canonical JSON, with spaces: token-F1 sees the items, and no thousands in ``[1, 234]``."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
