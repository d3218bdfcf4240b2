"""The speculated loop: lossless whatever the speculator does, and its times by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest
from fakes import (
    HOSTILE,
    SPECS,
    TASK,
    FakeEngine,
    FakeShop,
    Oracle,
    Raising,
    call_text,
    hostile,
    make_chat,
    random_policy,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.envs import episode
from agentspec.envs.tools import ToolBox, ToolLatency
from agentspec.speculation import runtime
from agentspec.speculation.candidates import hit_at_1, hit_report, parse_failure_frac
from agentspec.speculation.clock import run_simulated
from agentspec.speculation.events import serial_s, time_account
from agentspec.speculation.preexecute import Budget
from agentspec.speculation.speculators.selfspec import SelfSpeculator
from agentspec.types import Candidate, SamplingParams, Score, ToolCall, Trajectory, Turn

CHAT = make_chat()
LIMITS = episode.EpisodeLimits(max_turns=6, max_turn_tokens=300, max_tokens=3000)
SAMPLING = SamplingParams(1.0, 500, CHAT.stop_ids)
SEED = 11
GET_A, GET_B = ToolCall("get", {"key": "a"}), ToolCall("get", {"key": "b"})


def turns_policy(*texts):
    """The n-th turn's text is ``texts[n]``; the turn is counted by the assistant headers."""

    def policy(ids, seed, mode):
        headers = CHAT.tokenizer.decode(list(ids)).count("<|im_start|>assistant") - 1
        return texts[headers]

    return policy


@dataclasses.dataclass
class Run:
    t: Trajectory
    world: FakeShop
    box: ToolBox


def play(policy, make=None, *, tool_s=0.0, per_tool=(), spread=0.0, token_s=0.01, world=None,
         engine=None, **options):  # fmt: skip
    """One episode: plain without ``make``, else with the speculator ``make(engine)``."""
    world = world or FakeShop(replies=1)
    engine = engine or FakeEngine(CHAT, policy, token_s)
    box = ToolBox(world, latency=ToolLatency(tool_s, dict(per_tool), spread))
    arguments = (engine, world, TASK, CHAT, SAMPLING, LIMITS, SEED)

    async def main():
        if make is None:
            t = await episode.run_episode(*arguments, toolbox=box)
        else:
            t = await runtime.run_episode(
                *arguments, toolbox=box, speculator=make(engine), **options
            )
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return t

    t = run_simulated(main())
    assert not engine.live
    return Run(t, world, box)


def same(a: Trajectory, b: Trajectory) -> None:
    for field in ("ids", "mask", "logps", "score", "final_state", "finish", "version", "seed"):
        assert getattr(a, field) == getattr(b, field), field
    for x, y in zip(a.turns, b.turns, strict=True):
        for field in ("start", "end", "finish", "calls", "problems", "observations",
                      "state_version"):  # fmt: skip
            assert getattr(x, field) == getattr(y, field), field


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    salt=st.integers(0, 10**6),
    kind=st.sampled_from(HOSTILE),
    tool_s=st.sampled_from([0.0, 0.3, 3.0]),
    spread=st.sampled_from([0.0, 0.7]),
    calls_per_turn=st.integers(1, 3),
    measure_late=st.booleans(),
    agreement=st.sampled_from([0, 2]),
)
def test_lossless(salt, kind, tool_s, spread, calls_per_turn, measure_late, agreement):
    def policy(ids, seed, mode):
        return random_policy((salt, *ids), seed, mode)

    times = dict(tool_s=tool_s, spread=spread)
    plain = play(policy, **times)
    fast = play(
        policy,
        lambda engine: hostile(kind, engine, SEED),
        budget=Budget(calls_per_turn),
        measure_late=measure_late,
        agreement=agreement,
        **times,
    )
    same(plain.t, fast.t)
    own = [call for call in plain.world.steps if call.name != "get"]
    ran = [call for call in fast.world.steps if call.name not in ("get", "fail")]
    assert ran == [call for call in own if call.name != "fail"]  # writes, metered reads: as asked
    assert serial_s(fast.t) == pytest.approx(plain.t.total_s)
    if all(e.status != "failed" for e in fast.t.events):
        assert fast.t.total_s <= plain.t.total_s + 1e-9
    hidden = sum(turn.hidden_s for turn in fast.t.turns)
    assert plain.t.total_s - fast.t.total_s <= hidden + 1e-9
    for x, y in zip(plain.t.turns, fast.t.turns, strict=True):
        assert x.tool_s == pytest.approx(y.tool_s) and y.hidden_s >= 0
        assert len(y.hits) == len(y.calls)
        assert len(y.agreement_calls) == agreement


@pytest.mark.parametrize("tool_s", [0.2, 5.0])
@pytest.mark.parametrize("delay_s", [0.0, 0.25])
def test_saved_time_is_the_lesser_of_tool_and_head_start(tool_s, delay_s):
    text = call_text(("get", {"key": "a"}), thinking="x" * 30)
    policy = turns_policy(text, "done")
    agent_s = 0.01 * len(CHAT.turn_ids(text))  # from the turn's start to the agent's call
    assert agent_s > 0.4
    saved_s = min(tool_s, agent_s - delay_s)
    world = FakeShop()
    plain = play(policy, tool_s=tool_s, world=FakeShop())
    fast = play(policy, lambda e: Oracle(e, SEED, delay_s=delay_s), tool_s=tool_s, world=world)
    same(plain.t, fast.t)
    assert plain.t.total_s - fast.t.total_s == pytest.approx(saved_s)
    assert fast.t.turns[0].tool_s == pytest.approx(tool_s)
    assert fast.t.turns[0].hidden_s == pytest.approx(saved_s)
    assert fast.t.turns[0].hits == (True,)
    assert fast.t.turns[0].candidates[0].ready_s == pytest.approx(delay_s)
    assert world.steps == [GET_A]  # one execution serves it
    account = time_account([fast.t], plain=[plain.t])
    assert time_account([fast.t]) == pytest.approx(account)
    assert account["serial_s"] == pytest.approx(plain.t.total_s)
    assert account["hidden_s"] == pytest.approx(saved_s)
    assert account["hidden_frac"] == pytest.approx(saved_s / tool_s)
    assert account["hit_rate"] == 1.0 and account["ready_share"] == 1.0
    assert (account["preexecuted_calls"], account["wasted_calls"]) == (1, 0)
    # turn 0: the candidate's 3 tokens served; turn 1 makes no call: its 3 are wasted
    assert (account["speculated_tokens"], account["wasted_tokens"]) == (6, 3)


def test_a_miss_costs_no_time_and_is_counted_as_waste():
    policy = turns_policy(call_text(("get", {"key": "a"})), "done")
    plain = play(policy, tool_s=0.4, world=FakeShop())
    fast = play(policy, lambda e: hostile("wrong", e, SEED), tool_s=0.4, world=FakeShop())
    same(plain.t, fast.t)
    assert fast.t.total_s == pytest.approx(plain.t.total_s)
    assert [e.status for e in fast.t.events if e.kind == "preexecute"] == ["miss"]
    account = time_account([fast.t])
    assert account["wasted_calls"] == 1 and account["hidden_s"] == 0.0
    assert math.isnan(account["ready_share"])


def test_any_call_of_the_turn_may_be_hit():
    policy = turns_policy(call_text(("search", {"key": "a"}), ("get", {"key": "b"})), "done")
    fast = play(policy, lambda e: Oracle(e, SEED, which=1), tool_s=0.1, world=FakeShop())
    assert fast.t.turns[0].hits == (False, True)
    assert hit_at_1([fast.t], SPECS) == 0.0  # Hit@1 asks for the first call


@pytest.mark.parametrize("tool_s", [0.01, 20.0])
def test_a_write_between_makes_the_result_stale(tool_s):
    text = call_text(("put", {"key": "a", "value": 7}), ("get", {"key": "a"}))
    policy = turns_policy(text, "done")
    plain = play(policy, tool_s=tool_s, per_tool={"put": 0.5}, world=FakeShop())
    fast = play(policy, lambda e: Oracle(e, SEED, which=1), tool_s=tool_s,
                per_tool={"put": 0.5}, world=FakeShop())  # fmt: skip
    same(plain.t, fast.t)
    assert fast.t.turns[0].observations[1].startswith("get 7")
    assert fast.t.turns[0].hits == (False, False)
    assert [e.status for e in fast.t.events if e.kind == "preexecute"] == ["stale"]


def test_an_undone_write_gives_the_result_back():
    text = call_text(("put", {"key": "a", "value": 5}), ("put", {"key": "a", "value": 1}),
                     ("get", {"key": "a"}))  # fmt: skip
    policy = turns_policy(text, "done")
    fast = play(policy, lambda e: Oracle(e, SEED, which=2), tool_s=0.01, world=FakeShop())
    plain = play(policy, tool_s=0.01, world=FakeShop())
    same(plain.t, fast.t)
    assert fast.t.turns[0].hits == (False, False, True)


class SlowReader(FakeShop):
    """A read takes half a second more after it has read."""

    async def step(self, call):
        text = await super().step(call)
        await asyncio.sleep(0.5 if call.name == "get" else 0.0)
        return text


def test_a_running_preexecution_never_sees_a_state_between_two_writes():
    text = call_text(("put", {"key": "a", "value": 5}), ("put", {"key": "a", "value": 1}),
                     ("get", {"key": "a"}))  # fmt: skip
    policy = turns_policy(text, "done")
    agent_s = 0.01 * len(CHAT.turn_ids(text))
    # Writes land 0.5 and 1.0 s after the agent's call; the read would fall between them and end
    # after the second, when the version is the first one again.
    per_tool = {"put": 0.5, "get": agent_s + 0.75}
    plain = play(policy, per_tool=per_tool, world=SlowReader())
    fast = play(policy, lambda e: Oracle(e, SEED, which=2), per_tool=per_tool, world=SlowReader())
    same(plain.t, fast.t)
    assert fast.t.turns[0].observations[2].startswith("get 1")
    assert [e.status for e in fast.t.events if e.kind == "preexecute"] == ["stale"]


def test_the_speculator_sees_the_prefix_even_if_sampling_takes_no_time():
    seen = []

    class Looks:
        async def propose(self, seq, turn_index, seed):
            seen.append(len(seq.ids))
            return []

    policy = turns_policy(call_text(("get", {"key": "a"})), "done")
    fast = play(policy, lambda e: Looks(), token_s=None, world=FakeShop())
    assert seen == [turn.start for turn in fast.t.turns]


class Flaky(FakeShop):
    """The first execution of any call hangs."""

    async def step(self, call):
        self.steps.append(call)
        if len(self.steps) == 1:
            await asyncio.sleep(1e6)
        return "fine"


def test_a_failing_preexecution_is_discarded_and_the_agents_own_call_runs():
    policy = turns_policy(call_text(("get", {"key": "a"})), "done")
    fast = play(policy, lambda e: Oracle(e, SEED), world=Flaky())
    assert fast.t.turns[0].observations == ("fine",)
    assert fast.t.turns[0].hits == (False,)
    assert fast.world.steps == [GET_A, GET_A]
    assert [e.status for e in fast.t.events if e.kind == "preexecute"] == ["failed"]
    # A tool that raises for the agent, too, gives the same observation as without speculation.
    policy = turns_policy(call_text(("fail", {"key": "a"})), "done")
    plain = play(policy, world=FakeShop())
    fast = play(policy, lambda e: Oracle(e, SEED), world=FakeShop())
    same(plain.t, fast.t)
    assert fast.t.turns[0].hits == (False,)


def test_b107_only_read_only_and_repeatable_tools_run_ahead():
    calls = [
        GET_A,
        ToolCall("search", {"key": "a"}),
        ToolCall("put", {"key": "a", "value": 99}),
        ToolCall("nope", {"key": "a"}),
        ToolCall("get", {"key": 5}),
    ]

    class All:
        async def propose(self, seq, turn_index, seed):
            return [Candidate((1,), (0.0,), call) for call in calls]

    text = call_text(("search", {"key": "a"}), thinking="x" * 40)
    fast = play(
        turns_policy(text, "done"), lambda e: All(), world=FakeShop(), budget=Budget(9, None)
    )
    ahead = [e.label for e in fast.t.events if e.kind == "preexecute" and e.turn == 0]
    assert ahead == ["get"]
    assert [c.name for c in fast.world.steps].count("search") == 1
    assert "put" not in [c.name for c in fast.world.steps]
    statuses = [e.status for e in fast.t.events if e.kind == "speculate" and e.turn == 0]
    assert statuses == ["miss", "match", "miss", "miss", "miss"]


def test_equal_but_invalid_calls_do_not_match():
    # {} fills the default of a required key in, but it is the agent's error to leave it out.
    parameters = {
        "type": "object",
        "properties": {"key": {"type": "string", "default": "a"}},
        "required": ["key"],
    }
    specs = (dataclasses.replace(SPECS[0], parameters=parameters),)
    policy = turns_policy(call_text(("get", {})), "done")
    plain = play(policy, world=FakeShop(specs=specs))
    fast = play(
        policy,
        lambda e: Oracle(e, SEED, change=lambda _: GET_A),
        world=FakeShop(specs=specs),
    )
    same(plain.t, fast.t)
    assert fast.t.turns[0].observations[0].startswith("error: get: 'key' is a required property")


def test_the_budget_bounds_turns_and_episodes():
    keys = iter("pqrstuvwxyz")

    class Many:
        async def propose(self, seq, turn_index, seed):
            wrong = [ToolCall("get", {"key": next(keys)}) for _ in range(3)]
            return [Candidate((1,), (0.0,), call) for call in [wrong[0], *wrong]]

    get = call_text(("get", {"key": "a"}))
    policy = turns_policy(get, get, "done")
    fast = play(policy, lambda e: Many(), world=FakeShop(), budget=Budget(2, 3))
    ahead = [(e.turn, e.label) for e in fast.t.events if e.kind == "preexecute"]
    assert ahead == [(0, "get"), (0, "get"), (1, "get")]
    first = [e.status for e in fast.t.events if e.kind == "speculate" and e.turn == 0]
    assert first == ["miss", "repeat", "miss", "miss"]


def test_late_predictions_are_measured_without_delaying_the_agent():
    policy = turns_policy(call_text(("get", {"key": "a"})), "done")
    plain = play(policy, tool_s=0.3, world=FakeShop())
    late = play(policy, lambda e: hostile("slow", e, SEED), tool_s=0.3, world=FakeShop())
    assert late.t.total_s == pytest.approx(plain.t.total_s)
    assert hit_at_1([late.t], SPECS) == 1.0 and late.t.turns[0].hits == (False,)
    assert time_account([late.t])["ready_share"] == 0.0
    cut = play(policy, lambda e: hostile("slow", e, SEED), tool_s=0.3, measure_late=False,
               world=FakeShop())  # fmt: skip
    same(plain.t, cut.t)
    assert hit_at_1([cut.t], SPECS) == 0.0
    assert cut.t.turns[0].candidates[0].problems == ("cut off by the agent's call",)


def test_a_raising_speculator_is_counted_and_changes_nothing():
    policy = turns_policy(call_text(("get", {"key": "a"})), "done")
    fast = play(policy, lambda e: Raising(), world=FakeShop())
    same(play(policy, world=FakeShop()).t, fast.t)
    assert time_account([fast.t])["speculator_errors"] == 2.0
    assert parse_failure_frac([fast.t]) == 1.0 and hit_at_1([fast.t], SPECS) == 0.0


class SeedEngine(FakeEngine):
    """Speculator rows answer after the suffix; candidate texts by seed and temperature."""

    def completion(self, ids, seed, mode, params):
        self.asked.append((tuple(ids[-len(CHAT.suffix_ids()) :]), seed, mode, params.temperature))
        return super().completion(ids, seed, mode, params)

    asked: list = []


def self_policy(ids, seed, mode):
    suffix = tuple(CHAT.suffix_ids())
    if tuple(ids[-len(suffix) :]) == suffix:
        return call_text(("get", {"key": "a"}))
    headers = CHAT.tokenizer.decode(list(ids)).count("<|im_start|>assistant") - 1
    if headers == 0 and mode == "speculator":  # another continuation of the agent's prefix
        return call_text(("get", {"key": "a" if seed % 2 else "b"}))
    return [call_text(("get", {"key": "a"}), thinking="x" * 40), "done"][headers]


def test_self_speculation_asks_forks_with_the_suffix():
    engine = SeedEngine(CHAT, self_policy, 0.01)
    engine.asked = []
    sampling = SamplingParams(1.0, 64, CHAT.stop_ids)
    fast = play(None, lambda e: SelfSpeculator(CHAT, sampling, n_candidates=3), tool_s=0.2,
                engine=engine, world=FakeShop(), agreement=4)  # fmt: skip
    plain = play(self_policy, tool_s=0.2, world=FakeShop())
    same(plain.t, fast.t)
    turn = fast.t.turns[0]
    assert [c.call for c in turn.candidates] == [GET_A] * 3 and turn.hits == (True,)
    suffix = tuple(CHAT.suffix_ids())
    asked = [a for a in engine.asked if a[0] == suffix][:3]
    assert [a[3] for a in asked] == [0.0, 1.0, 1.0]  # greedy first
    assert len({a[1] for a in asked}) == 3 and {a[2] for a in asked} == {"speculator"}
    others = [a for a in engine.asked if a[0] != suffix and a[2] == "speculator"]
    assert len(others) == 8 and SEED not in {a[1] for a in others}
    assert {a[3] for a in others} == {1.0}
    expected = tuple(GET_A if a[1] % 2 else GET_B for a in others[:4])
    assert turn.agreement_calls == expected
    report = hit_report([fast.t], SPECS)
    assert report["self_agreement"] == expected.count(GET_A) / 4


@pytest.mark.parametrize("at_s", [0.0, 0.05, 0.31, 0.9])
def test_b113_cancelling_leaves_no_task_and_no_fork(at_s):
    async def main():
        engine = FakeEngine(CHAT, self_policy, 0.01)
        world = FakeShop()
        box = ToolBox(world, latency=ToolLatency(3.0))
        speculator = SelfSpeculator(CHAT, SamplingParams(1.0, 64, CHAT.stop_ids), 2)
        task = asyncio.create_task(
            runtime.run_episode(
                engine,
                world,
                TASK,
                CHAT,
                SAMPLING,
                LIMITS,
                SEED,
                toolbox=box,
                speculator=speculator,
                agreement=2,
            )  # fmt: skip
        )
        await asyncio.sleep(at_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert asyncio.get_running_loop().time() == at_s  # nothing was waited for
        assert not engine.live and not world.steps

    run_simulated(main())


def made(calls, candidates, agreement=(), success=1.0):
    """A trajectory with these first calls and candidates, turn by turn."""
    turns = [
        Turn(0, 1, "stop", calls=(c,) if c else (), candidates=tuple(cs), agreement_calls=a)
        for c, cs, a in zip(calls, candidates, agreement or [()] * len(calls), strict=True)
    ]
    return Trajectory("t", "w", [], [], [], turns, Score(0.0, success), "", "answered")


def guess(call, *problems):
    return Candidate((1, 2), (0.0, 0.0), call, problems)


def test_hit_numbers_by_hand():
    put = ToolCall("put", {"key": "a", "value": 1})
    put_float = ToolCall("put", {"key": "a", "value": 1.0})
    one = made(
        calls=[GET_A, GET_B, put, None],
        candidates=[
            [guess(GET_A)],  # hit, turn 0
            [guess(GET_A), guess(GET_B)],  # miss at 1, hit at 2
            [guess(put_float)],  # hit: 1.0 is 1
            [guess(None)],  # abstains where no call is made: no target
        ],
        agreement=[(GET_A, GET_B), (GET_B, None), (put,), ()],
    )
    two = made(
        calls=[GET_A, GET_A, GET_B],
        candidates=[[guess(None, "unterminated")], [], [guess(GET_B)]],  # miss; not asked; hit
        success=0.0,
    )
    both = [one, two]
    assert hit_at_1(both, SPECS) == 3 / 5
    assert hit_at_1(both, {s.name: s for s in SPECS}, k=2) == 4 / 5
    assert hit_at_1(both, SPECS, read_only=True) == 2 / 4
    assert hit_at_1(both, SPECS, skip_first_turn=True) == 2 / 3
    assert hit_at_1(both, SPECS, tool="put") == 1.0
    assert math.isnan(hit_at_1(both, SPECS, tool="search"))
    report = hit_report(both, SPECS, k=2)
    assert report["hit_at_2"] == 4 / 5
    assert report["hit_at_1_read_only_later"] == 1 / 2
    assert report["hit_at_1/get"] == 2 / 4 and report["calling_turns/get"] == 4
    assert report["parse_failure"] == 1 / 6 and report["abstain"] == 1 / 6
    assert report["read_only_frac"] == 5 / 6
    assert report["self_agreement"] == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
    assert report["hit_over_agreement"] == pytest.approx((2 / 3) / (2 / 3))
    assert report["success"] == 0.5 and report["calling_turns"] == 5


def test_time_account_refuses_other_tasks():
    a, b = made([], []), made([], [])
    b.task_id = "other"
    with pytest.raises(ValueError, match="same tasks"):
        time_account([a], plain=[b])
    assert time_account([])["episodes"] == 0.0


def test_hit_at_1_calls_counts_every_call_from_its_own_prefix():
    right, other = ToolCall("get", {"key": "a"}), ToolCall("get", {"key": "b"})
    said = [Candidate((), (), call) for call in (right, right, None)]
    asked = Turn(0, 1, "stop", calls=(right, other, other), call_candidates=tuple(said))
    unasked = Turn(1, 2, "stop", calls=(right,))
    played = Trajectory("t", "shop", [], [], [], [asked, unasked], Score(0.0, 0.0), "", "answered")
    assert hit_report([played], {})["hit_at_1_calls"] == pytest.approx(1 / 3)
