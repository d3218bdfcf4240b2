"""HotpotQA rooms on small files made here: reading, tools, splits, mapped trajectories, world."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.envs.base import World
from agentspec.envs.hotpot import HotpotData, load_hotpot
from agentspec.tasks.hotpot import (
    answerable,
    bare_question,
    hold_out,
    load_questions,
    question_key,
    split_questions,
)
from agentspec.tasks.hotpot_episodes import short_thought
from agentspec.tasks.jsonlines import DataError
from agentspec.tasks.paragraphs import load_corpus, plain
from agentspec.types import ToolCall

PAGES = [
    ("Oslo", "Oslo is the capital of Norway. The Vigeland park lies there."),
    ("Norway", "Norway is a country in Europe; its highest mountain is Galdhøpiggen."),
    ("Gustav Vigeland", "Gustav Vigeland was a sculptor born in Mandal in 1869."),
    ("Mandal", "Mandal is a town in the south of Norway."),
    ("Bergen", "Bergen is a city known for rain and for Bryggen."),
    ("Tom &amp; Jerry", "A cartoon."),
]


def question(text: str, answer: str, titles: list[str], **more: Any) -> dict[str, Any]:
    facts = [[title, 0] for title in titles]
    return {
        "id": plain(text).replace(" ", "-"),
        "dataset": "hotpotqa",
        "question": text,
        "answer": answer,
        "answer_aliases": [],
        "supporting_facts": facts,
    } | more


BIRTH = "Where was the sculptor of the park in Oslo born?"
BOTH = "Are Oslo and Bergen both in Norway?"
QUESTIONS = [
    question(BIRTH, "Mandal", ["Oslo", "Gustav Vigeland"]),
    question(BOTH, "yes", ["Oslo", "Bergen"]),
    question("What is Bergen known for?", "rain", ["Bergen"]),
    question("Which mountain is highest in Norway?", "Galdhøpiggen", ["Norway"]),
    question("Who is Tom's partner?", "Jerry", ["Tom &amp; Jerry"]),
    question("What is not here?", "nothing", ["Atlantis"]),
]


def trajectory(
    text: str, actions: list[tuple[str, str]], source: str = "made", **more: Any
) -> dict[str, Any]:
    steps = [
        {
            "thought": f"Thought {i} about it. A second sentence.",
            "action": {"name": name, "argument": argument},
            "observation": "theirs",
        }
        for i, (name, argument) in enumerate(actions)
    ]
    row = {"traj_id": f"{source}/{len(steps)}", "set": source, "question": text, "reward": 1}
    return row | {"answer_gold": None, "steps": steps} | more


def write(path: Path, rows: list[Any]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    opened = gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb")
    with opened as stream:
        stream.write(text.encode())
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    pages = [{"title": title, "text": text, "from": "hotpotqa"} for title, text in PAGES]
    return {
        "corpus": write(tmp_path / "corpus.jsonl.gz", pages),
        "questions": write(tmp_path / "questions.jsonl", QUESTIONS),
    }


def load(files: dict[str, Path], rows: list[Any], **more: Any) -> HotpotData:
    trajectories = write(files["corpus"].parent / "trajectories.jsonl.gz", rows)
    options = {"n_test": 0, "n_validation": 0} | more
    return load_hotpot(files["corpus"], (files["questions"],), (trajectories,), **options)


# --- reading: a malformed line is one error that names file, line and key -------------------------


def test_gzip_and_plain_files_read_the_same(tmp_path: Path):
    gz = load_questions([write(tmp_path / "q.jsonl.gz", QUESTIONS)])
    assert gz == load_questions([write(tmp_path / "q.jsonl", QUESTIONS)])
    assert [q.golds for q in gz][:2] == [("Mandal",), ("yes",)]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"question": "Who?", "ans', "one whole JSON value"),
        ('["Who?", "me"]', "JSON object, got list"),
        ({"question": "Who?"}, "key 'answer' is missing"),
        ({"question": "Who?", "answer": ""}, "key 'answer' is empty"),
        ({"question": "Who?", "answer": "  "}, "key 'answer' is empty"),
        ({"question": "Who?", "answer": "?!"}, "key 'answer' has no letter or digit"),
        ({"question": "Who?", "answer": 7}, "key 'answer' must be a string, got 7"),
        ({"question": None, "answer": "me"}, "key 'question' must be a string, got None"),
        ({"question": "Who?", "answer": "me", "answer_aliases": ["I", ""]}, "answer_aliases[1]"),
        ({"question": "Who?", "answer": "me", "supporting_facts": ["Oslo"]}, "supporting_facts[0]"),
    ],
)
def test_b82_a_bad_question_line_is_named_and_nothing_else_is_lost(tmp_path, bad, says):
    path = write(tmp_path / "q.jsonl", [*QUESTIONS[:2], bad, *QUESTIONS[2:]])
    with pytest.raises(DataError) as caught:
        load_questions([path])
    assert str(caught.value).startswith(f"{path}:3: ") and says in str(caught.value)
    problems: list[str] = []
    kept = load_questions([path], problems)
    assert problems == [str(caught.value)]
    assert [q.text for q in kept] == [row["question"] for row in QUESTIONS]


def test_bytes_that_are_not_utf8_and_a_gzip_cut_short_are_named(tmp_path: Path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(json.dumps(QUESTIONS[0]).encode() + b"\n\xff{}\n")
    with pytest.raises(DataError, match=r"q\.jsonl:2: not UTF-8 at byte 0"):
        load_questions([path])
    whole = write(tmp_path / "w.jsonl.gz", QUESTIONS * 50).read_bytes()
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole[:-20])
    problems: list[str] = []
    kept = load_questions([cut], problems)
    assert len(kept) == len(QUESTIONS) and len(problems) == 1
    assert "the gzip stream is broken or cut short" in problems[0]


def test_a_missing_file_and_an_untitled_paragraph_are_named(tmp_path: Path):
    with pytest.raises(DataError, match="nowhere.jsonl: there is no such file"):
        load_questions([tmp_path / "nowhere.jsonl"])
    path = write(tmp_path / "c.jsonl", [{"title": "Oslo", "text": "x"}, {"text": "y"}])
    with pytest.raises(DataError, match=r"c\.jsonl:2: key 'title' is missing; .*\['text'\]"):
        load_corpus(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer_gold": ""}, "key 'answer_gold' is empty"),
        ({"steps": "none"}, "key 'steps' must be a list"),
        ({"steps": ["go"]}, "key 'steps[0]' must be an object"),
        ({"steps": [{"action": "Search"}]}, "key 'steps[0].action' must be an object or null"),
        ({"steps": [{"action": {"name": "Search", "argument": 3}}]}, "steps[0].action.argument"),
        ({"reward": "1"}, "key 'reward' must be a number"),
    ],
)
def test_b82_a_bad_trajectory_line_is_named_and_nothing_else_is_lost(files, change, says):
    good = trajectory(BIRTH, [("Search", "Gustav Vigeland"), ("Finish", "Mandal")])
    with pytest.raises(DataError, match=r"trajectories\.jsonl\.gz:1: ") as caught:
        load(files, [good | change, good])
    assert says in str(caught.value)
    data = load(files, [good | change, good], strict=False)
    assert len(data.episodes) == 1 and data.problems == (str(caught.value),)
    assert data.report().endswith(f"malformed lines: 1\n{caught.value}")


# --- questions and splits ------------------------------------------------------------------------


def test_question_key_ignores_what_the_files_add():
    retry = f"Question: {BIRTH}You have attempted to answer following question before and failed."
    assert bare_question(retry) == BIRTH
    assert question_key(retry) == question_key("where was  the sculptor of the park in OSLO born")
    assert question_key(BIRTH) != question_key(BOTH)


def test_only_questions_with_all_pages_can_become_tasks(files: dict[str, Path]):
    questions = load_questions([files["questions"]])
    found = answerable(questions, load_corpus(files["corpus"]))
    assert [q.golds[0] for q in found] == ["Mandal", "yes", "rain", "Galdhøpiggen", "Jerry"]


def test_a_row_without_pages_gives_way_to_one_with_them(tmp_path: Path):
    bare = {"question": f"Question: {BIRTH}", "answer": "mandal"}
    found = load_questions([write(tmp_path / "q.jsonl", [bare, QUESTIONS[0]])])
    assert len(found) == 1 and found[0].titles == ("Oslo", "Gustav Vigeland")


def test_held_out_questions_depend_on_seed_not_on_order(tmp_path: Path):
    rows = [question(f"Question number {i}?", "x", ["Oslo"]) for i in range(40)]
    found = load_questions([write(tmp_path / "q.jsonl", rows)])
    rest, validation, test = hold_out(found, 5, 10, seed=0)
    assert (len(rest), len(validation), len(test)) == (25, 5, 10)
    assert {q.id for q in (*rest, *validation, *test)} == {q.id for q in found}
    assert hold_out(found[::-1], 5, 10, seed=0) == (rest, validation, test)
    assert hold_out(found, 5, 10, seed=1)[2] != test
    with pytest.raises(ValueError, match="n_test=10 leave nothing of the 40"):
        hold_out(found, 30, 10, seed=0)
    sft = {rest[0].key}
    assert split_questions(rest, validation, test, sft).train == rest[1:]
    with pytest.raises(ValueError, match="1 questions are in two splits"):
        split_questions(rest, validation, test, {test[0].key})


# --- recorded trajectories -----------------------------------------------------------------------


def only(data: HotpotData) -> list[ToolCall]:
    assert len(data.episodes) == 1, data.report()
    return [call for _, call in data.episodes[0].steps]


def read(title: str) -> ToolCall:
    return ToolCall("read", {"title": title})


def search(query: str) -> ToolCall:
    return ToolCall("search", {"query": query})


def test_search_of_a_title_reads_it_and_other_searches_stay(files: dict[str, Path]):
    actions = [
        ("Search", "park by Vigeland"),
        ("Retrieve", "gustav vigeland"),
        ("finish", "Mandal"),
    ]
    data = load(files, [trajectory(BIRTH, actions)])
    assert only(data) == [search("park by Vigeland"), read("Gustav Vigeland")]
    assert data.episodes[0].steps[0][0] == "Thought 0 about it. A second sentence."
    assert (data.episodes[0].answer, data.episodes[0].golds) == ("Mandal", ("Mandal",))


def test_lookup_reads_the_current_page_or_searches_on_it(files: dict[str, Path]):
    data = load(
        files,
        [
            trajectory(
                BIRTH,
                [("Search", "sculptor born"), ("Lookup", "town"), ("Lookup", "year"),
                 ("Finish", "the Mandal.")],
            )
        ],
    )  # fmt: skip
    top = "Gustav Vigeland"  # the page that the search finds first
    assert only(data) == [search("sculptor born"), read(top), search(f"{top} year")]


def test_a_step_that_repeats_a_call_is_merged(files: dict[str, Path]):
    actions = [("Search", "Mandal"), ("Retrieve", "mandal"), ("Finish", "Mandal")]
    data = load(files, [trajectory(BIRTH, actions)])
    assert only(data) == [read("Mandal")] and data.counts.merged_steps == 1


@pytest.mark.parametrize(
    ("text", "actions", "change", "reason"),
    [
        (BIRTH, [("Finish", "Mandal")], {}, "no call"),
        (BIRTH, [("Search", "Mandal")], {}, "no finish at its end"),
        (BIRTH, [("Search", "Mandal"), ("Finish", "Oslo")], {}, "not successful"),
        (BIRTH, [("Search", "Mandal"), ("Finish", "")], {}, "an empty answer"),
        (BIRTH, [("Search", "Bergen"), ("Finish", "Mandal")], {}, "answer not in our observations"),
        (BIRTH, [("Compare", "x"), ("Finish", "Mandal")], {}, "action 'compare' has no tool"),
        (BIRTH, [("Lookup", "x"), ("Finish", "Mandal")], {}, "a lookup before any page"),
        (
            BOTH,
            [("Search", "Oslo"), ("Finish", "yes")],
            {},
            "a verdict or choice that our observations do not bear out",
        ),
        # Unknown question: its own gold counts, and without one the recorded reward.
        (
            "Where?",
            [("Search", "Oslo"), ("Finish", "Oslo")],
            {"answer_gold": "X"},
            "not successful",
        ),
        ("Where?", [("Search", "Oslo"), ("Finish", "Oslo")], {"reward": 0.5}, "not successful"),
        (
            "Is Oslo it?",
            [("Search", "Oslo"), ("Finish", "Oslo")],
            {},
            "a verdict or choice that our observations do not bear out",
        ),
    ],
)
def test_a_dropped_trajectory_has_its_reason(files, text, actions, change, reason):
    data = load(files, [trajectory(text, actions) | change])
    assert data.episodes == () and dict(data.counts.dropped) == {("made", reason): 1}
    assert f"made: read 1, kept 0\n  dropped 1: {reason}" in data.report()


def test_a_verdict_is_kept_when_all_its_pages_were_seen(files: dict[str, Path]):
    data = load(files, [trajectory(BOTH, [("Search", "Oslo"), ("Search", "Bergen city"),
                                          ("Finish", "Yes")])])  # fmt: skip
    assert only(data) == [read("Oslo"), search("Bergen city")]


def test_a_log_that_calls_itself_failed_is_not_successful(files: dict[str, Path]):
    row = trajectory("Where?", [("Search", "Oslo"), ("Finish", "capital")])
    row["steps"][-1]["observation"] = "Episode finished, reward = False"
    assert dict(load(files, [row]).counts.dropped) == {("made", "not successful"): 1}
    row["steps"][-1]["observation"] = "Episode finished, reward = True"
    assert len(load(files, [row]).episodes) == 1


def test_repeated_bodies_equal_calls_and_full_questions_are_counted(files: dict[str, Path]):
    first = trajectory(BIRTH, [("Search", "Mandal"), ("Finish", "Mandal")])
    retried = first | {
        "question": BIRTH + "You have attempted to answer following question",
        "trial": 2,
    }
    other_thoughts = json.loads(json.dumps(first).replace("Thought", "Idea"))
    second = trajectory(BIRTH, [("Search", "Norway Mandal"), ("Finish", "Mandal")])
    third = trajectory(BIRTH, [("Search", "south Mandal"), ("Finish", "Mandal")])
    data = load(files, [first, retried, other_thoughts, second, third])
    assert [e.steps[0][1] for e in data.episodes] == [read("Mandal"), search("Norway Mandal")]
    assert data.counts.read["made"] == 5 and data.counts.kept["made"] == 2
    assert {why: n for (_, why), n in data.counts.dropped.items()} == {
        "repeats an earlier record": 1,
        "same calls as a kept episode": 1,
        "question has 2 episodes already": 1,
    }
    assert len(load(files, [first, second, third], per_question=3).episodes) == 3
    assert len(load(files, [first, second, third], max_calls=1, per_question=1).episodes) == 1


def test_held_out_questions_are_not_trained_on(files: dict[str, Path]):
    rows = [
        trajectory(f"Question: {q['question']}", [("Search", q["supporting_facts"][0][0]),
                                                  ("Finish", q["answer"])])
        for q in QUESTIONS[2:4]
    ]  # fmt: skip
    for seed in range(6):
        data = load(files, rows, n_test=2, n_validation=1, seed=seed)
        used = [{question_key(t.data["question"]) for t in data.tasks(s)} for s in
                ("train", "validation", "test")]  # fmt: skip
        used.append({question_key(t.data["question"]) for t in data.expert_tasks()})
        assert sum(map(len, used)) == len(set().union(*used)) == 5
        assert [len(u) for u in used][1:3] == [1, 2]
        held = sum(
            n for (_, why), n in data.counts.dropped.items() if why == "its question is held out"
        )
        assert held + len(data.episodes) == 2


@pytest.mark.parametrize(
    ("thought", "limit", "expected"),
    [
        ("I need Oslo. Then Bergen. And much more after that.", 30, "I need Oslo. Then Bergen."),
        ('From "Start", the adjacent nodes are "Search" and "Retrieve". Find it.', 99, "Find it."),
        ("To tell who was the first of them, it is essential to look.", 40,
         "To tell who was the first of them."),
        ("One very long sentence without any comma in it at all", 20, "One very long."),
        ("", 40, "I need to look up Oslo."),
    ],
)  # fmt: skip
def test_thoughts_are_kept_short(thought: str, limit: int, expected: str):
    assert short_thought(thought, limit, read("Oslo")) == expected


# --- the world -----------------------------------------------------------------------------------


@pytest.fixture
def data(files: dict[str, Path]) -> HotpotData:
    rows = [trajectory(BIRTH, [("Search", "Vigeland park"), ("Search", "Gustav Vigeland"),
                               ("Finish", "Mandal")])]  # fmt: skip
    return load(files, rows, n_test=1, n_validation=1, seed=3)


def test_the_source_offers_what_every_world_offers(data: HotpotData):
    assert [spec.name for spec in data.specs] == ["search", "read"]
    assert all(spec.preexecutable for spec in data.specs)
    assert isinstance(data.new(), World) and data.new().tools == data.specs
    assert data.pieces() == []
    ids = [t.id for s in ("train", "validation", "test") for t in data.tasks(s)]
    assert len(ids) == len(set(ids)) == 4
    with pytest.raises(ValueError, match="one of .'train', 'validation', 'test'., got 'dev'"):
        data.tasks("dev")
    with pytest.raises(ValueError, match="has no recorded episode"):
        data.expert(data.tasks("train")[0], 0)


def test_replaying_the_record_scores_one_and_fails_nowhere(data: HotpotData):
    (task,) = data.expert_tasks()
    world, expert, said = data.new(), data.expert(task, 5), None
    (message,) = world.reset(task)
    assert message.role == "user" and message.content.endswith(f"Question: {BIRTH}")
    seen: list[str] = []
    while True:
        act = expert.act(said)
        if not act.calls:
            break
        said = [asyncio.run(world.step(call)) for call in act.calls]
        seen += said
    assert [s.split(":")[0].split(" is")[0] for s in seen][1] == PAGES[2][1]
    assert (
        act.content == "<answer>Mandal</answer>"
        and act.thinking == "Thought 2 about it. A second sentence."
    )
    assert asyncio.run(world.reply(act.content)) is None
    score = world.score()
    assert (score.reward, score.success, score.details["f1"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("said", "right", "f1"),
    [
        ("<answer>the mandal.</answer>", 1.0, 1.0),  # articles, case and punctuation do not count
        ("<answer>Mandal, Norway</answer>", 0.0, 2 / 3),  # precision 1/2, recall 1
        ("<answer>Oslo</answer> no, <answer>Mandal</answer>", 1.0, 1.0),  # the last one counts
        ("<answer>Bergen</answer>", 0.0, 0.0),
        ("Mandal", 0.0, 0.0),  # no tag, no answer
    ],
)
def test_score_is_exact_match_with_f1_beside_it(data: HotpotData, said, right, f1):
    world = data.new()
    world.reset(data.expert_tasks()[0])
    asyncio.run(world.reply(said))
    score = world.score()
    assert (score.reward, score.success) == (right, right)
    assert score.details["f1"] == pytest.approx(f1)


def test_calls_change_nothing_and_forks_are_independent(data: HotpotData):
    world = data.new()
    with pytest.raises(RuntimeError, match="before reset"):
        world.score()
    world.reset(data.expert_tasks()[0])
    before = world.state_version
    fork = world.fork()
    assert asyncio.run(world.step(read("Oslo"))) == asyncio.run(fork.step(read("Oslo")))
    asyncio.run(fork.reply("<answer>Mandal</answer>"))
    assert world.state_version == fork.state_version == before
    assert (fork.score().reward, world.score().reward) == (1.0, 0.0)


def test_the_state_version_tells_other_tools_and_corpora_apart(files: dict[str, Path]):
    versions = {load(files, [], read_chars=n).new().state_version for n in (100, 200)}
    write(files["corpus"], [{"title": t, "text": x + "!"} for t, x in PAGES])
    versions.add(load(files, [], read_chars=100).new().state_version)
    assert len(versions) == 3  # the changed file was read again, not taken from the cache
