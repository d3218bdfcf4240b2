"""Renders conversations as ids, append-only. In: messages, observations; out: lists of ids.

The layout is Qwen3's ChatML (style ``hermes``) or SmolLM2's own (``smollm2``: the same frame, with
tool markup as ordinary text, since its vocabulary has no such tokens). Unlike Qwen3's template it
never takes reasoning out of the history, so the ids of a longer conversation start with those of
the shorter, and what was sampled is never rendered again. The speculation suffix is appended to
the agent's own prefix in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from agentspec.tokens.parse import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, parse_turn
from agentspec.tokens.tokenizer import Tokenizer
from agentspec.types import Message, ParsedTurn, ToolCall, ToolSpec

ChatStyle = Literal["hermes", "smollm2"]
SUFFIX = "Predict the next tool call. Answer with the call only."
_START, _END = "<|im_start|>", "<|im_end|>"
_RESPONSE_OPEN, _RESPONSE_CLOSE = "<tool_response>", "</tool_response>"
_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL_1 = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within "
)
_TOOLS_TAIL_2 = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'


class _Control(str):
    """Markup that we write ourselves: a control token where the vocabulary has one."""


class Chat:
    """One tokenizer and one layout. All methods return fresh lists of ids (or text)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        style: ChatStyle = "hermes",
        tools_in_prompt: bool = True,
        system: str | None = None,
        think: bool = True,
        suffix: str = SUFFIX,
    ) -> None:
        """Fixes the layout.

        Args:
            tokenizer: must have ``<|im_start|>`` and ``<|im_end|>``; for ``hermes`` also the tags
                of reasoning and calls.
            style: ``hermes`` or ``smollm2``.
            tools_in_prompt: whether the system message lists the declared tools.
            system: put before the world's own system message; None: only the world's (for
                ``smollm2`` that model's default sentence where the world has none).
            think: whether turns open with a reasoning block; the suffix then holds an empty one.
            suffix: the user instruction of the speculation suffix; it must name no tool or task.
        """
        if style not in ("hermes", "smollm2"):
            raise ValueError(f"style is {style!r}; allowed: 'hermes', 'smollm2'")
        self.tokenizer, self.style, self.think = tokenizer, style, think
        self.tools_in_prompt, self.system, self.suffix = tools_in_prompt, system, suffix
        needed = [_START, _END]
        self._own_markup: tuple[str, ...] = ()
        if style == "hermes":
            self._own_markup = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
            needed += self._own_markup
        missing = [piece for piece in needed if not tokenizer.has(piece)]
        if missing:
            raise ValueError(f"style {style!r} needs control tokens that are absent: {missing}")
        own = "|".join(map(re.escape, self._own_markup))
        self._split_own = re.compile(f"({own})") if own else None
        self.stop_ids: tuple[int, ...] = tokenizer.eos_ids

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The first messages, ending with the assistant header (its last id has mask 0)."""
        rest = list(messages)
        own = rest.pop(0).content if rest and rest[0].role == "system" else None
        parts = self._system_parts(own, tools)
        results: list[str] = []
        for message in rest:
            if message.role == "tool":
                results.append(message.content)
                continue
            parts += self._result_parts(results)
            results = []
            if message.role == "assistant":
                text = self.assistant_text(message.thinking, message.content, message.calls)
                parts += [_Control(_START), "assistant\n", *self._own_parts(text)]
                parts += [_Control(_END), "\n"]
            else:
                parts += self._message_parts(message.role, message.content)
        parts += self._result_parts(results)
        return self._ids([*parts, *self._header_parts()])

    def turn_ids(self, text: str) -> list[int]:
        """One assistant turn's raw text and its end token; its own markup becomes control tokens.

        Only reasoning and call tags do: a turn cannot end itself or open a message in its text.
        """
        return self._ids([*self._own_parts(text), _Control(_END)])

    def assistant_text(
        self, thinking: str = "", content: str = "", calls: Sequence[ToolCall] = ()
    ) -> str:
        """The raw text of a turn, as the model is meant to write it; arguments are not changed."""
        blocks = [content] if content else []
        for call in calls:
            body = {"name": call.name, "arguments": call.arguments}
            blocks.append(f"{CALL_OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{CALL_CLOSE}")
        opening = f"{THINK_OPEN}\n{thinking}\n{THINK_CLOSE}\n\n" if thinking else ""
        return opening + "\n".join(blocks)

    def close_ids(self, finish: str, ids: Sequence[int] = ()) -> list[int]:
        """What to append, with mask 0, to a turn cut by its token limit; [] after a real end.

        ``ids`` are the turn's sampled ids: a reasoning block or a call left open there is closed.
        """
        if finish == "stop":
            return []
        closing: list[str] = []
        if self.style == "hermes":
            open_tag = ""
            tags = {self.tokenizer.token_id(piece): piece for piece in self._own_markup}
            for tag in (tags[i] for i in ids if i in tags):
                open_tag = tag if tag in (THINK_OPEN, CALL_OPEN) else ""
            if open_tag:
                closing = ["\n", _Control(open_tag.replace("<", "</"))]
        return self._ids([*closing, _Control(_END)])

    def observation_ids(self, observations: Sequence[str]) -> list[int]:
        """After an ended assistant turn: newline, its calls' results, the next assistant header."""
        return self._ids(["\n", *self._result_parts(observations), *self._header_parts()])

    def user_ids(self, text: str) -> list[int]:
        """After an ended assistant turn: newline, a user message, the next assistant header."""
        return self._ids(["\n", *self._message_parts("user", text), *self._header_parts()])

    def suffix_ids(self) -> list[int]:
        """The speculation suffix, to be appended where the agent's turn would start.

        It ends the opened turn, gives one user instruction, and opens an assistant turn whose
        reasoning is already over; always the same ids.
        """
        parts: list[str] = [_Control(_END), "\n", *self._message_parts("user", self.suffix)]
        parts += self._header_parts()
        if self.think:
            parts += self._own_parts(f"{THINK_OPEN}\n\n{THINK_CLOSE}\n\n")
        return self._ids(parts)

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
        """What a sampled turn says; its end token is not part of the text."""
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        return parse_turn(self.tokenizer.decode(ids[:end]), tools)

    def call_cuts(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """For each call of a sampled turn: how many of the turn's ids lie before its opening."""
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        text = self.tokenizer.decode(ids[:end])
        spoken = text.rfind(THINK_CLOSE) + 1
        opened = [m.start() for m in re.finditer(re.escape(CALL_OPEN), text) if m.start() >= spoken]
        before = [len(parse_turn(text[:at], tools).calls) for at in opened]
        chars = [len(self.tokenizer.decode(ids[:i])) for i in range(end + 1)]
        starts = [opened[before.index(k)] for k in range(len(self.parse(ids, tools).calls))]
        return [max(i for i, n in enumerate(chars) if n <= at) for at in starts]

    # --- parts: text and markup in order; neighbouring texts are encoded as one ------------------

    def _system_parts(self, own: str | None, tools: Sequence[ToolSpec]) -> list[str]:
        listed = list(tools) if self.tools_in_prompt else []
        texts = [text for text in (self.system, own) if text]
        if not texts and own is None and self.system is None and self.style == "smollm2":
            texts = [_SMOLLM2_SYSTEM]
        if not texts and not listed and own is None:
            return []
        body: list[str] = ["\n\n".join(texts)]
        if listed:
            body += ["\n\n" if texts else "", _TOOLS_HEAD]
            body += ["\n" + _tool_json(tool) for tool in listed]
            body += [_TOOLS_TAIL_1, self._tag(CALL_OPEN), self._tag(CALL_CLOSE), " XML tags:\n"]
            body += [self._tag(CALL_OPEN), _TOOLS_TAIL_2, self._tag(CALL_CLOSE)]
        return [_Control(_START), "system\n", *body, _Control(_END), "\n"]

    def _message_parts(self, role: str, content: str) -> list[str]:
        return [_Control(_START), f"{role}\n", content, _Control(_END), "\n"]

    def _header_parts(self) -> list[str]:
        return [_Control(_START), "assistant\n"]

    def _result_parts(self, results: Sequence[str]) -> list[str]:
        """One user message with all results of a turn, as Qwen3 has it; nothing for no result."""
        if not results:
            return []
        parts: list[str] = [_Control(_START), "user"]
        for result in results:
            parts += ["\n", self._tag(_RESPONSE_OPEN), f"\n{result}\n", self._tag(_RESPONSE_CLOSE)]
        return [*parts, _Control(_END), "\n"]

    def _own_parts(self, text: str) -> list[str]:
        """The assistant's own text, its reasoning and call tags as control tokens."""
        if self._split_own is None:
            return [text]
        pieces = self._split_own.split(text)
        return [_Control(p) if p in self._own_markup else p for p in pieces]

    def _tag(self, piece: str) -> str:
        """A tag as control token where style and vocabulary have it, else as text."""
        control = self.style == "hermes" and self.tokenizer.has(piece)
        return _Control(piece) if control else piece

    def _ids(self, parts: Iterable[str]) -> list[int]:
        ids: list[int] = []
        text = ""
        for part in parts:
            if isinstance(part, _Control):
                ids += self.tokenizer.encode(text) if text else []
                ids.append(self.tokenizer.token_id(part))
                text = ""
            else:
                text += part
        return ids + (self.tokenizer.encode(text) if text else [])


def assert_prefix(shorter: Sequence[int], longer: Sequence[int]) -> None:
    """ValueError unless ``longer`` starts with ``shorter``: a conversation only ever grows."""
    for at, (kept, now) in enumerate(zip(shorter, longer, strict=False)):
        if kept != now:
            raise ValueError(f"not append-only: id {kept} at position {at} became {now}")
    if len(longer) < len(shorter):
        raise ValueError(f"not append-only: {len(shorter)} ids became {len(longer)}")


def _tool_json(tool: ToolSpec) -> str:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)
