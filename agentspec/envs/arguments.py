"""What is wrong with a call's arguments, in words short enough for a tiny vocabulary.

The embedded worlds check their own calls, so that they stay whole when driven without a tool box.
"""

from __future__ import annotations

from typing import Any

from agentspec.types import ToolCall, ToolSpec

_TYPES = {"string": "a string", "integer": "an integer"}


def _fits(value: Any, kind: str) -> bool:
    if kind == "string":
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def call_problem(call: ToolCall, specs: tuple[ToolSpec, ...]) -> str | None:
    """The observation for a call that no declared tool can take, or None for a well-formed call.

    Knows the schema words that the embedded worlds use: ``string`` and ``integer`` properties with
    ``minimum`` and ``maximum``, ``required``, and no others allowed.
    """
    spec = next((spec for spec in specs if spec.name == call.name), None)
    if spec is None:
        return f"error : no tool {call.name}"
    properties = spec.parameters["properties"]
    for name in spec.parameters["required"]:
        if name not in call.arguments:
            return f"error : missing {name}"
    for name, value in call.arguments.items():
        if name not in properties:
            return f"error : unknown {name}"
        declared = properties[name]
        if not _fits(value, declared["type"]):
            return f"error : {name} must be {_TYPES[declared['type']]}"
        low, high = declared.get("minimum"), declared.get("maximum")
        if low is not None and not low <= value <= high:
            return f"error : {name} must be {low} to {high}"
    return None


def object_schema(
    required: dict[str, dict[str, Any]], **optional: dict[str, Any]
) -> dict[str, Any]:
    """A JSON schema of type ``object`` that allows the named properties and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def problem_pieces(specs: tuple[ToolSpec, ...]) -> list[str]:
    """Text pieces of what a world and the tool box say about a call that cannot run."""
    names = [spec.name for spec in specs]
    return [
        *names, ", ".join(names), "error : ", "no tool ", "missing ", "unknown ", " must be ",
        "a string", "an integer", " to ", "error: ", "unknown tool '", "'; the tools are: ", ": '",
        "' is a required property", "Additional properties are not allowed ('", "' was unexpected)",
        ": argument '", "': ", " is not of type '", "string'", "integer'",
        " is greater than the maximum of ", " is less than the minimum of ",
    ]  # fmt: skip
