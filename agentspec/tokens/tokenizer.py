"""Text <-> ids, for every stage. In: text; out: lists of ids, and back.

Two Hugging Face tokenizers with one vocabulary: the full one, which knows the control tokens, and
an ordinary one from which they were taken out. Whatever a user or a tool says is encoded by the
ordinary one, so text can never forge a turn; control tokens enter by name only (``token_id``).
Sources: an HF folder, a GGUF file (without torch), or a list of whole pieces (embedded default).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers as hf
from tokenizers import decoders, models, normalizers, pre_tokenizers

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
END_TOKENS = ("<|im_end|>", "<|endoftext|>")
# fmt: off
JSON_GLUE = (
    '{"name": "', '\n{"name": "', '", "arguments": {"', '", "arguments": {}}', '": "', '": ',
    '", "', ', "', '"}}', '}}', '"}}\n', '}}\n', '", "arguments": {}}\n',
)
# fmt: on
CHAT_GLUE = ("system\n", "user\n", "assistant\n", "\n\n")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MAX_CACHED_TEXTS = 1 << 16
_MAX_CACHED_CHARS = 512


class Tokenizer:
    """A Hugging Face ``tokenizers.Tokenizer`` whose control tokens cannot come out of text."""

    def __init__(self, full: hf.Tokenizer, end_pieces: Sequence[str] = END_TOKENS) -> None:
        """Wraps ``full``; ``end_pieces`` name the tokens that end a turn, where they exist."""
        self.full = full
        added = full.get_added_tokens_decoder()
        self.controls: dict[str, int] = {token.content: i for i, token in sorted(added.items())}
        self._ordinary = _without_controls(full, set(self.controls))
        self._unknown = _unrepresentable(self._ordinary)
        self._cache: dict[str, tuple[int, ...]] = {}
        vocabulary = full.get_vocab(with_added_tokens=True)
        self._ids = vocabulary
        self.vocab_size: int = max(vocabulary.values()) + 1
        ends = (self.controls[piece] for piece in end_pieces if piece in self.controls)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: no control token comes out, whatever the text says.

        Lossless up to the model's own normalizer. What the vocabulary cannot spell (lone
        surrogates; a few control characters in SmolLM2's) becomes U+FFFD, visibly.
        """
        known = self._cache.get(text)
        if known is None:
            known = tuple(self._encode(text))
            if len(text) <= _MAX_CACHED_CHARS:
                if len(self._cache) >= _MAX_CACHED_TEXTS:
                    self._cache.clear()
                self._cache[text] = known
        return list(known)

    def _encode(self, text: str) -> list[int]:
        spelled = self._unknown.sub("\ufffd", text)
        ids: list[int] = self._ordinary.encode(spelled, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, control tokens included; bytes that are not UTF-8 give U+FFFD."""
        return self.full.decode(list(ids), skip_special_tokens=False)

    def has(self, piece: str) -> bool:
        """Whether ``piece`` is a control token here."""
        return piece in self.controls

    def token_id(self, piece: str) -> int:
        """The id of the control token ``piece``; KeyError when there is none of that name."""
        if piece not in self.controls:
            raise KeyError(f"no control token {piece!r}; this tokenizer has {list(self.controls)}")
        return self.controls[piece]

    def save(self, folder: str | Path) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``, as Hugging Face reads them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.full.save(str(folder / "tokenizer.json"))
        ends = [self.full.id_to_token(i) for i in self.eos_ids]
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        if ends:
            config["eos_token"] = ends[0]
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of an HF folder (its ``tokenizer.json``) or of a ``.gguf`` file.

    End tokens are the union of what tokenizer, model and generation config name.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return Tokenizer(_from_gguf(path))
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path}: neither a .gguf file nor a folder with tokenizer.json")
    try:
        full = hf.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is no readable tokenizer: {error}") from error
    return Tokenizer(full, [*END_TOKENS, *_named_ends(path, full)])


def _named_ends(folder: Path, full: hf.Tokenizer) -> list[str]:
    """The end tokens that the folder's other files name: what the model was trained to stop at."""
    controls = full.get_added_tokens_decoder()
    ends = []
    file = folder / "tokenizer_config.json"
    eos = _json(file).get("eos_token")
    if eos is not None:
        piece = eos.get("content") if isinstance(eos, dict) else eos
        if piece not in [token.content for token in controls.values()]:
            raise ValueError(f"{file}: eos_token {eos!r} names no control token of tokenizer.json")
        ends.append(piece)
    for name in ("config.json", "generation_config.json"):
        given = _json(folder / name)
        text = given.get("text_config") or {}
        if not isinstance(text, dict):
            raise ValueError(f"{folder / name}: text_config must be an object, got {text!r}")
        ids = text.get("eos_token_id")
        ids = given.get("eos_token_id") if ids is None else ids
        for i in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if type(i) is not int or not 0 <= i < 1 << 31:
                raise ValueError(
                    f"{folder / name}: eos_token_id must be a token id or a list of them, "
                    f"got {ids!r}"
                )
            if i not in controls:
                raise ValueError(
                    f"{folder / name}: eos_token_id {i} is {full.id_to_token(i)!r} in "
                    "tokenizer.json, not a control token"
                )
            ends.append(controls[i].content)
    return ends


def _json(file: Path) -> dict[str, Any]:
    """The file's object; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def build_word_tokenizer(pieces: Iterable[str]) -> Tokenizer:
    """A tokenizer of whole ``pieces``, matched greedily, the longest first; any text round-trips.

    Beside the pieces it knows each printable ASCII character, the glue of calls and chat headers,
    and the 256 bytes for all else. Ids: control tokens, bytes, then pieces in the order given.
    """
    ascii_pieces = [chr(code) for code in range(32, 127)] + ["\n"]
    words = list(dict.fromkeys([*ascii_pieces, *JSON_GLUE, *CHAT_GLUE, *pieces]))
    reserved = sorted(set(words) & {*CONTROL_TOKENS, *_BYTES, ""})
    if reserved:
        raise ValueError(f"pieces must not be empty, a byte or a control token; got {reserved}")
    vocabulary = {p: i for i, p in enumerate([*CONTROL_TOKENS, *_BYTES, *words])}
    tokenizer = hf.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, ignore_merges=True)
    )
    pattern = hf.Regex(_longest_first(words) + r"|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([_control(piece) for piece in CONTROL_TOKENS])
    return Tokenizer(tokenizer)


def _control(piece: str, special: bool = True) -> hf.AddedToken:
    return hf.AddedToken(piece, special=special, normalized=False)


def _longest_first(words: Iterable[str]) -> str:
    """A regex that matches the longest of ``words``; a trie, so that many words cost no more."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}  # a word ends here

    def pattern(node: dict[str, Any]) -> str:
        steps = [f"\\x{{{ord(c):x}}}" + pattern(node[c]) for c in sorted(node) if c]
        if not steps:
            return ""
        return f"(?:{'|'.join(steps)})" + ("?" if "" in node else "")

    return pattern(trie)


def _without_controls(full: hf.Tokenizer, controls: set[str]) -> hf.Tokenizer:
    """A copy of ``full`` in which no control token can be matched or produced."""
    state = json.loads(full.to_str())
    model = state["model"]
    if not isinstance(model.get("vocab"), dict):
        raise ValueError(f"tokenizer model {model.get('type')!r}; allowed: BPE vocabularies")
    state["added_tokens"] = []
    state["post_processor"] = None
    model["vocab"] = {piece: i for piece, i in model["vocab"].items() if piece not in controls}
    if model.get("unk_token") in controls:
        model["unk_token"] = None
    return hf.Tokenizer.from_str(json.dumps(state))


def _unrepresentable(ordinary: hf.Tokenizer) -> re.Pattern[str]:
    """Matches what the vocabulary has no byte for; such text would vanish without a word."""
    state = json.loads(ordinary.to_str())
    if state["model"].get("byte_fallback"):
        missing = {b for b in range(256) if _BYTES[b] not in state["model"]["vocab"]}
    else:
        letters = _byte_letters()
        missing = {b for b in range(256) if letters[b] not in state["model"]["vocab"]}
    broken = sorted(b for b in missing if 0x80 <= b < 0xF0 and b not in (0xC0, 0xC1))
    if broken:
        raise ValueError(f"not a byte-level vocabulary: no pieces for bytes {broken[:8]} ...")
    singles = "".join(f"\\x{b:02x}" for b in sorted(missing) if b < 0x80)
    planes = "".join(
        f"{chr(max(0x10000, (b - 0xF0) << 18))}-{chr(min(0x10FFFF, ((b - 0xEF) << 18) - 1))}"
        for b in range(0xF0, 0xF5)
        if b in missing
    )
    return re.compile(f"[\ud800-\udfff{singles}{planes}]")


def _byte_letters() -> list[str]:
    """The letter by which byte-level BPE writes each byte (printable Latin-1 stands for itself)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in kept]
    letters = {b: chr(b) for b in kept} | {b: chr(256 + n) for n, b in enumerate(others)}
    return [letters[b] for b in range(256)]


def _from_gguf(path: Path) -> hf.Tokenizer:
    """Byte-level BPE from a GGUF file's metadata; its pre-tokenizer goes by llama.cpp's name."""
    import gguf

    try:
        fields = gguf.GGUFReader(path).fields
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} is truncated or not a GGUF file: {error}") from error

    def read(key: str) -> Any:
        if key not in fields:
            raise ValueError(f"{path}: no metadata key {key!r}")
        return fields[key].contents()

    kind, pre = read("tokenizer.ggml.model"), read("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"{path}: tokenizer.ggml.model is {kind!r}; allowed: 'gpt2' (byte BPE)")
    by_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits: dict[str, list[Any]] = {
        "gpt-2": [by_regex],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), by_regex],
        "qwen2": [pre_tokenizers.Split(hf.Regex(_QWEN2_WORDS), "isolated"), as_bytes],
    }
    if pre not in splits:
        raise ValueError(f"{path}: tokenizer.ggml.pre is {pre!r}; allowed: {sorted(splits)}")
    pieces: list[str] = read("tokenizer.ggml.tokens")
    types: list[int] = read("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    tokenizer = hf.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    control, user_defined = 3, 4  # llama.cpp's token types
    for piece, type_ in zip(pieces, types, strict=True):
        if type_ in (control, user_defined):
            tokenizer.add_tokens([_control(piece, special=type_ == control)])
    return tokenizer
