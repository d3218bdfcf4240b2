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
from agentspec.types import Candidate, ToolCall


@dataclasses.dataclass
class Budget:
    """How many pre-executions may be started; ``None`` is no bound."""

    calls_per_turn: int = 1
    calls_per_episode: int | None = None


@dataclasses.dataclass
class PreExecution:
    """One call that runs or ran ahead. ``status`` is empty until it is settled."""

    call: ToolCall
    version: str
    task: asyncio.Task[ToolResult]
    start_s: float
    end_s: float | None = None
    end_version: str = ""
    status: str = ""  # hit | miss | failed | stale | cancelled


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
        if any(self._same(entry.call, call) for entry in self.entries):
            return
        self._left -= 1
        entry = PreExecution(
            call=call,
            version=self._toolbox.world.state_version,
            task=asyncio.create_task(self._toolbox.execute(call, self._turn)),
            start_s=asyncio.get_running_loop().time(),
        )
        entry.task.add_done_callback(lambda _: self._ended(entry))
        self.entries.append(entry)

    def allowed(self, call: ToolCall) -> bool:
        """Whether the tool is known, declared pre-executable, and the arguments fit its schema."""
        spec = self._toolbox.spec(call.name)
        return spec is not None and spec.preexecutable and self._toolbox.valid(call)

    async def settle(self, calls: Sequence[ToolCall]) -> None:
        """The agent's calls are known: nothing more is started, what matches none is cancelled."""
        self._open = False
        for entry in self.entries:
            if not any(self._same(entry.call, call) for call in calls):
                self._drop(entry, "miss")
        await asyncio.sleep(0)  # lets the cancelled runs end before the agent's own begin

    async def serve(self, call: ToolCall, turn: int) -> tuple[ToolResult, bool]:
        """The result of the agent's call, and whether a pre-execution gave it."""
        entry = next((e for e in self.entries if self._same(e.call, call)), None)
        spec = self._toolbox.spec(call.name)
        if entry is not None and entry.status in ("", "hit"):
            if entry.version == self._toolbox.world.state_version:
                await asyncio.wait({entry.task})
            result = self._result(entry)
            if result is not None:
                entry.status = "hit"
                return result, True
        elif spec is None or not spec.read_only:
            self._before_write()
        return await self._toolbox.execute(call, turn), False

    def _result(self, entry: PreExecution) -> ToolResult | None:
        """The finished result if it may be used; settles the entry if not."""
        now = self._toolbox.world.state_version
        if not entry.version == entry.end_version == now or not entry.task.done():
            self._drop(entry, "stale")
            return None
        result = entry.task.result()
        if result.status != "ok":
            self._drop(entry, "failed")
            return None
        return result

    def _before_write(self) -> None:
        """A run that a write overtakes could see half of it, so it ends here."""
        for entry in self.entries:
            if not entry.task.done():
                self._drop(entry, "stale")

    async def close(self) -> None:
        """Cancels what still runs and waits until it has ended."""
        self._open = False
        for entry in self.entries:
            self._drop(entry, entry.status or "cancelled")
        if self.entries:
            await asyncio.wait({entry.task for entry in self.entries})

    def _drop(self, entry: PreExecution, status: str) -> None:
        entry.status = status
        entry.task.cancel()

    def _ended(self, entry: PreExecution) -> None:
        entry.end_s = asyncio.get_running_loop().time()
        entry.end_version = self._toolbox.world.state_version

    def _same(self, a: ToolCall, b: ToolCall) -> bool:
        return same_call(a, b, self._toolbox.spec(b.name))
