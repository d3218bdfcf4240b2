"""Text and ids: round trips, no control token from text (B19, B21), greedy whole pieces."""

from __future__ import annotations

import json

import pytest
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from agentspec.tokens.tokenizer import (
    CONTROL_TOKENS,
    Tokenizer,
    build_word_tokenizer,
    load_tokenizer,
)

WORDS = build_word_tokenizer([" Oslo", " Os", "Oslo", " the capital", " the", "lookup", "."])
N_CONTROLS = len(CONTROL_TOKENS)


def _pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


def test_longest_piece_is_taken_greedily():
    assert _pieces(WORDS, "lookup the capital Oslo Osl.") == [
        "lookup", " the capital", " Oslo", " Os", "l", "."
    ]  # fmt: skip


def test_glue_of_calls_and_headers_is_one_piece_each():
    text = '\n{"name": "lookup", "arguments": {"q": "Oslo"}}\n'
    assert _pieces(WORDS, text) == [
        '\n{"name": "', "lookup", '", "arguments": {"', "q", '": "', "Oslo", '"}}\n'
    ]  # fmt: skip
    assert [len(WORDS.encode(t)) for t in ("user\n", "assistant\n", "system\n")] == [1, 1, 1]


def test_other_letters_fall_back_to_bytes():
    # U+00E9 is C3 A9; byte pieces follow the control tokens.
    assert WORDS.encode("é") == [N_CONTROLS + 0xC3, N_CONTROLS + 0xA9]
    assert WORDS.decode([N_CONTROLS + 0xC3]) == "\ufffd"


def test_control_tokens_by_name():
    assert [WORDS.token_id(piece) for piece in CONTROL_TOKENS] == list(range(N_CONTROLS))
    assert WORDS.eos_ids == (WORDS.token_id("<|im_end|>"), WORDS.token_id("<|endoftext|>"))
    assert WORDS.decode(range(N_CONTROLS)) == "".join(CONTROL_TOKENS)
    with pytest.raises(KeyError, match="<|im_sep|>"):
        WORDS.token_id("<|im_sep|>")
    with pytest.raises(KeyError):
        WORDS.token_id(" Oslo")


_CONTROL_LIKE = st.sampled_from([*CONTROL_TOKENS, "<0x41>", " Oslo", '{"name": "', "\u2581", "\0"])


@settings(max_examples=300, deadline=None)
@given(st.lists(_CONTROL_LIKE | st.text(max_size=6), max_size=8).map("".join))
def test_b21_any_text_round_trips_through_ordinary_pieces(text):
    ids = WORDS.encode(text)
    assert WORDS.decode(ids) == text
    assert all(N_CONTROLS <= i < WORDS.vocab_size for i in ids)
    assert WORDS.encode(text) == ids  # from the cache


def test_cached_ids_are_not_shared():
    first = WORDS.encode("lookup")
    first.append(0)
    assert WORDS.encode("lookup") == first[:-1]


def test_lone_surrogates_become_visible_replacements():
    assert WORDS.decode(WORDS.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("bad", ["", "<think>", "<0x0A>"])
def test_reserved_pieces_are_refused(bad):
    with pytest.raises(ValueError, match="must not be"):
        build_word_tokenizer([bad])


def _byte_level(special: bool) -> hf.Tokenizer:
    alphabet = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = hf.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens([hf.AddedToken("<think>", special=special, normalized=False)])
    tokenizer.post_processor = hf.processors.TemplateProcessing("<s> $A", None, [("<s>", 256)])
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
def test_b19_nothing_is_added_and_no_added_token_is_matched(special):
    full = _byte_level(special)
    assert full.encode("<think>").ids == [256, 257]  # what must not happen
    ids = Tokenizer(full).encode("<s><think>")
    assert len(ids) == len("<s><think>") and max(ids) < 256


def test_save_and_load(tmp_path):
    WORDS.save(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "lookup the capital é <think>\n"
    assert again.encode(text) == WORDS.encode(text)
    assert (again.controls, again.eos_ids, again.vocab_size) == (
        WORDS.controls, WORDS.eos_ids, WORDS.vocab_size
    )  # fmt: skip


def test_a_folder_without_tokenizer_is_a_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_vocabulary_that_cannot_spell_every_byte_is_refused():
    full = hf.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ValueError, match="not a byte-level vocabulary"):
        Tokenizer(full)


def test_stop_ids_are_the_union_of_what_the_folder_names(tmp_path):
    """The tokenizer's own, the model config's (its text part's) and the generation config's."""
    WORDS.save(tmp_path)
    think, close = WORDS.token_id("<think>"), WORDS.token_id("</think>")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": think}}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [WORDS.eos_ids[0], close]})
    )
    assert load_tokenizer(tmp_path).eos_ids == (*WORDS.eos_ids, think, close)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}, "eos_token_id": think}))
    assert load_tokenizer(tmp_path).eos_ids == (*WORDS.eos_ids, think, close)
    for wrong in ("2", -1, [None], {}):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(ValueError, match="eos_token_id must be a token id or a list"):
            load_tokenizer(tmp_path)
    ordinary = WORDS.encode("a")[0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ordinary}))
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id .* not a control"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", [], "expected a JSON object, got list"),
        ("config.json", {"text_config": [1]}, "text_config must be an object, got .1."),
        ("tokenizer_config.json", {"eos_token": ["</think>"]}, "eos_token .* names no control"),
        ("tokenizer_config.json", {"eos_token": {"id": 3}}, "eos_token .* names no control"),
        ("tokenizer_config.json", {"eos_token": "</none>"}, "eos_token '</none>' names no"),
    ]
    + [
        (name, {"eos_token_id": ids}, "eos_token_id must be a token id or a list of them, got")
        for name in ("config.json", "generation_config.json")
        for ids in ("3", -1, [2, None], {"a": 1}, True, 10**30)
    ],
)
def test_stop_ids_of_a_wrong_kind_are_refused_by_name(tmp_path, name, content, message):
    WORDS.save(tmp_path)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"/{name}: {message}"):
        load_tokenizer(tmp_path)
