"""The plain loop and scripted episodes, against hand-written conversations."""

from __future__ import annotations

import asyncio

import pytest
from fakes import TASK, FakeEngine, FakeShop, call_text, make_chat

from agentspec.envs.episode import EpisodeLimits, run_episode, run_scripted
from agentspec.envs.experts import AssistantAct
from agentspec.envs.tools import ToolBox, ToolLatency
from agentspec.speculation.clock import run_simulated
from agentspec.types import SamplingParams, ToolCall

CHAT = make_chat()
LIMITS = EpisodeLimits(max_turns=8, max_turn_tokens=200, max_tokens=5000)
SAMPLING = SamplingParams(1.0, 500, CHAT.stop_ids)


def scripted_engine(turns, **rest):
    """Samples these texts one after the other, whatever the conversation."""
    left = list(turns)
    return FakeEngine(CHAT, lambda ids, seed, mode: left.pop(0), **rest)


def play(turns, world=None, limits=LIMITS, latency=None, token_s=0.0):
    world = world or FakeShop()
    engine = scripted_engine(turns, token_s=token_s)
    box = ToolBox(world, latency=latency)
    t = run_simulated(run_episode(engine, world, TASK, CHAT, SAMPLING, limits, 5, toolbox=box))
    assert not engine.live  # every sequence is closed
    check_arrays(t, engine)
    return t, world


def check_arrays(t, engine):
    """Mask 1 exactly on the turns' sampled tokens; log-probs 0 elsewhere."""
    sampled = {i for turn in t.turns for i in range(turn.start, turn.end)}
    assert t.mask == [int(i in sampled) for i in range(len(t.ids))]
    assert len(t.logps) == len(t.ids)
    assert all(t.logps[i] == 0.0 for i in range(len(t.ids)) if i not in sampled)


def text_after(t, turn):
    """What was appended behind a turn."""
    nexts = [x.start for x in t.turns if x.start > turn.start]
    return CHAT.tokenizer.decode(t.ids[turn.end : nexts[0] if nexts else None])


def test_a_call_then_an_answer():
    first = call_text(("get", {"key": "a"}), thinking="hm")
    t, world = play([first, "it is 1"])
    assert [turn.calls for turn in t.turns] == [(ToolCall("get", {"key": "a"}),), ()]
    version = FakeShop.state_version.fget(world)
    assert t.turns[0].observations == (f"get 1 {version[:6]}",)
    assert text_after(t, t.turns[0]) == (
        f"\n<|im_start|>user\n<tool_response>\nget 1 {version[:6]}\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    prompt = CHAT.prompt_ids(world.reset(TASK), world.tools)
    assert t.ids[: t.turns[0].start] == prompt
    turn = t.turns[0]
    assert t.ids[turn.start : turn.end] == CHAT.turn_ids(first)
    assert t.ids[t.turns[1].start :] == CHAT.turn_ids("it is 1")
    assert (t.finish, t.seed, t.version, t.final_state) == ("answered", 5, 3, version)
    assert t.score.reward == 1.0 and t.task_id == "t0" and t.world == "shop"


def test_a_users_reply_continues_the_episode():
    t, _ = play(["hello", "bye"], FakeShop(replies=1))
    assert len(t.turns) == 2 and t.finish == "answered"
    assert text_after(t, t.turns[0]) == (
        "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_b110_several_calls_are_answered_in_order():
    text = call_text(
        ("get", {"key": "a"}), ("nope", {}), ("fail", {"key": "a"}), ("get", {"key": "b"})
    )
    latency = ToolLatency(0.0, {"get": 0.3})
    t, world = play([text, "done"], latency=latency)
    v = world.state_version[:6]
    assert t.turns[0].observations == (
        f"get 1 {v}",
        "error: unknown tool 'nope'; the tools are: get, search, put, fail",
        "error: fail: RuntimeError: no",
        f"get 2 {v}",
    )
    assert t.turns[0].hits == (False,) * 4


def test_broken_markup_is_told_to_the_agent_who_may_try_again():
    t, _ = play(["<tool_call>\n{broken\n</tool_call>", call_text(("get", {"key": "a"})), "done"])
    assert t.turns[0].problems and not t.turns[0].calls
    assert f"\nerror: {t.turns[0].problems[0]}" in text_after(t, t.turns[0])
    assert t.turns[1].calls and t.finish == "answered"


def test_a_cut_turn_is_closed_with_mask_0_and_an_error():
    limits = EpisodeLimits(8, 12, 5000)
    t, _ = play(["<think>\n" + "x" * 50, "done"], limits=limits)
    turn = t.turns[0]
    assert turn.finish == "length" and turn.end - turn.start == 12
    assert turn.problems  # unterminated_think
    after = text_after(t, turn)
    assert after.startswith("\n</think><|im_end|>\n<|im_start|>user\n")
    assert "error: turn cut at its token limit" in after
    assert t.finish == "answered"


def test_plain_text_that_is_cut_is_no_answer():
    t, _ = play(["y" * 50, "done"], limits=EpisodeLimits(8, 12, 5000))
    assert text_after(t, t.turns[0]).startswith("<|im_end|>\n<|im_start|>user\n")
    assert len(t.turns) == 2


def test_ends_by_max_turns_after_the_last_turns_calls_ran():
    world = FakeShop()
    put = call_text(("put", {"key": "a", "value": 9}))
    t, _ = play([put] * 3, world, EpisodeLimits(2, 200, 5000))
    assert t.finish == "max_turns" and len(t.turns) == 2
    assert len(world.steps) == 2 and t.score.reward == 9.0
    assert len(t.ids) == t.turns[-1].end  # nothing is appended that nobody reads


def test_ends_by_max_tokens():
    prompt = len(CHAT.prompt_ids(FakeShop().reset(TASK)))
    get = call_text(("get", {"key": "a"}))
    room = prompt + len(CHAT.turn_ids(get)) + 20  # not enough for the observation
    t, _ = play([get], limits=EpisodeLimits(8, 200, room))
    assert t.finish == "max_tokens" and len(t.turns) == 1 and len(t.ids) <= room
    assert len(t.turns[0].observations) == 1
    t, _ = play(["x" * 100], limits=EpisodeLimits(8, 200, prompt + 10))
    assert t.finish == "max_tokens" and len(t.ids) == prompt + 10
    with pytest.raises(ValueError, match=f"prompt has {prompt} tokens.*max_tokens={prompt}"):
        play(["x"], limits=EpisodeLimits(8, 200, prompt))


def test_a_world_may_end_the_episode_by_itself():
    world = FakeShop()
    world.done = True
    t, _ = play([call_text(("get", {"key": "a"}))], world)
    assert t.finish == "world" and len(t.turns) == 1


def test_times_by_hand():
    get = call_text(("get", {"key": "a"}), ("get", {"key": "b"}))
    put = call_text(("put", {"key": "a", "value": 4}), ("get", {"key": "a"}))
    latency = ToolLatency(0.5, {"put": 2.0})
    t, _ = play([get, put, "done"], latency=latency, token_s=0.01)
    n = [turn.end - turn.start for turn in t.turns]
    assert [turn.generate_s for turn in t.turns] == pytest.approx([0.01 * x for x in n])
    assert [turn.tool_s for turn in t.turns] == pytest.approx([0.5, 2.5, 0.0])
    assert t.total_s == pytest.approx(0.01 * sum(n) + 3.0)
    assert [e.kind for e in t.events] == [
        *("generate", "wait", "tool", "tool"),
        *("generate", "wait", "tool", "tool"),
        "generate",
    ]


def test_a_sequence_that_changed_behind_our_back_is_an_error():
    engine = scripted_engine([call_text(("get", {"key": "a"})), "x"])

    class Meddling(FakeShop):
        async def step(self, call):
            next(iter(engine.live)).ids[0] += 1
            return "x"

    world = Meddling()
    with pytest.raises(AssertionError, match="only be appended"):
        run_simulated(run_episode(engine, world, TASK, CHAT, SAMPLING, LIMITS, 0))
    assert not engine.live


def test_a_toolbox_of_another_world_is_refused():
    engine = scripted_engine([])
    with pytest.raises(ValueError, match="another world"):
        run_simulated(
            run_episode(
                engine, FakeShop(), TASK, CHAT, SAMPLING, LIMITS, 0, toolbox=ToolBox(FakeShop())
            )
        )


def test_b113_cancelling_an_episode_during_a_call_leaves_nothing():
    async def main():
        world = FakeShop()
        engine = scripted_engine([call_text(("get", {"key": "a"}))])
        box = ToolBox(world, latency=ToolLatency(10.0))
        task = asyncio.create_task(
            run_episode(engine, world, TASK, CHAT, SAMPLING, LIMITS, 0, toolbox=box)
        )
        await asyncio.sleep(5)
        assert len(engine.live) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not engine.live and not world.steps

    run_simulated(main())


class Script:
    def __init__(self, *acts):
        self.acts, self.seen = list(acts), []

    def act(self, observations):
        self.seen.append(observations)
        return self.acts.pop(0)


def test_a_scripted_episode_is_what_the_engine_would_have_made():
    call = ToolCall("get", {"key": "a"})
    expert = Script(AssistantAct("look", "", (call,)), AssistantAct("", "hello", ()),
                    AssistantAct("", "bye", ()))  # fmt: skip
    scripted = run_simulated(run_scripted(FakeShop(1), TASK, CHAT, expert, LIMITS, 5))
    t, world = play(
        [call_text(("get", {"key": "a"}), thinking="look"), "hello", "bye"], FakeShop(1)
    )
    assert scripted.ids == t.ids and scripted.mask == t.mask
    assert [x.calls for x in scripted.turns] == [x.calls for x in t.turns]
    assert scripted.logps == [0.0] * len(t.ids)
    assert expert.seen == [None, [f"get 1 {world.state_version[:6]}"], "go on"]
    assert scripted.finish == "answered"


def test_an_experts_call_that_reads_back_otherwise_is_refused():
    expert = Script(AssistantAct("", "<tool_call>{", (ToolCall("get", {"key": "a"}),)))
    with pytest.raises(ValueError, match="read back as"):
        run_simulated(run_scripted(FakeShop(), TASK, CHAT, expert, LIMITS, 0))
