"""Whatever a tool does is an observation; only cancellation goes up."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics

import pytest
from fakes import SPECS, TASK, FakeShop

from agentspec.envs.tools import ToolBox, ToolLatency
from agentspec.speculation.clock import run_simulated
from agentspec.types import ToolCall, ToolSpec

ANY = {"type": "object"}


class OneTool:
    """A world with the tool ``t`` that does ``act(arguments)``."""

    def __init__(self, act, **spec):
        self.tools = (ToolSpec("t", "", ANY, **spec),)
        self.act = act
        self.state_version = "v"

    async def step(self, call):
        return await self.act(**call.arguments)


def observe(act, call=None, time_limit_s=1.0, max_chars=100, **box):
    async def main():
        toolbox = ToolBox(OneTool(act, time_limit_s=time_limit_s), max_chars=max_chars, **box)
        text = await toolbox.run(call or ToolCall("t"), 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}  # nothing is left behind
        return text, asyncio.get_running_loop().time()

    return run_simulated(main())


def returning(value):
    async def act():
        return value

    return act


async def hang():
    await asyncio.sleep(1e9)


@pytest.mark.parametrize(
    "value, expected",
    [
        ("plain", "plain"),
        (b"abc", "abc"),
        (b"a\xffb", "a\ufffdb"),
        ("a\ud800b", "a\ufffdb"),
        ("\U0001f600", "\U0001f600"),
        (None, "null"),
        ({"k": [1, "é"]}, '{"k": [1, "é"]}'),
        (1.5, "1.5"),
        ("", ""),
    ],
)
def test_any_result_becomes_text(value, expected):
    text, _ = observe(returning(value))
    assert text == expected
    text.encode("utf-8")


@pytest.mark.parametrize("value", ["x" * 10_000_000, b"x" * 10_000_000])
def test_ten_megabytes_are_cut_with_a_marker(value):
    text, _ = observe(returning(value))
    assert text == "x" * 100 + "\n[cut: the first 100 of 10000000 characters]"


def test_a_raising_tool_is_an_observation():
    async def act():
        raise KeyError("row 7")

    assert observe(act)[0] == "error: t: KeyError: 'row 7'"

    async def leave():
        raise SystemExit(2)

    assert observe(leave)[0] == "error: t: SystemExit: 2"

    async def cancel_itself():
        raise asyncio.CancelledError

    assert observe(cancel_itself)[0] == "error: t: the tool gave up"


def test_a_hanging_tool_ends_at_its_limit():
    text, now = observe(hang, time_limit_s=2.5)
    assert text == "error: t: no result within its time limit of 2.5 s"
    assert now == 2.5


def test_a_tool_that_ignores_cancellation_is_waited_for_only_so_long():
    async def stubborn():
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            await asyncio.sleep(3.0)

    text, now = observe(stubborn, time_limit_s=1.0, clean_up_limit_s=4.0)
    assert text.startswith("error: t: no result within") and now == 4.0


def test_b111_clean_up_is_outside_the_time_limit():
    async def clean_up(call):
        await asyncio.sleep(0.050)

    text, now = observe(returning("answer"), time_limit_s=0.020, clean_up=clean_up)
    assert text == "answer" and now == pytest.approx(0.050)

    async def endless(call):
        await asyncio.sleep(1e9)

    text, now = observe(returning("answer"), clean_up=endless, clean_up_limit_s=0.5)
    assert text == "answer" and now == pytest.approx(0.5)

    async def broken(call):
        raise OSError("disk")

    assert observe(returning("answer"), clean_up=broken)[0] == "answer"


def test_unknown_tool_and_schema_violations_name_what_is_wrong():
    async def main():
        world = FakeShop()
        world.reset(TASK)
        toolbox = ToolBox(world)
        texts = [
            await toolbox.run(call, 0)
            for call in (
                ToolCall("nope", {}),
                ToolCall("get", {}),
                ToolCall("get", {"key": 5}),
                ToolCall("put", {"key": "a", "value": True}),
                ToolCall("put", {"key": "a", "value": 1, "extra": 2}),
            )
        ]
        assert world.steps == [] and toolbox.executions == []
        return texts

    unknown, missing, wrong, boolean, extra = run_simulated(main())
    assert unknown == "error: unknown tool 'nope'; the tools are: get, search, put, fail"
    assert missing.startswith("error: get: ") and "'key'" in missing
    assert wrong.startswith("error: get: argument 'key': 5 is not")
    assert boolean.startswith("error: put: argument 'value': True is not")
    assert "'extra'" in extra


def test_valid():
    toolbox = ToolBox(FakeShop())
    assert toolbox.valid(ToolCall("get", {"key": "a"}))
    assert not toolbox.valid(ToolCall("get", {"key": 1}))
    assert not toolbox.valid(ToolCall("unknown", {}))


def in_turn(delays_s, read_only):
    world = OneTool(None, read_only=read_only)
    started = []

    async def act(name, wait_s):
        started.append((name, asyncio.get_running_loop().time()))
        await asyncio.sleep(wait_s)
        if name == "b":
            raise ValueError("b failed")
        return name

    world.act = act
    calls = [ToolCall("t", {"name": n, "wait_s": s}) for n, s in delays_s.items()]

    async def main():
        toolbox = ToolBox(world)
        results = await toolbox.run_turn(calls, 0)
        assert toolbox.serial_s(calls, results) == pytest.approx(asyncio.get_running_loop().time())
        return [r.text for r in results], asyncio.get_running_loop().time()

    return *run_simulated(main()), started


def test_b110_results_keep_the_order_of_the_calls():
    delays = {"a": 0.030, "b": 0.010, "c": 0.020}
    expected = ["a", "error: t: ValueError: b failed", "c"]
    texts, now, started = in_turn(delays, read_only=True)
    assert texts == expected
    assert now == pytest.approx(0.030)  # side by side
    texts, now, started = in_turn(delays, read_only=False)
    assert texts == expected
    assert now == pytest.approx(0.060)  # one after the other
    assert [name for name, _ in started] == ["a", "b", "c"]


def test_a_write_between_reads_runs_alone():
    async def main():
        world = FakeShop()
        world.reset(TASK)
        toolbox = ToolBox(world, latency=ToolLatency(1.0))
        calls = [
            ToolCall("get", {"key": "a"}),
            ToolCall("search", {"key": "a"}),
            ToolCall("put", {"key": "a", "value": 5}),
            ToolCall("get", {"key": "a"}),
        ]
        results = await toolbox.run_turn(calls, 0)
        return [r.text.split()[:2] for r in results], asyncio.get_running_loop().time()

    texts, now = run_simulated(main())
    assert texts == [["get", "1"], ["search", "1"], ["ok"], ["get", "5"]]
    assert now == 3.0  # two reads at once, the write, the read after it


@pytest.mark.parametrize("n_calls", [1, 3])
def test_b113_cancellation_goes_up_and_leaves_no_task(n_calls):
    ended = []

    async def act():
        try:
            await asyncio.sleep(10)
        finally:
            ended.append(1)

    async def main():
        toolbox = ToolBox(OneTool(act, read_only=True))
        task = asyncio.create_task(toolbox.run_turn([ToolCall("t")] * n_calls, 0))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_simulated(main())
    assert ended == [1] * n_calls


def test_latency_is_a_function_of_call_and_state():
    latency = ToolLatency(0.3, per_tool={"put": 2.0}, spread=0.5)
    get = dataclasses.replace(
        SPECS[0],
        parameters={"type": "object", "properties": {"key": {}, "k": {"default": 3}}},
    )
    a = latency(ToolCall("get", {"key": "a"}), "v1", get)
    assert a == latency(ToolCall("get", {"key": "a"}), "v1", get)
    assert a == latency(ToolCall("get", {"k": 3.0, "key": "a"}), "v1", get)  # canonically equal
    assert a != latency(ToolCall("get", {"key": "a"}), "v2", get)
    assert a != latency(ToolCall("get", {"key": "b"}), "v1", get)
    assert ToolLatency(0.3, {"put": 2.0})(ToolCall("put"), "v") == 2.0
    draws = [latency(ToolCall("get", {"key": str(i)}), "v") for i in range(2000)]
    assert statistics.median(draws) == pytest.approx(0.3, rel=0.05)
    assert statistics.stdev(map(math.log, draws)) == pytest.approx(0.5, rel=0.06)


def test_the_wait_counts_against_the_time_limit():
    async def main():
        world = OneTool(returning("x"), time_limit_s=1.0)
        toolbox = ToolBox(world, latency=ToolLatency(5.0))
        return await toolbox.run(ToolCall("t")), asyncio.get_running_loop().time()

    text, now = run_simulated(main())
    assert text.startswith("error: t: no result within") and now == 1.0
