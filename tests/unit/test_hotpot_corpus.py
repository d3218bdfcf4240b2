"""The paragraphs of the search world: text folding, BM25, pages, and the two tools over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.tasks.paragraphs import Corpus, clip, load_corpus, plain
from agentspec.tasks.search_tools import SearchTools
from agentspec.types import ToolCall

PAGES = [
    ("Oslo", "Oslo is the capital of Norway. The Vigeland park lies there."),
    ("Norway", "Norway is a country in Europe; its highest mountain is Galdhøpiggen."),
    ("Gustav Vigeland", "Gustav Vigeland was a sculptor born in Mandal in 1869."),
    ("Mandal", "Mandal is a town in the south of Norway."),
    ("Bergen", "Bergen is a city known for rain and for Bryggen."),
    ("Tom &amp; Jerry", "A cartoon."),
]


def tools() -> SearchTools:
    return SearchTools(Corpus(PAGES))


def test_plain_folds_case_accents_entities_and_punctuation():
    assert plain("Åse's  Café &amp; B_C-3!") == "ase s cafe b c 3"
    assert plain("Tom &amp; Jerry") == plain("tom & jerry") == "tom jerry"


@given(st.text(max_size=80), st.integers(1, 40))
def test_clip_is_a_beginning_on_one_line(text: str, limit: int):
    flat = " ".join(text.split())
    short = clip(text, limit)
    assert "\n" not in short and len(short) <= limit + 4
    assert short == flat if len(flat) <= limit else flat.startswith(short.removesuffix(" ..."))


def test_search_ranks_by_shared_rare_words_and_breaks_ties_by_place():
    corpus = Corpus([("A", "red fish"), ("B", "red bird"), ("C", "red bird"), ("D", "a cat")])
    # "bird" is in B and C alike, "red" in three pages: equal scores, so file order decides.
    assert [t for t, _ in corpus.search("red bird")] == ["B", "C", "A"]
    assert [t for t, _ in corpus.search("the red bird", k=1)] == ["B"]
    assert corpus.search("zebra") == corpus.search("") == []


def test_pages_of_one_title_are_found_once_and_read_together():
    corpus = Corpus([("Oslo", "First."), ("Bergen", "x"), ("OSLO", "Second."), ("Oslo", "First.")])
    assert corpus.page("oslo") == "First. Second."
    assert [t for t, _ in corpus.search("oslo")] == ["Oslo"]
    assert corpus.title("Ósló") == "Oslo" and corpus.title("Paris") is None


def test_the_questions_own_paragraphs_come_first_on_a_page(tmp_path: Path):
    texts = [("Other.", "musique"), ("Ours.", "hotpotqa"), ("Third.", "2wiki")]
    rows = [{"title": "Oslo", "text": text, "from": source} for text, source in texts]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert load_corpus(path).page("Oslo") == "Ours. Other. Third."
    assert load_corpus(path, first="2wiki").page("Oslo") == "Third. Other. Ours."


def test_search_gives_short_lines_and_read_a_cut_page():
    short = SearchTools(Corpus(PAGES), hits=2, search_chars=12, read_chars=20)
    assert short.run(ToolCall("search", {"query": "Vigeland sculptor"})) == (
        "Gustav Vigeland: Gustav ...\nOslo: Oslo is the ..."
    )
    assert short.run(ToolCall("read", {"title": "MANDAL"})) == "Mandal is a town in ..."
    assert short.run(ToolCall("read", {"title": "Tom & Jerry"})) == "A cartoon."


def test_a_miss_in_read_names_the_nearest_titles():
    seen = tools().run(ToolCall("read", {"title": "G. Vigeland"}))
    assert seen == "no page 'G. Vigeland'; near: Gustav Vigeland | Oslo"
    assert tools().run(ToolCall("read", {"title": "Xyz"})) == "no page 'Xyz'"
    assert tools().run(ToolCall("search", {"query": "Xyz"})) == "nothing found for 'Xyz'"


@pytest.mark.parametrize(
    "call",
    [
        ToolCall("lookup", {"query": "Oslo"}),
        ToolCall("search", {}),
        ToolCall("search", {"query": 3}),
        ToolCall("read", {"title": " "}),
        ToolCall("read", {"title": "Oslo", "page": 1}),
    ],
)
def test_a_wrong_call_is_an_observation(call: ToolCall):
    assert tools().run(call).startswith("error: ")
