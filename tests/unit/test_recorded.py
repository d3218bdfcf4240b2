"""The remembering engine serves what the engine under it samples, at the times of its model."""

from __future__ import annotations

import asyncio

import pytest
from fakes import TASK, FakeEngine, FakeShop, Oracle, make_chat, random_policy

from agentspec.envs.episode import EpisodeLimits, run_episode
from agentspec.envs.tools import ToolBox, ToolLatency
from agentspec.rollout.recorded import RecordedEngine
from agentspec.speculation import runtime
from agentspec.speculation.clock import LatencyModel, run_simulated
from agentspec.types import SamplingParams

CHAT = make_chat()
PARAMS = SamplingParams(1.0, 64, CHAT.stop_ids)


def policy(ids, seed, mode):
    """Depends on every id and on the seed, not on the mode: as the engine promises."""
    return f"{sum(ids) % 97} {seed} {len(ids)}"


def engines(token_s=0.0):
    inner = FakeEngine(CHAT, policy, token_s)
    return inner, RecordedEngine(inner)


def run(main):
    return run_simulated(main())


async def walk(engine, mode="agent"):
    """Three samples with text between them, and a fork at every step; everything they gave."""
    seq = engine.open([1, 2, 3], seed=5, mode=mode)
    seen = []
    for i in range(3):
        fork = seq.fork(seed=100 + i, mode="speculator")
        fork.extend([7, 8])
        seen += [await seq.sample(PARAMS), await fork.sample(PARAMS), await fork.sample(PARAMS)]
        seen += [tuple(seq.ids), tuple(fork.ids)]
        fork.close()
        seq.extend([50 + i])
    seq.close()
    return seen


def test_what_is_served_is_what_would_be_sampled():
    inner, recorded = engines()
    plain = run(lambda: walk(inner))
    assert run(lambda: walk(recorded)) == plain
    assert recorded.misses == 9
    assert run(lambda: walk(recorded)) == plain
    assert recorded.misses == 9, "the second walk is served from memory"
    assert not inner.live


def test_the_second_time_the_engine_is_not_asked_at_all():
    inner, recorded = engines()
    first = run(lambda: walk(recorded))
    inner.policy = None  # any sample would fail
    assert run(lambda: walk(recorded)) == first


def test_other_ids_seeds_and_parameters_are_other_samples():
    inner, recorded = engines()

    async def main():
        found = {}
        for ids, seed, tokens in [([1], 0, 64), ([2], 0, 64), ([1], 1, 64), ([1], 0, 2)]:
            seq, plain = recorded.open(ids, seed), inner.open(ids, seed)
            params = SamplingParams(1.0, tokens, CHAT.stop_ids)
            found[tuple(ids), seed, tokens] = await seq.sample(params)
            assert found[tuple(ids), seed, tokens] == await plain.sample(params)
        return found

    found = run(main)
    assert recorded.misses == 4 and len(set(found.values())) == 4
    assert found[(1,), 0, 2].finish == "length"


def test_what_is_not_known_is_sampled_on_from_what_was_served():
    """Served turns are caught up on: the engine's own sequence gets their ids first."""
    inner, recorded = engines()

    async def first():
        seq = recorded.open([1, 2], seed=3)
        await seq.sample(PARAMS)
        seq.extend([9])
        await seq.sample(PARAMS)

    async def further(engine):
        seq = engine.open([1, 2], seed=3)
        await seq.sample(PARAMS)  # known
        seq.extend([9])
        await seq.sample(PARAMS)  # known
        seq.extend([10])
        last = await seq.sample(PARAMS)  # new
        fork = seq.fork(seed=4)  # of a sequence that the engine now holds
        seq.extend([11])
        return last, await fork.sample(PARAMS), await seq.sample(PARAMS), tuple(seq.ids)

    run(first)
    assert recorded.misses == 2
    assert run(lambda: further(recorded)) == run(lambda: further(inner))
    assert recorded.misses == 5


def test_a_fork_keeps_the_ids_of_its_moment():
    _, recorded = engines()

    async def main():
        seq = recorded.open([1, 2], seed=3)
        early = seq.fork(seed=3)
        await seq.sample(PARAMS)
        late = seq.fork(seed=3)
        seq.extend([9])
        assert early.ids == [1, 2] and late.ids == seq.ids[:-1]
        again = await early.sample(PARAMS)
        assert [*early.ids] == late.ids and recorded.misses == 1
        assert early.mode == "agent" and seq.fork(seed=0, mode="speculator").mode == "speculator"
        return again

    run(main)


def test_times_are_those_of_the_model_not_of_the_engine():
    """0.5 s a sampled token, 0.25 s a token read; nothing is read twice."""
    _, recorded = engines(token_s=100.0)

    async def timed():
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        seq = recorded.open([1] * 4, seed=3)
        one = await seq.sample(PARAMS)
        first_s = loop.time() - start_s
        seq.extend([9, 9])
        fork = seq.fork(seed=8)
        start_s = loop.time()
        two = await seq.sample(PARAMS)
        second_s = loop.time() - start_s
        fork.extend([7])
        start_s = loop.time()
        three = await fork.sample(PARAMS)
        return [len(c.ids) for c in (one, two, three)], first_s, second_s, loop.time() - start_s

    run(timed)  # remembers, at the engine's own pace
    recorded.latency = LatencyModel(token_s=0.5, prefill_token_s=0.25)
    (a, b, c), first_s, second_s, third_s = run(timed)
    assert first_s == pytest.approx(0.5 * a + 0.25 * 4)
    assert second_s == pytest.approx(0.5 * b + 0.25 * 2)
    assert third_s == pytest.approx(0.5 * c + 0.25 * 3)  # the fork reads the two, and its own
    recorded.latency = None
    assert run(timed)[1:] == (0.0, 0.0, 0.0)


def test_a_fork_during_a_served_sample_has_the_ids_before_it():
    """Like the engine's: a speculator that comes late must not see what the agent will say."""
    _, recorded = engines()
    recorded.latency = LatencyModel(token_s=1.0)

    async def main():
        seq = recorded.open([1, 2], seed=3)
        task = asyncio.create_task(seq.sample(PARAMS))
        await asyncio.sleep(0.5)
        fork = seq.fork(seed=4)
        await task
        return list(fork.ids)

    assert run(main) == [1, 2]


@pytest.mark.parametrize("known", [False, True])
def test_a_cancelled_sample_leaves_the_sequence_as_it_was(known):
    inner, recorded = engines(token_s=1.0)

    async def whole(engine):
        return await engine.open([1, 2], seed=3).sample(PARAMS)

    async def main():
        seq = recorded.open([1, 2], seed=3)
        task = asyncio.create_task(seq.sample(PARAMS))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        return list(seq.ids), await seq.sample(PARAMS)

    if known:
        run(lambda: whole(recorded))
        recorded.latency = LatencyModel(token_s=1.0)
    ids, completion = run(main)
    assert completion == run(lambda: whole(inner))
    assert ids == [1, 2]


def play(engine, speculate=None, timed=False):
    """An episode of the random agent in the shop."""

    async def main():
        world = FakeShop()
        box = ToolBox(world, latency=ToolLatency(0.3) if timed else None)
        limits = EpisodeLimits(max_turns=6, max_turn_tokens=512, max_tokens=8000)
        args = (engine, world, TASK, CHAT, SamplingParams(1.0, 512, CHAT.stop_ids), limits, 11)
        if speculate is None:
            return await run_episode(*args, toolbox=box)
        return await runtime.run_episode(*args, toolbox=box, speculator=speculate)

    return run(main)


def test_an_episode_is_the_same_sampled_served_and_speculated():
    inner = FakeEngine(CHAT, random_policy)
    plain = play(inner)
    recorded = RecordedEngine(inner)
    first = play(recorded)
    misses = recorded.misses
    recorded.latency = LatencyModel(token_s=0.02)
    serial = play(recorded, timed=True)
    speculated = play(recorded, Oracle(inner, 11), timed=True)
    for other in (first, serial, speculated):
        for field in ("ids", "mask", "logps", "calls", "score", "final_state", "finish"):
            assert getattr(other, field) == getattr(plain, field), field
    assert recorded.misses == misses, "one pass samples, the others are served"
    assert plain.total_s == first.total_s == 0.0
    tokens = sum(plain.mask)
    assert serial.total_s == pytest.approx(0.02 * tokens + sum(u.tool_s for u in serial.turns))
    hidden_s = sum(u.hidden_s for u in speculated.turns)
    assert speculated.total_s == pytest.approx(serial.total_s - hidden_s) and hidden_s > 0
    assert not inner.live
