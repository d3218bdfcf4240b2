"""The border between agent and tools: whatever a tool does becomes an observation.

In: a call of the agent. Out: a text, always valid UTF-8 and at most ``max_chars`` long. A tool that
is unknown, called with wrong arguments, raises, hangs, returns bytes, nothing or 10 MB is data that
the agent sees (``error: ...``). Only cancellation of the episode goes up as an exception. A step
that blocks the thread itself cannot be interrupted; such tools belong in a process of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol

import jsonschema

from agentspec.envs.base import World
from agentspec.rewards.calls import canonical_call
from agentspec.types import ToolCall, ToolSpec

log = logging.getLogger(__name__)

Status = Literal["ok", "invalid", "raised", "timeout"]


class Latency(Protocol):
    """How long a tool takes beyond its own step; a function of (call, state) only."""

    def __call__(self, call: ToolCall, state_version: str, spec: ToolSpec | None = None) -> float:
        """Seconds to wait before the world's step."""
        ...


@dataclasses.dataclass(frozen=True)
class ToolLatency:
    """Log-normal waits, drawn by a hash of (canonical call, ``state_version``).

    ``per_tool`` overrides ``default_s``, the median; ``spread`` is the standard deviation of the
    logarithm, 0 for constant waits.
    """

    default_s: float = 0.0
    per_tool: Mapping[str, float] = dataclasses.field(default_factory=dict)
    spread: float = 0.0

    def __call__(self, call: ToolCall, state_version: str, spec: ToolSpec | None = None) -> float:
        """Seconds; the same for equal canonical calls in equal states."""
        median_s = self.per_tool.get(call.name, self.default_s)
        if self.spread == 0.0 or median_s == 0.0:
            return median_s
        key = repr((canonical_call(call, spec), state_version)).encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(key).digest()
        u, v = (int.from_bytes(digest[i : i + 8], "big") + 0.5 for i in (0, 8))
        normal = math.sqrt(-2 * math.log(u / 2**64)) * math.cos(2 * math.pi * v / 2**64)
        return median_s * math.exp(self.spread * normal)


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """An observation, how the tool came to it, and when it ran on the loop's clock."""

    text: str
    status: Status
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long the tool took, its clean-up included."""
        return self.end_s - self.start_s


Serve = Callable[[ToolCall, int], Coroutine[Any, Any, ToolResult]]


class ToolBox:
    """Runs the calls of one world. ``executions`` records every run that reached the tool."""

    def __init__(
        self,
        world: World,
        latency: Latency | None = None,
        max_chars: int = 16_000,
        clean_up: Callable[[ToolCall], Awaitable[None]] | None = None,
        clean_up_limit_s: float = 5.0,
    ) -> None:
        """``clean_up`` runs after each step, outside the tool's time limit, within its own."""
        self.world = world
        self.max_chars = max_chars
        self.executions: list[tuple[int, ToolCall]] = []
        self._latency = latency
        self._clean_up = clean_up
        self._clean_up_limit_s = clean_up_limit_s

    def spec(self, name: str) -> ToolSpec | None:
        """The declared tool of that name; None if there is none."""
        return next((spec for spec in self.world.tools if spec.name == name), None)

    def valid(self, call: ToolCall) -> bool:
        """Whether the tool is known and the arguments fit its schema."""
        return self.problem(call) is None

    def problem(self, call: ToolCall) -> str | None:
        """What is wrong with a call, naming the key; None for a valid one."""
        spec = self.spec(call.name)
        if spec is None:
            names = ", ".join(s.name for s in self.world.tools) or "none"
            return f"unknown tool {_short(call.name)!r}; the tools are: {names}"
        validator = _validator(json.dumps(spec.parameters, sort_keys=True))
        try:
            errors = sorted(validator.iter_errors(call.arguments), key=_place)
        except RecursionError:
            return f"{spec.name}: the arguments are nested too deeply"
        if not errors:
            return None
        return f"{spec.name}: " + "; ".join(f"{_place(e)}{_short(e.message)}" for e in errors[:3])

    def latency(self, call: ToolCall, state_version: str) -> float:
        """Seconds that the call waits before the world's step; deterministic."""
        if self._latency is None:
            return 0.0
        return self._latency(call, state_version, self.spec(call.name))

    async def run(self, call: ToolCall, turn: int = 0) -> str:
        """The observation of one call. Raises nothing but ``CancelledError``."""
        return (await self.execute(call, turn)).text

    async def run_turn(
        self, calls: Sequence[ToolCall], turn: int, serve: Serve | None = None
    ) -> list[ToolResult]:
        """The results of a turn's calls, in their order, whichever finished first.

        Neighbouring read-only calls run side by side; any other call runs alone. ``serve`` may
        stand in for ``execute``.
        """
        serve = serve or self.execute
        results: list[ToolResult] = []
        for batch in self._batches(calls):
            if len(batch) == 1:
                results.append(await serve(batch[0], turn))
                continue
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(serve(call, turn)) for call in batch]
            results.extend(task.result() for task in tasks)
        return results

    def serial_s(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> float:
        """Seconds that ``run_turn`` takes when each call lasts as long as its result says."""
        rest = iter(results)
        return sum(max(next(rest).seconds for _ in batch) for batch in self._batches(calls))

    def _batches(self, calls: Sequence[ToolCall]) -> list[list[ToolCall]]:
        batches: list[list[ToolCall]] = []
        joinable = False
        for call in calls:
            spec = self.spec(call.name)
            read_only = spec is not None and spec.read_only
            if read_only and joinable:
                batches[-1].append(call)
            else:
                batches.append([call])
            joinable = read_only
        return batches

    async def execute(self, call: ToolCall, turn: int = 0) -> ToolResult:
        """Runs one call: wait, step, clean-up. The time limit covers wait and step only.

        Raises ``jsonschema.SchemaError`` if the tool's own declaration is broken.
        """
        clock = asyncio.get_running_loop()
        start_s = clock.time()
        problem = self.problem(call)
        spec = self.spec(call.name)
        if problem is not None or spec is None:
            return ToolResult(f"error: {problem}", "invalid", start_s, start_s)
        self.executions.append((turn, call))
        step = asyncio.ensure_future(self._step(call))
        try:
            await asyncio.wait({step}, timeout=spec.time_limit_s)
            finished = step.done()
        finally:
            await self._stop(step, call)
        end_s = clock.time()
        if not finished:
            text = f"error: {call.name}: no result within its time limit of {spec.time_limit_s:g} s"
            return ToolResult(text, "timeout", start_s, end_s)
        if step.cancelled():
            return ToolResult(f"error: {call.name}: the tool gave up", "raised", start_s, end_s)
        text, status = step.result()
        return ToolResult(text, status, start_s, end_s)

    async def _step(self, call: ToolCall) -> tuple[str, Status]:
        try:
            wait_s = self.latency(call, self.world.state_version)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            return self._text(await self.world.step(call)), "ok"
        except (Exception, SystemExit) as error:  # the tool border: any failure is an observation
            what = _clean(f"{type(error).__name__}: {error}".removesuffix(": "))
            return self._cut(f"error: {call.name}: {what}"), "raised"

    async def _stop(self, step: asyncio.Future[Any], call: ToolCall) -> None:
        """Ends the step and cleans up, each within ``clean_up_limit_s``; never raises for them."""
        if not step.done():
            step.cancel()
            await asyncio.wait({step}, timeout=self._clean_up_limit_s)
            if not step.done():
                log.warning("tool %s does not end after cancellation; abandoned", call.name)
        if self._clean_up is None:
            return
        clean_up = asyncio.ensure_future(self._clean_up(call))
        try:
            await asyncio.wait({clean_up}, timeout=self._clean_up_limit_s)
        finally:
            clean_up.cancel()
            await asyncio.wait({clean_up}, timeout=self._clean_up_limit_s)
        if not clean_up.cancelled() and clean_up.done() and clean_up.exception() is not None:
            log.warning("clean-up after %s failed: %r", call.name, clean_up.exception())

    def _text(self, value: Any) -> str:
        if isinstance(value, (bytes, bytearray, memoryview)):
            value = bytes(value).decode("utf-8", "replace")
        elif not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False, default=str)
        return self._cut(_clean(value))

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_chars:
            return text
        note = f"[cut: the first {self.max_chars} of {len(text)} characters]"
        return f"{text[: self.max_chars]}\n{note}"


def _clean(text: str) -> str:
    """Lone surrogates, which UTF-8 cannot hold, become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _place(error: Any) -> str:
    path = ".".join(str(part) for part in error.absolute_path)
    return f"argument {path!r}: " if path else ""


@functools.lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    """The validator of a JSON schema's text; checking a schema costs more than using it."""
    parameters = json.loads(schema)
    jsonschema.Draft202012Validator.check_schema(parameters)
    return jsonschema.Draft202012Validator(parameters)


def _short(text: str, limit: int = 200) -> str:
    return _clean(text if len(text) <= limit else f"{text[:limit]}...")
