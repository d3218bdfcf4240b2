"""Which episodes and turn starts are collected, in what order, and that speculation changes none.

The engine is scripted; chat, parser, runtime and clock are the real ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from fakes import FakeEngine, FakeShop, call_text, make_chat, random_policy

from agentspec import collect
from agentspec.envs.episode import EpisodeLimits
from agentspec.envs.experts import AssistantAct
from agentspec.settings import Settings
from agentspec.types import SamplingParams, Task, ToolCall

TASKS = [Task(f"t{i}", "shop", {"i": i}) for i in range(3)]
RED = ToolCall("get", {"key": "a"})


class Expert:
    """One call, then an answer that tells the expert's seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def act(self, observations):
        if observations is None:
            return AssistantAct(thinking="", content="", calls=(RED,))
        return AssistantAct(thinking="", content=str(self.seed), calls=())


class Shop(FakeShop):
    """Its first message names the task, so that prefixes of different tasks differ."""

    def reset(self, task):
        (message,) = super().reset(task)
        return [dataclasses.replace(message, content=f"do {task.id}")]


def make_job(**sections: dict):
    settings = Settings()
    small = {"agent": {"group_size": 4}, "speculator": {"group_size": 3}, "engine": {"rows": 5}}
    for section, values in (small | sections).items():
        part = dataclasses.replace(getattr(settings, section), **values)
        settings = dataclasses.replace(settings, **{section: part})
    chat = make_chat()
    source = SimpleNamespace(new=Shop, expert=lambda task, seed: Expert(seed))

    def sampling(temperature):
        return SamplingParams(temperature, 512, chat.stop_ids)

    return SimpleNamespace(
        settings=settings,
        chat=chat,
        worlds={"shop": source},
        limits=EpisodeLimits(max_turns=6, max_turn_tokens=512, max_tokens=8000),
        agent_sampling=sampling,
        speculator_sampling=sampling,
    )


def policy(ids, seed, mode):
    """A random agent; the speculator always says the same call."""
    return call_text(("get", {"key": "a"})) if mode == "speculator" else random_policy(ids, seed, 0)


def engine_of(job, policy=policy):
    return FakeEngine(job.chat, policy)


def what(trajectory):
    return trajectory.ids, trajectory.mask, trajectory.calls, trajectory.seed


def drawn(trajectories):
    return [[bool(turn.candidates) for turn in t.turns] for t in trajectories]


# --- the draw of turn starts ---


class Always:
    """Counts the turns at which it is asked."""

    def __init__(self):
        self.asked = []

    async def propose(self, seq, turn, seed):
        self.asked.append(turn)
        return [(seq, seed)]


def draws(share, seed, seq=None, turns=range(400), episode_seed=0):
    inner = Always()
    chosen = collect.ChosenTurns(inner, share, seed)
    for turn in turns:
        found = asyncio.run(chosen.propose(seq, turn, episode_seed))
        assert found == ([(seq, episode_seed)] if turn in inner.asked else [])
    return inner.asked


def test_the_draw_depends_on_the_seed_and_the_turn_alone():
    first = draws(0.5, 7)
    assert draws(0.5, 7, seq="another prefix", episode_seed=99) == first
    backwards = draws(0.5, 7, turns=range(399, -1, -1))
    assert sorted(backwards) == first  # whatever happened before
    assert draws(0.5, 8) != first


def test_the_share_is_the_share_drawn():
    """400 draws: the standard deviation of the share is at most 0.025."""
    assert draws(0.0, 1) == []
    assert draws(1.0, 1) == list(range(400))
    for share in (0.1, 0.25, 0.5):
        assert abs(len(draws(share, 3)) / 400 - share) < 0.1
    assert set(draws(0.25, 3)) <= set(draws(0.5, 3))


def test_turn_starts_are_drawn_before_any_outcome():
    """The same seeds under an agent that does other things: the same turns are asked."""
    job = make_job(speculator={"prefixes_per_step": 6, "group_size": 3})

    def calling(ids, seed, mode):
        return call_text(("get", {"key": "a"}))

    def writing(ids, seed, mode):
        return call_text(("put", {"key": "b", "value": 2}), thinking="x" * 9)

    runs = [
        collect.speculator_episodes(job, engine_of(job, p), TASKS, 5) for p in (calling, writing)
    ]
    assert [len(t.turns) for t in runs[0]] == [6, 6, 6]
    assert drawn(runs[0]) == drawn(runs[1])
    flat = sum(drawn(runs[0]), [])
    assert True in flat and False in flat
    assert drawn(collect.speculator_episodes(job, engine_of(job, calling), TASKS, 6)) != drawn(
        runs[0]
    )


def test_a_speculator_group_is_sampled_with_distinct_seeds():
    job = make_job(speculator={"prefixes_per_step": 12, "group_size": 3})
    seeds = []

    def by_seed(ids, seed, mode):
        if mode == "speculator":
            seeds.append(seed)
        return policy(ids, seed, mode)

    episodes = collect.speculator_episodes(job, engine_of(job, by_seed), TASKS, 0)
    counts = [len(turn.candidates) for t in episodes for turn in t.turns]
    assert set(counts) == {3}  # 12 prefixes of 3 tasks of 4 turns: every turn is drawn
    assert len(set(seeds)) == len(seeds) == sum(counts)


# --- order and seeds ---


def test_groups_come_in_the_order_of_tasks_and_members():
    job = make_job()
    groups = collect.agent_groups(job, engine_of(job), TASKS, 2)
    assert [[t.task_id for t in group] for group in groups] == [[f"t{i}"] * 4 for i in range(3)]
    seeds = [t.seed for group in groups for t in group]
    assert len(set(seeds)) == 12
    one_at_a_time = collect.agent_groups(make_job(engine={"rows": 1}), engine_of(job), TASKS, 2)
    assert [[what(t) for t in g] for g in one_at_a_time] == [[what(t) for t in g] for g in groups]
    later = collect.agent_groups(job, engine_of(job), TASKS, 3)
    assert not {t.seed for group in later for t in group} & set(seeds)


def test_speculating_in_agent_blocks_changes_no_episode():
    with_it = make_job(speculation={"agent_block_members": 8})
    without = make_job(speculation={"agent_block_members": 0})
    a, b = (collect.agent_groups(job, engine_of(job), TASKS, 0) for job in (with_it, without))
    assert [[what(t) for t in g] for g in a] == [[what(t) for t in g] for g in b]
    assert {len(turn.candidates) for g in a for t in g for turn in t.turns} == {1}
    assert not any(turn.candidates for g in b for t in g for turn in t.turns)
    assert not any(
        turn.hits.count(True) for g in a for t in g for turn in t.turns
    )  # none ran ahead


def test_results_keep_the_order_given_and_the_limit_holds():
    running, most = 0, 0

    async def job(i):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(10 - i)  # the last ends first
        running -= 1
        return i

    assert collect.run_all([job(i) for i in range(8)], 3) == list(range(8))
    assert most == 3


def test_an_error_in_one_episode_is_not_swallowed():
    async def fails():
        raise AssertionError("a program fault")

    async def waits():
        await asyncio.sleep(5)

    with pytest.raises(AssertionError, match="a program fault"):
        collect.run_all([waits(), fails(), waits()], 2)


def test_no_sequence_is_left_open():
    job = make_job()
    engine = engine_of(job)
    collect.agent_groups(job, engine, TASKS, 0)
    collect.predict(job, engine, collect.speculator_episodes(job, engine, TASKS, 0), SAMPLING)
    assert not engine.live


# --- another speculator ---

SAMPLING = SamplingParams(0.0, 512)


def test_predict_asks_another_speculator_at_the_turns_already_drawn():
    """The frozen agent plays; the present speculator is the one whose predictions are scored."""
    job = make_job(speculator={"prefixes_per_step": 6})

    def frozen(ids, seed, mode):
        return call_text(("get", {"key": "b" if mode == "speculator" else "a"}))

    def present(ids, seed, mode):
        assert mode == "speculator"
        return call_text(("put", {"key": "a", "value": len(ids)}))

    played = collect.speculator_episodes(job, engine_of(job, frozen), TASKS, 1)
    seen = collect.predict(job, engine_of(job, present), played, SAMPLING, 3, drawn_only=True)
    assert drawn(seen) == drawn(played) and True in sum(drawn(seen), [])
    suffix = len(job.chat.suffix_ids())
    for before, after in zip(played, seen, strict=True):
        assert what(before) == what(after)
        for turn in after.turns:
            assert {c.call.name for c in turn.candidates} <= {"put"}
            # It reads the prefix up to the turn's start, then the suffix.
            assert {c.call.arguments["value"] for c in turn.candidates} <= {turn.start + suffix}
            assert len(turn.candidates) in (0, 3)


def test_predict_asks_every_calling_turn_of_bare_episodes():
    job = make_job(speculation={"agent_block_members": 0})
    bare = [t for group in collect.agent_groups(job, engine_of(job), TASKS, 0) for t in group]
    seen = collect.predict(job, engine_of(job), bare, SAMPLING)
    assert drawn(seen) == [[bool(turn.calls) for turn in t.turns] for t in bare]
    assert {len(u.candidates) for t in seen for u in t.turns if u.calls} == {1}


# --- experts ---


def test_expert_episodes_vary_by_place_and_seed_and_are_all_target():
    job = make_job()
    episodes = collect.expert_episodes(job, [TASKS[0], TASKS[0]], 3)
    answers = [
        job.chat.tokenizer.decode(t.ids[t.turns[-1].start : t.turns[-1].end]) for t in episodes
    ]
    assert answers[0] != answers[1]
    assert [t.calls for t in episodes] == [[RED], [RED]]
    for t in episodes:
        marked = {i for turn in t.turns for i in range(turn.start, turn.end)}
        assert {i for i, m in enumerate(t.mask) if m} == marked
    again = collect.expert_episodes(job, [TASKS[0], TASKS[0]], 3)
    assert [what(t) for t in again] == [what(t) for t in episodes]
    assert what(collect.expert_episodes(job, [TASKS[0]], 4)[0]) != what(episodes[0])


def silent_half(ids, seed, mode):
    """Frozen: calls in the first turn, answers in the second; predictions say who made them."""
    if mode == "speculator":
        return call_text(("get", {"key": "frozen"}))
    return call_text(("get", {"key": "a"})) if len(ids) < 60 else "done"


def test_predict_asks_again_at_drawn_turns_without_a_call():
    """They train with ``reward.no_call_turns`` = reward, so they must be the present model's."""
    job = make_job(speculator={"prefixes_per_step": 12})
    played = collect.speculator_episodes(job, engine_of(job, silent_half), TASKS[:1], 1)
    assert [bool(turn.calls) for turn in played[0].turns][-1] is False
    seen = collect.predict(job, engine_of(job), played, SAMPLING, 3, drawn_only=True)
    said = [c.call.arguments["key"] for turn in seen[0].turns for c in turn.candidates]
    assert set(said) == {"a"}


def test_predict_asks_nothing_where_no_turn_was_drawn():
    job = make_job(speculator={"prefixes_per_step": 0})
    played = collect.speculator_episodes(job, engine_of(job), TASKS, 1)
    assert True not in sum(drawn(played), [])
    seen = collect.predict(job, engine_of(job), played, SAMPLING, 3, drawn_only=True)
    assert True not in sum(drawn(seen), [])
