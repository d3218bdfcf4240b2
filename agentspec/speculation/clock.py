"""Simulated time: an asyncio event loop whose clock jumps (design, idea 5).

Stage: under everything that waits. In: coroutines that use plain ``asyncio.sleep``, ``wait_for``
and time limits. Out: the same results in the same order as on a wall clock on which computing
costs nothing, in milliseconds. Waiting costs come from ``LatencyModel`` and from tools' sleeps.

One turn of the loop when no callback is ready: serve file descriptors that are ready; wait for
threads in flight (their work takes no simulated time); run the idle hooks; only if none of them
did anything, set the clock to the next timer. Nothing here imports JAX.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import dataclasses
import heapq
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
IdleHook = Callable[[], bool]


class SimulationDeadlock(RuntimeError):
    """Everything waits and no timer, hook, thread or file descriptor can ever wake it."""


@dataclasses.dataclass(frozen=True)
class LatencyModel:
    """Modelled time of generation: seconds per sampled token and per prefilled token."""

    token_s: float = 0.0
    prefill_token_s: float = 0.0

    def generate_s(self, n_prefilled: int, n_sampled: int) -> float:
        """Seconds that reading ``n_prefilled`` ids and then sampling ``n_sampled`` takes."""
        return self.prefill_token_s * n_prefilled + self.token_s * n_sampled


class _Timer(asyncio.TimerHandle):
    """A timer; those with equal deadlines run in the order in which they were set."""

    def __init__(self, order: int, when: float, *rest: Any) -> None:
        super().__init__(when, *rest)
        self.order = order

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        if isinstance(other, _Timer) and self.when() == other.when():
            return self.order < other.order
        return self.when() < other.when()


class _Selector(selectors.DefaultSelector):
    """Asks the loop what to do instead of sleeping."""

    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        return super().select(None) if self.loop._on_idle() else []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose ``time()`` starts at ``start`` seconds and moves only by jumps.

    Deterministic as long as the coroutines are: callbacks run in the order in which they became
    ready, timers by (deadline, order of setting).
    """

    def __init__(self, *, start: float = 0.0) -> None:
        """Makes a loop whose clock shows ``start`` seconds."""
        self._now = start
        self._timers_set = 0
        self._threads = 0
        self._idle_hooks: list[IdleHook] = []
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self._own_fds = len(selector.get_map())  # the pipe by which threads wake the loop

    def time(self) -> float:
        """The simulated time in seconds."""
        return self._now

    def add_idle_hook(self, hook: IdleHook) -> None:
        """Has ``hook`` called whenever nothing is ready, before time jumps.

        A hook returns True when it did something (the loop then looks for ready callbacks first).
        Hooks run in the order in which they were added.
        """
        self._idle_hooks.append(hook)

    def remove_idle_hook(self, hook: IdleHook) -> None:
        """Takes a hook out again; ValueError when it is not there."""
        self._idle_hooks.remove(hook)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Like the base class, with equal deadlines served first in, first out."""
        self._check_closed()  # type: ignore[attr-defined]
        self._timers_set += 1
        timer = _Timer(self._timers_set, when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_in_executor(
        self,
        executor: concurrent.futures.Executor | None,
        func: Callable[[*Ts], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Like the base class; the clock stands still until the thread is done."""
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        """Like the base class, whose plain thread must be waited for like an executor's."""
        self._threads += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._threads -= 1

    def _thread_done(self, _: object) -> None:
        self._threads -= 1

    def _on_idle(self) -> bool:
        """Makes something happen; True when only real I/O or a thread can, so block for it."""
        if self._threads:
            return True
        # A list, not a generator: every hook gets its turn, so that no engine starves another.
        if any([hook() for hook in tuple(self._idle_hooks)]):
            return False
        timers = self._scheduled  # type: ignore[attr-defined]
        if timers:
            self._now = max(self._now, timers[0].when())
            return False
        if len(self._selector.get_map()) > self._own_fds:  # type: ignore[attr-defined]
            return True
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        waiting = "; ".join(f"{task.get_name()} in {_where(task)}" for task in tasks)
        raise SimulationDeadlock(
            f"at {self._now:g} s of simulated time everything waits and nothing can wake it "
            f"(no timer, idle hook, thread or I/O): {waiting or 'no tasks'}"
        )


def _where(task: asyncio.Task[Any]) -> str:
    """Function and line at which a suspended task waits."""
    frames = task.get_stack()
    name = getattr(task.get_coro(), "__qualname__", repr(task.get_coro()))
    if not frames:
        return str(name)
    innermost = frames[-1]
    return f"{name} ({innermost.f_code.co_filename}:{innermost.f_lineno})"


def run_simulated(main: Coroutine[Any, Any, T], *, start: float = 0.0) -> T:
    """Runs ``main`` on a fresh ``SimulatedLoop`` and returns its result; ``asyncio.run`` else.

    Tasks that are left over are cancelled. Raises ``SimulationDeadlock`` instead of hanging.
    """
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(start=start)) as runner:
        return runner.run(main)
