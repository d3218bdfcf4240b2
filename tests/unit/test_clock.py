"""Simulated time: jumps, order, time limits, threads, real I/O, idle hooks and deadlock."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from agentspec.speculation.clock import (
    LatencyModel,
    SimulatedLoop,
    SimulationDeadlock,
    run_simulated,
)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_sleeping_costs_no_real_time_and_exact_simulated_time():
    async def main():
        await asyncio.sleep(3600)
        await asyncio.gather(asyncio.sleep(10), asyncio.sleep(25), asyncio.sleep(0))
        return now()

    real = time.perf_counter()
    assert run_simulated(main(), start=100.0) == 100.0 + 3600 + 25
    assert time.perf_counter() - real < 2.0


def test_equal_deadlines_run_in_the_order_in_which_they_were_set():
    async def main():
        order = []

        async def one(i: int) -> None:
            await asyncio.sleep(5.0)
            order.append(i)

        await asyncio.gather(*map(one, range(200)))
        return order

    assert run_simulated(main()) == list(range(200))


def test_events_interleave_by_time_the_same_way_every_time():
    async def main():
        log = []

        async def ticker(name: str, period: float) -> None:
            for _ in range(3):
                await asyncio.sleep(period)
                log.append((name, now()))

        await asyncio.gather(ticker("a", 2.0), ticker("b", 3.0))
        return log

    expected = [("a", 2.0), ("b", 3.0), ("a", 4.0), ("b", 6.0), ("a", 6.0), ("b", 9.0)]
    assert run_simulated(main()) == run_simulated(main()) == expected


def test_time_limits_and_cancellation():
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10), 3)
        assert now() == 3
        assert await asyncio.wait_for(asyncio.sleep(2, "done"), 3) == "done"
        assert now() == 5
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4):
                await asyncio.Event().wait()
        assert now() == 9
        task = asyncio.ensure_future(asyncio.sleep(1000))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        done, pending = await asyncio.wait(
            [asyncio.ensure_future(asyncio.sleep(d)) for d in (5, 50)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert (len(done), len(pending), now()) == (1, 1, 15)
        return "left over tasks are cancelled"

    assert run_simulated(main())


def test_idle_hooks_run_before_time_jumps_and_only_when_nothing_is_ready():
    async def main():
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future] = []
        batches = []

        def hook() -> bool:
            batches.append((len(waiting), loop.time()))
            served = bool(waiting)
            while waiting:
                waiting.pop().set_result(None)
            return served

        loop.add_idle_hook(hook)

        async def ask(after: float) -> float:
            await asyncio.sleep(after)
            waiting.append(loop.create_future())
            await waiting[-1]
            return now()

        assert await asyncio.gather(*[ask(0) for _ in range(5)], ask(7)) == [0] * 5 + [7]
        loop.remove_idle_hook(hook)
        await asyncio.sleep(1)
        return [batch for batch in batches if batch[0]]

    assert run_simulated(main()) == [(5, 0.0), (1, 7.0)]


def test_every_hook_gets_its_turn():
    async def main():
        loop = asyncio.get_running_loop()
        calls = []
        end = loop.create_future()

        def hook(name: str) -> bool:
            calls.append(name)
            if len(calls) == 4:
                end.set_result(None)
            return True

        loop.add_idle_hook(lambda: hook("a"))
        loop.add_idle_hook(lambda: hook("b"))
        await end
        return calls

    assert run_simulated(main()) == ["a", "b", "a", "b"]


def test_an_error_in_a_hook_comes_out():
    async def main():
        def hook() -> bool:
            raise ZeroDivisionError("in the hook")

        asyncio.get_running_loop().add_idle_hook(hook)
        try:
            await asyncio.sleep(1)
        finally:
            asyncio.get_running_loop().remove_idle_hook(hook)

    with pytest.raises(ZeroDivisionError, match="in the hook"):
        run_simulated(main())


def test_time_stands_still_while_a_thread_works():
    async def main():
        timer = asyncio.ensure_future(asyncio.sleep(1.0))
        release = threading.Timer(0.05, lambda: None)
        release.start()
        await asyncio.to_thread(release.join)
        at = now()
        await timer
        return at, now()

    assert run_simulated(main()) == (0.0, 1.0)


def test_real_input_is_served():
    async def main():
        left, right = socket.socketpair()
        left.setblocking(False)
        sender = threading.Timer(0.05, right.send, [b"hello"])
        sender.start()
        data = await asyncio.get_running_loop().sock_recv(left, 5)  # no timer: waits for real
        for end in (left, right):
            end.close()
        return data, now()

    assert run_simulated(main()) == (b"hello", 0.0)


def test_waiting_for_ever_is_an_error_that_names_who_waits():
    async def stuck_consumer():
        await asyncio.Queue().get()

    async def main():
        task = asyncio.create_task(stuck_consumer(), name="consumer-7")
        await asyncio.sleep(12)
        await task

    with pytest.raises(SimulationDeadlock, match=r"at 12 s .*stuck_consumer \(.*test_clock.py:\d"):
        run_simulated(main())


def test_the_loop_is_an_ordinary_event_loop():
    loop = SimulatedLoop(start=2.0)
    try:
        assert isinstance(loop, asyncio.SelectorEventLoop)
        loop.call_later(3.0, loop.stop)
        loop.run_forever()
        assert loop.time() == 5.0
    finally:
        loop.close()


def test_latency_model():
    assert LatencyModel().generate_s(1000, 1000) == 0.0
    # 200 ids read at 0.25 ms and 30 sampled at 20 ms: 0.05 + 0.6
    assert LatencyModel(0.02, 0.00025).generate_s(200, 30) == pytest.approx(0.65)
