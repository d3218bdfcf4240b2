"""The embedded world "lookup": its knowledge, its tools, its reward, its scripted expert."""

from __future__ import annotations

import asyncio
import copy
import re
import statistics
from collections import Counter

import pytest

from agentspec.envs import lookup, storefront
from agentspec.envs.base import World
from agentspec.envs.lookup_expert import READ_HABIT, read_habit
from agentspec.tasks.lookup import RELATIONS, build_knowledge, build_tasks
from agentspec.types import Task, ToolCall

WORLDS = lookup.build_world(seed=0)
KNOWLEDGE = WORLDS.knowledge
TRAIN = WORLDS.tasks("train")


def step(world, name, /, **arguments):
    return asyncio.run(world.step(ToolCall(name, arguments)))


def play(task, seed, max_turns=8):
    """Plays an episode; returns its score, the acts, and what came back after each."""
    world, expert = WORLDS.new(), WORLDS.expert(task, seed)
    world.reset(task)
    acts, returned, back = [], [], None
    for _ in range(max_turns):
        act = expert.act(back)
        acts.append(act)
        if not act.calls:
            assert asyncio.run(world.reply(act.content)) is None
            break
        back = [asyncio.run(world.step(call)) for call in act.calls]
        returned.append(back)
    return world.score(), acts, returned


def follow(entity, chain):
    """The chain's answer by walking the facts: independent of the generator's own walk."""
    for relation in chain:
        entity = KNOWLEDGE.facts[entity, relation]
    return entity


def test_the_recipe_counts():
    assert Counter(KNOWLEDGE.kinds.values()) == {
        "person": 70, "film": 60, "company": 24, "city": 30, "country": 12, "language": 10,
    }  # fmt: skip
    # 70 persons x 3 + 60 films x 3 + 24 companies x 2 + 30 cities x 2 + 12 countries x 2
    assert len(KNOWLEDGE.facts) == 522
    assert len(KNOWLEDGE.kinds) == 206
    assert len(KNOWLEDGE.unindexed) == 104  # a fifth of 522 is 104.4
    assert len(KNOWLEDGE.stubs) == 33  # a sixth of the 196 entities with a page is 32.7
    words = [word for r, (synonym, _, _) in RELATIONS.items() for word in (r, synonym)]
    assert len(set(words)) == 24


def test_knowledge_depends_on_the_seed_alone():
    assert build_knowledge(0) == KNOWLEDGE
    assert build_knowledge(1).facts != KNOWLEDGE.facts
    assert lookup.build_world(1).new().state_version != WORLDS.new().state_version
    assert build_tasks(KNOWLEDGE, "test") == WORLDS.tasks("test")
    with pytest.raises(ValueError, match="stub_share is 2; allowed is 0 to 1"):
        build_knowledge(0, stub_share=2)


def test_splits_are_large_enough_and_disjoint_by_content():
    content, sizes = {}, {}
    for split in ("train", "validation", "test"):
        tasks = WORLDS.tasks(split)
        sizes[split] = len(tasks)
        content[split] = {(t.data["entity"], tuple(t.data["chain"])) for t in tasks}
        assert len({t.id for t in tasks}) == len({t.data["question"] for t in tasks}) == len(tasks)
    assert sizes["train"] >= 2000 and sizes["test"] >= 400 and sizes["validation"] >= 128
    assert not content["train"] & content["test"]
    assert not content["train"] & content["validation"]
    assert not content["validation"] & content["test"]
    hops = Counter(len(t.data["chain"]) for t in TRAIN)
    for n, share in ((1, 0.35), (2, 0.40), (3, 0.25)):
        assert abs(hops[n] / len(TRAIN) - share) < 0.01
    with pytest.raises(ValueError, match="split is 'dev'"):
        WORLDS.tasks("dev")


def test_questions_say_their_chain_and_have_its_answer():
    for task in TRAIN:
        data = task.data
        assert data["answers"] == [follow(data["entity"], data["chain"])]
        middle = re.fullmatch(r"what is the (.*) \?", data["question"]).group(1)
        *words, entity = re.split(r" of (?:the )?", middle)
        assert entity == data["entity"] and words[::-1] == data["words"]
        for word, relation in zip(data["words"], data["chain"], strict=True):
            assert word in (relation, RELATIONS[relation][0])


def test_read_gives_the_page_or_says_why_not():
    world = WORLDS.new()
    person = next(
        e for e, k in KNOWLEDGE.kinds.items() if k == "person" and e not in KNOWLEDGE.stubs
    )
    expected = " ; ".join(
        f"{r} : {KNOWLEDGE.facts[person, r]}" for r in ("birthplace", "employer", "mentor")
    )
    assert step(world, "read", page=person) == expected
    assert step(world, "read", page=f" {person.upper()} ") == expected
    assert step(world, "read", page=min(KNOWLEDGE.stubs)) == "stub"
    assert step(world, "read", page="nobody") == "no such page"
    assert step(world, "read", page="aldish") == "no such page"  # a language: nothing is known


def test_search_ranks_by_word_overlap_and_hides_unindexed_facts():
    world = WORLDS.new()
    for (entity, relation), value in KNOWLEDGE.facts.items():
        line = f"{entity} {relation} : {value}"
        one = step(world, "search", query=f"{entity} {relation}", k=1)
        if (entity, relation) in KNOWLEDGE.unindexed:
            assert line != one
        elif relation == "mentor":  # whom someone mentors has the same words
            assert line in step(world, "search", query=f"{entity} mentor", k=8).split(" ; ")
        elif KNOWLEDGE.kinds[entity] not in ("city", "country"):  # two words and the relation
            assert line == one
            assert step(world, "search", query=f"{RELATIONS[relation][0]} of {entity}", k=1) == one
    assert step(world, "search", query="the of") == "nothing found"
    assert step(world, "search", query="") == "nothing found"


def test_b91_k_hits_and_no_more():
    world = WORLDS.new()
    texts = [step(world, "search", query="director", k=k) for k in (1, 2, 3, 5)]
    assert [len(t.split(" ; ")) for t in texts] == [1, 2, 3, 5]
    assert step(world, "search", query="director") == texts[1]  # the default is 2
    assert step(world, "search", query="director", k=2.0) == texts[1]


@pytest.mark.parametrize(
    ("name", "arguments", "observation"),
    [
        ("serch", {"query": "x"}, "error : no tool serch"),
        ("search", {}, "error : missing query"),
        ("search", {"query": 5}, "error : query must be a string"),
        ("search", {"query": None}, "error : query must be a string"),
        ("search", {"query": "x", "k": "2"}, "error : k must be an integer"),
        ("search", {"query": "x", "k": True}, "error : k must be an integer"),
        ("search", {"query": "x", "k": 2.5}, "error : k must be an integer"),
        ("search", {"query": "x", "k": 0}, "error : k must be 1 to 8"),
        ("read", {"page": ["mira"]}, "error : page must be a string"),
        ("read", {"page": "x", "k": 2}, "error : unknown k"),
    ],
)
def test_malformed_calls_get_a_clear_observation(name, arguments, observation):
    assert step(WORLDS.new(), name, **arguments) == observation


def test_tools_are_repeatable_reads_and_change_nothing():
    world = WORLDS.new()
    assert isinstance(world, World)
    assert all(spec.preexecutable for spec in world.tools)
    before = world.state_version
    first = step(world, "search", query="mayor", k=4)
    step(world, "read", page="arvend")
    assert step(world, "search", query="mayor", k=4) == first
    assert world.state_version == before == world.fork().state_version


@pytest.mark.parametrize(
    ("said", "success"),
    [
        ("<answer>{gold}</answer>", 1.0),
        ("it is <answer> The {gold}. </answer>", 1.0),  # normalised: article, case, full stop
        ("<answer>wrong</answer> no, <answer>{gold}</answer>", 1.0),  # the last one counts
        ("<answer>{gold}</answer> or <answer>wrong</answer>", 0.0),
        ("{gold}", 0.0),
        ("<answer></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_reward_by_hand(said, success):
    task = TRAIN[0]
    world = WORLDS.new()
    world.reset(task)
    asyncio.run(world.reply(said.format(gold=task.data["answers"][0])))
    score = world.score()
    assert (score.reward, score.success) == (success, success)


def test_the_question_is_no_answer_and_episodes_are_apart():
    task = Task("t", "lookup", {**TRAIN[0].data, "question": "<answer>arvend</answer>"})
    first, second = WORLDS.new(), WORLDS.new()
    first.reset(task)
    second.reset(TRAIN[0])
    asyncio.run(second.reply(f"<answer>{TRAIN[0].data['answers'][0]}</answer>"))
    fork = second.fork()
    asyncio.run(fork.reply("<answer>x</answer>"))
    assert first.score().success == 0.0
    assert second.score().success == 1.0
    assert fork.score().success == 0.0
    second.reset(TRAIN[0])
    assert second.score().success == 0.0
    with pytest.raises(RuntimeError, match="before reset"):
        WORLDS.new().score()


def test_expert_is_deterministic_and_seeds_differ():
    task = next(t for t in TRAIN if len(t.data["chain"]) == 2)
    runs = [play(task, seed)[1] for seed in range(8)]
    assert play(task, 3)[1] == runs[3]
    assert len({str(run) for run in runs}) > 3


def test_expert_answers_only_what_it_has_read():
    for i, task in enumerate(TRAIN[::20]):
        score, acts, returned = play(task, i)
        answer = score.details["answer"]
        assert acts[-1].calls == () and answer is not None
        seen = " ; ".join(text for texts in returned for text in texts)
        assert answer == "unknown" or f": {answer}" in seen
        assert (score.success == 1.0) == (answer != "unknown")


def test_expert_success_is_within_its_band_and_tasks_are_short():
    played = [play(task, i) for i, task in enumerate(TRAIN[::5])]
    assert 0.70 <= statistics.mean(score.success for score, _, _ in played) <= 0.90
    assert max(len(acts) for _, acts, _ in played) <= 7
    words = [len(a.thinking.split()) for _, acts, _ in played for a in acts if a.calls]
    assert 10 <= min(words) and max(words) <= 27


def test_expert_first_calls_vary():
    """Agreement of two first calls is sum p^2: near .65 / .40 / .25 by the relation's habit."""
    agreement = {habit: [] for habit in READ_HABIT}
    for task in TRAIN[::25]:
        expert = WORLDS.expert(task, 0)
        counts = Counter()
        for seed in range(40):
            fresh = copy.deepcopy(expert)
            fresh.seed = seed
            counts[str(fresh.act(None).calls)] += 1
        pairs = sum(n * (n - 1) for n in counts.values()) / (40 * 39)
        agreement[read_habit(task.data["chain"][0])].append(pairs)
        assert 3 <= len(counts) <= 7
    means = [statistics.mean(agreement[habit]) for habit in READ_HABIT]
    assert means == sorted(means, reverse=True)
    # Reads: p; searches: (1-p) x (.5, .25, .25) x (.8, .2). Sum of squares by hand:
    # .64 + .04 x .375 x .68 = .650; .36 + .16 x .255 = .401; .1225 + .4225 x .255 = .230
    for mean, by_hand in zip(means, (0.650, 0.401, 0.230), strict=True):
        assert abs(mean - by_hand) < 0.05
    assert 0.35 <= statistics.mean(means) <= 0.5


def greedy_tokens(pieces, text):
    """Longest match first, from the left: what a tokenizer of whole pieces does."""
    longest = sorted(pieces, key=len, reverse=True)
    found = []
    while text:
        piece = next((p for p in longest if text.startswith(p)), text[0])
        found.append(piece)
        text = text[len(piece) :]
    return found


def test_pieces_of_both_worlds_spell_every_text_in_few_tokens():
    both = set(WORLDS.pieces()) | set(storefront.build_world().pieces())
    assert len(both) <= 600 and "" not in both
    lengths = []
    for i, task in enumerate(TRAIN[::40]):
        _, acts, returned = play(task, i)
        texts = [f"user\n{task.data['question']}"]
        texts += [f"\n{act.thinking}\n" for act in acts] + [act.content for act in acts]
        texts += [f"\n{text}\n" for texts in returned for text in texts]
        tokens = [t for text in texts for t in greedy_tokens(both | {"user\n"}, text)]
        assert set(tokens) <= both | {"user\n"}
        lengths.append(len(tokens))
    assert max(lengths) < 200
    # A name has the same two tokens in a question, in an argument and in an observation.
    for left in (
        "what is the mayor of ",
        '\n{"name": "read", "arguments": {"page": "',
        " : ",
        "\n",
    ):
        assert greedy_tokens(both, f"{left}mira sol")[-2:] == ["mira", " sol"]
