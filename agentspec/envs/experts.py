"""What scripted policies hand over; their contract is ``envs.base.Expert``.

An expert stands in for demonstrations: it reads what the agent would read and acts as a somewhat
capricious agent would.
"""

from __future__ import annotations

import dataclasses

from agentspec.types import ToolCall


@dataclasses.dataclass(frozen=True)
class AssistantAct:
    """One turn of a scripted policy: its reasoning, the text said, and the calls made."""

    thinking: str
    content: str
    calls: tuple[ToolCall, ...] = ()


def as_list(observations: list[str] | str | None) -> list[str]:
    """What came back as a list: none, one text, or the list itself."""
    if observations is None:
        return []
    return [observations] if isinstance(observations, str) else list(observations)
