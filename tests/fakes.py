"""Stand-ins for tests without a model: a scripted engine, a small world, well- and ill-behaved
speculators. Chat, tokenizer, parser and clock are the real ones."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable

from agentspec.rng import stream
from agentspec.tokens.chat import Chat
from agentspec.tokens.tokenizer import build_word_tokenizer
from agentspec.types import (
    Candidate,
    Completion,
    Message,
    SamplingParams,
    Score,
    Task,
    ToolCall,
    ToolSpec,
)

TASK = Task("t0", "shop", {})


def make_chat() -> Chat:
    return Chat(build_word_tokenizer([]), tools_in_prompt=False, think=True, suffix="next call ?")


def call_text(*calls: tuple[str, dict], thinking: str = "") -> str:
    """Raw text of a turn that makes these calls."""
    return make_chat().assistant_text(thinking, "", [ToolCall(n, a) for n, a in calls])


class FakeEngine:
    """``policy(ids, seed, mode) -> text`` says what is sampled; a token takes ``token_s``."""

    def __init__(self, chat: Chat, policy: Callable[..., str], token_s: float | None = 0.0) -> None:
        self.chat, self.policy, self.token_s = chat, policy, token_s
        self.live: set[FakeSequence] = set()

    def open(self, ids, seed=0, mode="agent"):
        return FakeSequence(self, list(ids), seed, mode)

    def completion(self, ids, seed, mode, params: SamplingParams) -> Completion:
        new = self.chat.turn_ids(self.policy(tuple(ids), seed, mode))
        cut = new[: params.max_tokens]
        logps = tuple(
            -(stream(seed, "logp", len(ids) + i, token) % 1000) / 997 for i, token in enumerate(cut)
        )
        return Completion(tuple(cut), logps, "stop" if len(cut) == len(new) else "length", 3)


class FakeSequence:
    def __init__(self, engine, ids, seed, mode):
        self.engine, self.ids, self.seed, self.mode = engine, ids, seed, mode
        engine.live.add(self)

    def extend(self, ids):
        self.ids.extend(ids)

    def fork(self, seed=0, mode=None):
        return FakeSequence(self.engine, list(self.ids), seed, mode or self.mode)

    async def sample(self, params):
        completion = self.engine.completion(self.ids, self.seed, self.mode, params)
        if self.engine.token_s is not None:  # None: at once, without a pass of the loop
            await asyncio.sleep(self.engine.token_s * len(completion.ids))
        self.ids.extend(completion.ids)
        return completion

    def close(self):
        self.engine.live.discard(self)


KEY = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
SPECS = (
    ToolSpec("get", "", KEY, read_only=True, repeatable=True),
    ToolSpec("search", "metered", KEY, read_only=True, repeatable=False),
    ToolSpec(
        "put",
        "",
        {
            "type": "object",
            "properties": {"key": {"type": "string"}, "value": {"type": "integer"}},
            "required": ["key", "value"],
            "additionalProperties": False,
        },
    ),
    ToolSpec("fail", "", KEY, read_only=True, repeatable=True),
)


class FakeShop:
    """A key-value store; every step is logged; ``replies`` users' lines before silence."""

    def __init__(self, replies: int = 0, specs=SPECS) -> None:
        self.tools = specs
        self.n_replies = replies
        self.steps: list[ToolCall] = []

    def reset(self, task):
        self.rows = {"a": 1, "b": 2}
        self.left = self.n_replies
        return [Message("user", "do")]

    async def step(self, call):
        self.steps.append(call)
        if call.name == "put":
            self.rows[call.arguments["key"]] = call.arguments["value"]
            return "ok"
        if call.name == "fail":
            raise RuntimeError("no")
        return f"{call.name} {self.rows.get(call.arguments['key'])} {self.state_version[:6]}"

    async def reply(self, content):
        self.left -= 1
        return Message("user", "go on") if self.left >= 0 else None

    def fork(self):
        raise NotImplementedError

    @property
    def state_version(self):
        return hashlib.sha256(repr(sorted(self.rows.items())).encode()).hexdigest()

    def score(self):
        return Score(float(self.rows["a"]), 1.0)


def random_policy(ids, seed, mode):
    """A turn that depends on (ids, seed) only: reads, writes, broken and unknown calls, answers."""
    digest = hashlib.sha256(repr((ids, seed)).encode()).digest()
    rng = random.Random(digest)
    kind = rng.random()
    if kind < 0.1:
        return "done"
    if kind < 0.2:
        return "<tool_call>\n{broken\n</tool_call>"
    calls = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(["get", "get", "get", "put", "search", "fail", "nope"])
        arguments = {"key": rng.choice("ab")}
        if name == "put":
            arguments["value"] = rng.choice([1, 2, "x"])
        calls.append((name, arguments))
    return call_text(*calls, thinking="x" * rng.randrange(20))


class Oracle:
    """Knows the agent's next turn; predicts its call number ``which``, after ``delay_s``."""

    def __init__(self, engine, seed, which=0, delay_s=0.0, change=lambda call: call):
        self.engine, self.seed, self.which = engine, seed, which
        self.delay_s, self.change = delay_s, change

    async def propose(self, seq, turn_index, seed):
        text = self.engine.policy(tuple(seq.ids), self.seed, "agent")
        calls = self.engine.chat.parse(self.engine.chat.turn_ids(text)).calls
        await asyncio.sleep(self.delay_s)
        call = self.change(calls[min(self.which, len(calls) - 1)]) if calls else None
        now = asyncio.get_running_loop().time()
        return [Candidate((7, 8, 9), (-0.1,) * 3, call, (), now)]


class Raising:
    """Fails at once, or after a while."""

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s

    async def propose(self, seq, turn_index, seed):
        await asyncio.sleep(self.delay_s)
        raise RuntimeError("speculator bug")


def hostile(kind: str, engine, seed):
    """A speculator of the kind."""
    if kind == "raising":
        return Raising(0.05)
    changes = {
        "right": lambda call: call,
        "second": lambda call: call,
        "slow": lambda call: call,
        "wrong": lambda call: ToolCall("get", {"key": "zzz"}),
        "invalid": lambda call: ToolCall("get", {"key": 5}),
        "unknown": lambda call: ToolCall("nope", {"key": "a"}),
        "write": lambda call: ToolCall("put", {"key": "a", "value": 99}),
        "metered": lambda call: ToolCall("search", {"key": "a"}),
        "failing": lambda call: ToolCall("fail", {"key": "a"}),
    }
    return Oracle(
        engine,
        seed,
        which=1 if kind == "second" else 0,
        delay_s=100.0 if kind == "slow" else 0.01,
        change=changes[kind],
    )


HOSTILE = "right second slow wrong invalid unknown write metered failing raising".split()
