"""Runs predicted calls before the agent asks for them, and hands their results over.

In: candidates of one turn as they arrive, then the agent's calls. Out: results, equal to what the
agent's own runs would have given. Only tools declared read-only and repeatable are run; a result is
used if the calls are canonically equal and the world is in the state it was computed from.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from agentspec.envs.tools import ToolBox, ToolResult
from agentspec.rewards.calls import same_call
from agentspec.types import Candidate, ToolCall, ToolSpec


@dataclasses.dataclass
class Budget:
    """How many pre-executions may be started; ``None`` is no bound."""

    calls_per_turn: int = 1
    calls_per_episode: int | None = None


class PreExecution:
    """One call that runs or ran ahead, from ``start_s`` to ``end_s`` on the loop's clock.

    ``status``: empty until settled, then hit | miss | failed | stale | cancelled.
    """

    def __init__(self, toolbox: ToolBox, call: ToolCall, turn: int) -> None:
        """Starts the call."""
        self.call = call
        self.status = ""
        self.start_s = self.end_s = asyncio.get_running_loop().time()
        self._toolbox = toolbox
        self._versions = [toolbox.world.state_version]
        self.task = asyncio.create_task(self._run(turn))

    async def _run(self, turn: int) -> ToolResult:
        try:
            result = await self._toolbox.execute(self.call, turn)
            self._versions.append(self._toolbox.world.state_version)
            return result
        finally:
            self.end_s = asyncio.get_running_loop().time()

    async def result(self) -> ToolResult | None:
        """The result, awaited if need be; None if it failed or is of another state of the world."""
        world = self._toolbox.world
        if self.status not in ("", "hit"):
            return None
        if self._versions[0] == world.state_version:
            await asyncio.wait({self.task})
        if set(self._versions) != {world.state_version} or not self.task.done():
            self.drop("stale")
        elif self.task.result().status != "ok":
            self.drop("failed")
        else:
            self.status = "hit"
            return self.task.result()
        return None

    def drop(self, status: str) -> None:
        """Cancels the run if it still runs; a status once given stays, as of a hit gone stale."""
        self.status = self.status or status
        self.task.cancel()


class PreExecutor:
    """The pre-executions of one turn. ``spent`` were started in earlier turns."""

    def __init__(self, toolbox: ToolBox, budget: Budget, turn: int, spent: int) -> None:
        """Nothing runs yet."""
        self.entries: list[PreExecution] = []
        self._toolbox = toolbox
        self._turn = turn
        left = budget.calls_per_turn
        if budget.calls_per_episode is not None:
            left = min(left, budget.calls_per_episode - spent)
        self._left = left
        self._open = True

    def offer(self, candidate: Candidate) -> None:
        """Starts the candidate's call if it may run ahead and the budget allows it."""
        call = candidate.call
        if not self._open or self._left <= 0 or call is None or not self.allowed(call):
            return
        if self.entry(call) is not None:
            return
        self._left -= 1
        self.entries.append(PreExecution(self._toolbox, call, self._turn))

    def allowed(self, call: ToolCall) -> bool:
        """Whether the tool is known, declared pre-executable, and the arguments fit its schema."""
        spec = self.spec(call)
        return spec is not None and spec.preexecutable and self._toolbox.valid(call)

    def settle(self, calls: Sequence[ToolCall]) -> None:
        """The agent's calls are known: nothing more is started, what matches none is cancelled."""
        self._open = False
        for entry in self.entries:
            spec = self.spec(entry.call)
            if not any(same_call(entry.call, call, spec) for call in calls):
                entry.drop("miss")

    async def serve(self, call: ToolCall, turn: int) -> ToolResult:
        """The result of the agent's call: a pre-execution's if one fits, else of its own run."""
        spec = self.spec(call)
        if spec is None or not spec.read_only:
            self._before_write()
        # A default that stands for a missing required key makes an invalid call equal a valid one.
        entry = self.entry(call) if self._toolbox.valid(call) else None
        result = await entry.result() if entry is not None else None
        return result if result is not None else await self._toolbox.execute(call, turn)

    def gave(self, result: ToolResult) -> bool:
        """Whether a result that ``serve`` returned came from a pre-execution."""
        return any(e.status == "hit" and e.task.result() is result for e in self.entries)

    def _before_write(self) -> None:
        """A run that a write overtakes could see half of it, so it ends here."""
        for entry in self.entries:
            if not entry.task.done():
                entry.drop("stale")

    async def close(self) -> None:
        """Cancels what still runs and waits until it has ended."""
        self._open = False
        for entry in self.entries:
            entry.drop("cancelled")
        if self.entries:
            await asyncio.wait({entry.task for entry in self.entries})

    def spec(self, call: ToolCall) -> ToolSpec | None:
        """The declared tool of a call."""
        return self._toolbox.spec(call.name)

    def entry(self, call: ToolCall) -> PreExecution | None:
        """The pre-execution of this call, whatever became of it."""
        spec = self.spec(call)
        return next((e for e in self.entries if same_call(e.call, call, spec)), None)
