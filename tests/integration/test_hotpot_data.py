"""The real multi-hop questions, their paragraphs and the recorded search agents."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from agentspec.envs.hotpot import HotpotData, load_hotpot
from agentspec.tasks.hotpot import question_key

SETS = (
    "knowagent_hotpotqa_llama-2-13b",
    "reflexion_hotpotqa_react_base",
    "reflexion_hotpotqa_react_reflexion",
    "fireact_eval_hotpotqa_dev",
    "fireact_finetune_multitask_multimethod",
    "react_fever_notebook",
)


@pytest.fixture(scope="module")
def paths(data_dir: Callable[[str], Path]) -> dict[str, object]:
    qa, recorded = data_dir("multihop_qa"), data_dir("search_trajectories")
    return {
        "corpus": qa / "corpus.jsonl.gz",
        "questions": (qa / "hotpotqa.jsonl.gz", qa / "hotpotqa_dev_questions_only.jsonl.gz"),
        "trajectories": tuple(recorded / f"{name}.jsonl.gz" for name in SETS),
    }


@pytest.fixture(scope="module")
def data(paths) -> HotpotData:
    return load_hotpot(**paths)


def rows(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def test_every_trajectory_is_kept_or_dropped_for_a_reason(data: HotpotData, paths):
    for name, path in zip(SETS, paths["trajectories"], strict=True):
        dropped = sum(n for (source, _), n in data.counts.dropped.items() if source == name)
        assert data.counts.read[name] == len(rows(path)) == data.counts.kept[name] + dropped
    assert sum(data.counts.kept.values()) == len(data.episodes) >= 150
    assert max(Counter(e.key for e in data.episodes).values()) <= 2


def test_reflexions_repeated_bodies_are_dropped(data: HotpotData, paths):
    for name in SETS[1:3]:
        recorded = rows(paths["trajectories"][SETS.index(name)])
        distinct = len({json.dumps(row["steps"]) for row in recorded})
        seen_before = 0
        if name == SETS[2]:  # a body may also repeat one of the other file
            other = {json.dumps(row["steps"]) for row in rows(paths["trajectories"][1])}
            seen_before = len({json.dumps(row["steps"]) for row in recorded} & other)
        repeats = len(recorded) - distinct + seen_before
        assert data.counts.dropped[name, "repeats an earlier record"] == repeats


def test_splits_are_disjoint_and_large_enough(data: HotpotData, paths):
    parts = {
        split: [question_key(task.data["question"]) for task in data.tasks(split)]
        for split in ("train", "validation", "test")
    }
    parts["sft"] = sorted({question_key(t.data["question"]) for t in data.expert_tasks()})
    everything = [key for keys in parts.values() for key in keys]
    assert len(everything) == len(set(everything))
    assert len(parts["test"]) == 48 and len(parts["validation"]) == 24
    assert len(parts["train"]) >= 300
    # All of RL and evaluation is HotpotQA with its two pages in the corpus, unlike SFT's.
    real = {question_key(row["question"]): row for row in rows(paths["questions"][0])}
    titles = {row["title"] for row in rows(paths["corpus"])}
    for key in parts["train"] + parts["validation"] + parts["test"]:
        assert {title for title, _ in real[key]["supporting_facts"]} <= titles


def test_every_recorded_episode_replays_to_a_full_score(data: HotpotData):
    async def replay() -> None:
        for task in data.expert_tasks():
            world, expert = data.new(), data.expert(task, 0)
            world.reset(task)
            act = expert.act(None)
            while act.calls:
                seen = [await world.step(call) for call in act.calls]
                assert not any(text.startswith("error") for text in seen)
                assert all(len(text) < 900 for text in seen)
                act = expert.act(seen)
            await world.reply(act.content)
            assert world.score().success == 1.0, task
            assert len(act.thinking) <= 121

    asyncio.run(replay())


def test_episodes_show_the_answer(data: HotpotData):
    """Checked on the raw text: of answers that the question does not name, none is a guess."""
    tools = data.search_tools
    for episode in data.episodes:
        if episode.answer.lower() in ("yes", "no") or len(episode.answer) < 3:
            continue
        shown = " ".join(tools.run(call) for _, call in episode.steps).lower()
        words = [
            w for w in episode.golds[0].lower().split() if w.isalpha() and w not in ("the", "a")
        ]
        assert all(word in shown for word in words), episode


def test_a_second_load_is_equal_and_uses_the_built_index(data: HotpotData, paths):
    began_s = time.monotonic()
    again = load_hotpot(**paths)
    assert time.monotonic() - began_s < 10
    assert again.search_tools.corpus is data.search_tools.corpus
    assert again == data
    other = load_hotpot(**paths, seed=1)
    assert [t.id for t in other.tasks("test")] != [t.id for t in data.tasks("test")]


def test_every_supporting_page_can_be_read(data: HotpotData):
    for split in ("train", "validation", "test"):
        for question in getattr(data.splits, split):
            for title in question.titles:
                assert not data.search_tools.read(title).startswith("no page")
