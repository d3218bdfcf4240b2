"""The contract of a world: a value to reset, step, fork and score (design, idea 4)."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from agentspec.types import Message, Score, Task, ToolCall, ToolSpec


@runtime_checkable
class World(Protocol):
    """One episode's world. Its own methods never sleep; waiting times are ``envs.tools``' affair.

    A world may set ``done = True`` to end the episode after a call.
    """

    tools: tuple[ToolSpec, ...]

    def reset(self, task: Task) -> list[Message]:
        """Puts the world into the task's first state; returns the conversation's first messages."""
        ...

    async def step(self, call: ToolCall) -> str:
        """Runs one call and returns the observation. Raises for program faults; a bad argument is
        an observation that says so.
        """
        ...

    async def reply(self, content: str) -> Message | None:
        """The answer to an assistant turn without calls: a user message, or None: episode over."""
        ...

    def fork(self) -> World:
        """An independent copy at the same state; copy-on-write where the state is large."""
        ...

    @property
    def state_version(self) -> str:
        """Digest of base revision and changed rows; an undone write gives the old one back."""
        ...

    def score(self) -> Score:
        """The verdict, once the episode is over."""
        ...


class Expert(Protocol):
    """A scripted policy for one task; see ``envs.experts`` for what it returns."""

    def act(self, observations: list[str] | str | None) -> Any:
        """The next turn (an ``AssistantAct``) given what came back: None on the first turn, the
        observations after calls, a text after a user's reply.
        """
        ...


class WorldSource(Protocol):
    """Makes worlds of one kind, their tasks by split, and experts for them."""

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools of its worlds."""
        ...

    def new(self) -> World:
        """A fresh world, to be reset with one of the tasks."""
        ...

    def tasks(self, split: str) -> list[Task]:
        """The tasks of a split: train, validation or test."""
        ...

    def expert_tasks(self) -> list[Task]:
        """The tasks that ``expert`` can play, for imitation."""
        ...

    def expert(self, task: Task, seed: int) -> Expert:
        """A scripted policy for the task."""
        ...

    def pieces(self) -> list[str]:
        """Text pieces that the embedded word tokenizer should hold."""
        ...
