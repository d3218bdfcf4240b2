"""Scripted policies, and what the embedded worlds have in common.

An expert stands in for demonstrations: it reads what the agent would read and acts as a somewhat
capricious agent would. ``ScriptedWorlds`` is what one embedded world's module builds.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from agentspec.envs.base import World
from agentspec.types import Task, ToolCall, ToolSpec


@dataclasses.dataclass(frozen=True)
class AssistantAct:
    """One turn of a scripted policy: its reasoning, the text said, and the calls made."""

    thinking: str
    content: str
    calls: tuple[ToolCall, ...] = ()


class Expert(Protocol):
    """A scripted policy for one episode of one task."""

    def act(self, observations: list[str] | str | None) -> AssistantAct:
        """The next turn, given what came back since the last one.

        ``observations`` is None on the first turn, else the results of the last turn's calls in
        order, or the user's new line as a plain string.
        """
        ...


class ScriptedWorlds(Protocol):
    """A maker of one world's episodes, with its tasks, its expert and its words."""

    specs: tuple[ToolSpec, ...]

    def new(self) -> World:
        """A fresh world that shares nothing mutable with any other."""
        ...

    def tasks(self, split: str) -> list[Task]:
        """The tasks of ``train``, ``validation`` or ``test``."""
        ...

    def expert(self, task: Task, seed: int) -> Expert:
        """A scripted policy; equal task and seed give equal turns for equal observations."""
        ...

    def pieces(self) -> list[str]:
        """Text pieces that together spell whatever the world and its expert can say."""
        ...


def as_list(observations: list[str] | str | None) -> list[str]:
    """The observations as a list: none, one text, or the list itself."""
    if observations is None:
        return []
    return [observations] if isinstance(observations, str) else list(observations)
