"""The engine under arbitrary schedules of calls, with pages plenty and pages short.

A schedule is drawn first and then played, so that it can be played again: with other pages, in
another order, on the plain engine. Every token is judged by a full forward pass over its own ids:
the log-prob, the entropy, and which id the noise at that (seed, position) picks.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.model.config import LinearShape, ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.rollout.engine import Engine, SequenceClosed, SequenceTooLong
from agentspec.rollout.plain import PlainEngine
from agentspec.speculation.clock import LatencyModel, run_simulated
from agentspec.types import Completion, SamplingParams, SequenceDropped

V, CACHE, PAGE = 61, 64, 8
FEWEST, FEW, PLENTY = 20, 24, 400  # pages; the first is the least that the engine takes
STOPS = (1, 2, 3, 4)
MOST_OPEN = 12
KINDS = ("dense", "hybrid")


@functools.cache
def model(kind: str) -> tuple[LanguageModel, dict]:
    shape: dict[str, Any] = {"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    if kind == "hybrid":
        shape = {"n_layers": 4, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "rotary_dim": 4}
        shape |= {"layer_types": ("linear", "linear", "linear", "full"), "family": "qwen3_5"}
        shape |= {"linear": LinearShape(key_heads=1, value_heads=2, key_dim=16, value_dim=8)}
        # Norms of what is about 0 blow rounding up: with smaller keys and an epsilon of 1e-6 a
        # change of the weights in the last bit moves some log-probs by 1e-3, with these by 1e-5.
        shape |= {"chunk": 16, "norm_eps": 1e-2}
    config = ModelConfig(vocab_size=V, d_model=32, d_ff=48, rope_theta=1e4, **shape)
    language_model = LanguageModel(config)
    params = language_model.init(jax.random.key(5))
    # A wrong id 20 tokens back shows as 1e-2 in the log-probs.
    return language_model, params | {"embedding": params["embedding"] * 1.5}


ENGINES: dict[tuple[str, int], Engine] = {}  # compiling one costs seconds


@contextlib.contextmanager
def engine(kind: str, pages: int) -> Iterator[Engine]:
    """An engine on which nothing is open; after a failure nobody gets it again."""
    eng = ENGINES.pop((kind, pages), None) or Engine(
        *model(kind),
        rows=3,
        speculator_rows=3,
        cache_tokens=CACHE,
        prefill_chunk=16,
        tokens_per_call=4,
        latency=LatencyModel(token_s=1.0, prefill_token_s=0.01),
        page_tokens=PAGE,
        pages=pages,
    )
    yield eng
    eng.forget()
    assert (eng.counters["pages_used"], eng.counters["states_used"]) == (0, 0)
    ENGINES[kind, pages] = eng


# -- schedules -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
    """One act. ``who`` numbers the open sequences, ``n`` and ``seed`` say how much and as whom."""

    act: str  # open | extend | fork | speculate | rewind | close | sample
    who: int = 0
    n: int = 0
    seed: int = 0
    samples: tuple[tuple[int, SamplingParams], ...] = ()  # of ``sample``: side by side
    # Meanwhile, after so many device calls: cancel or close one of these, or speculate from it.
    events: tuple[tuple[int, str, int], ...] = ()


NUMBERS = st.integers(0, 99)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 1.0, 0.7, 0.0]),
    max_tokens=st.integers(3, 24),
    stop_ids=st.sampled_from([(), STOPS]),
    min_tokens=st.integers(0, 3),
    forced=st.sampled_from([(), (), (9,), (9, 8, 7)]),
)
EVENTS = st.tuples(
    st.integers(0, 6), st.sampled_from(["cancel", "close", "speculate", "speculate"]), NUMBERS
)
SAMPLE = st.builds(
    Step,
    st.just("sample"),
    samples=st.lists(st.tuples(NUMBERS, PARAMS), min_size=1, max_size=6).map(tuple),
    events=st.lists(EVENTS, max_size=3).map(lambda events: tuple(sorted(events))),
)
ACTS = ["open", "extend", "fork", "speculate", "speculate", "rewind", "close"]
OTHER = st.builds(Step, st.sampled_from(ACTS), NUMBERS, NUMBERS, NUMBERS)
FIRST = st.lists(
    st.builds(Step, st.just("open"), NUMBERS, NUMBERS, NUMBERS), min_size=2, max_size=5
)
REST = st.lists(st.one_of(SAMPLE, OTHER), min_size=4, max_size=14)
SCHEDULES = st.builds(lambda first, rest: (*first, *rest), FIRST, REST)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A completion with what it depends on."""

    before: tuple[int, ...]
    seed: int
    params: SamplingParams
    got: Completion


class Player:
    """Plays one schedule on an engine and keeps what was sampled."""

    def __init__(self, eng: Any, shuffle: int = 0) -> None:
        """``shuffle``: samples of one step are submitted in an order drawn from this seed."""
        self.engine, self.random = eng, random.Random(shuffle) if shuffle else None
        self.open: dict[int, Any] = {}  # by number, oldest first
        self.seeds: dict[int, int] = {}
        self.segments: dict[tuple[int, int], Segment] = {}  # by sequence and step
        self.dropped: set[int] = set()  # sequences that lost a sample, and their forks
        self.step_number = 0

    async def play(self, schedule: tuple[Step, ...]) -> Player:
        for self.step_number, step in enumerate(schedule):
            numbers = list(self.open)
            if step.act == "open":
                self.add(None, step.seed, step.n)
            elif step.act == "sample":
                await self.side_by_side(step, numbers)
            elif numbers:
                self.one(step, numbers[step.who % len(numbers)])
        for sequence in self.open.values():
            sequence.close()
        return self

    def add(self, parent: int | None, seed: int, n: int, mode: str | None = None) -> int | None:
        """Opens or forks a sequence and returns its number; None when there are enough."""
        number = len(self.seeds)
        if len(self.open) >= MOST_OPEN:
            return None
        if parent is None:
            self.open[number] = self.engine.open(words(1 + n % 50, seed % 3), seed, "agent")
        else:
            self.open[number] = self.open[parent].fork(seed, mode)
            self.dropped |= {number} if parent in self.dropped else set()
        self.seeds[number] = seed
        return number

    def one(self, step: Step, number: int) -> None:
        sequence = self.open[number]
        if step.act == "extend":
            sequence.extend(words(min(1 + step.n % 20, sequence.room), step.seed))
        elif step.act in ("fork", "speculate"):
            child = self.add(number, step.seed, 0, "speculator" if step.act != "fork" else None)
            if child is not None and step.act == "speculate":
                self.open[child].extend(words(min(5, sequence.room), 7))
        elif step.act == "rewind":
            sequence.rewind(max(1, len(sequence.ids) * (step.n % 16) // 16))
        else:
            self.open.pop(number).close()

    async def side_by_side(self, step: Step, numbers: list[int]) -> None:
        """Samples several at once; while they run, device calls and events take turns."""
        wanted = {numbers[who % len(numbers)]: how for who, how in step.samples if numbers}
        order = list(wanted)
        if self.random:
            self.random.shuffle(order)
        tasks = {n: asyncio.create_task(self.sample(n, wanted[n])) for n in order}
        await asyncio.sleep(0)
        calls = 0
        for at, what, who in step.events if tasks else ():
            while calls < at:
                self.engine.step()
                await asyncio.sleep(0)
                calls += 1
            number = list(wanted)[who % len(wanted)]
            if what == "cancel":
                tasks[number].cancel()
            elif what == "close":
                if number in self.open:
                    self.open.pop(number).close()
            elif number in self.open:
                child = self.add(number, 100 + who, 0, "speculator")
                if child is not None:
                    self.open[child].extend(words(min(5, self.open[child].room), 7))
                    params = SamplingParams(max_tokens=8)
                    tasks[child] = asyncio.create_task(self.sample(child, params))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks.values())

    async def sample(self, number: int, params: SamplingParams) -> None:
        """Samples, and checks what the handle shows afterwards however it ended."""
        sequence, before = self.open[number], self.open[number].ids
        try:
            got = await sequence.sample(params)
        except (asyncio.CancelledError, SequenceClosed):
            assert sequence.ids == before
        except SequenceDropped:
            assert sequence.mode == "speculator" and sequence.ids == before
            self.dropped.add(number)
        else:
            assert sequence.ids == before + got.ids
            segment = Segment(before, self.seeds[number], params, got)
            self.segments[number, self.step_number] = segment


def words(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, V, n).tolist()


def play(kind: str, pages: int, schedule: tuple[Step, ...], shuffle: int = 0) -> Player:
    with engine(kind, pages) as eng:
        return run_simulated(Player(eng, shuffle).play(schedule))


# -- the judge -------------------------------------------------------------------------------------

ROWS = 16  # of one forward pass, so that there is one shape


@functools.cache
def forward(kind: str):
    return jax.jit(model(kind)[0].apply)


@jax.jit
def noise(seeds_R: jax.Array, positions_R: jax.Array) -> jax.Array:
    """What is added to the logits of the token at that position: a function of both alone."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), position)
        return jax.random.gumbel(key, (V,), jnp.float32)

    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(seeds_R, positions_R)


def judge(kind: str, segments: list[Segment], tally: collections.Counter[str]) -> None:
    """Compares segments with the full forward pass over their ids; counts tokens and ties."""
    for first in range(0, len(segments), ROWS):
        part = segments[first : first + ROWS]
        ids_RT, seeds_R = np.zeros((ROWS, CACHE), np.int32), np.zeros(ROWS, np.uint32)
        for r, segment in enumerate(part):
            ids = segment.before + segment.got.ids
            ids_RT[r, : len(ids)], seeds_R[r] = ids, segment.seed
        logits_RTV = np.asarray(forward(kind)(model(kind)[1], ids_RT), np.float64)
        noise_RTV = np.asarray(noise(seeds_R, np.arange(CACHE)), np.float64)
        for r, segment in enumerate(part):
            start, n = len(segment.before), len(segment.got.ids)
            judge_one(
                segment,
                logits_RTV[r, start - 1 : start - 1 + n],
                noise_RTV[r, start : start + n],
                tally,
            )


def judge_one(
    segment: Segment, logits_NV: np.ndarray, noise_NV: np.ndarray, tally: collections.Counter[str]
) -> None:
    params, got, n = segment.params, segment.got, len(segment.got.ids)
    budget = min(params.max_tokens, CACHE - len(segment.before))
    stopped = n > 0 and got.ids[-1] in params.stop_ids
    assert (got.finish == "stop") == stopped and (stopped or n == budget)
    assert not set(got.ids[:-1]) & set(params.stop_ids)
    assert got.ids[: len(params.forced)] == params.forced[:n]
    if not n:
        return
    taken = (np.arange(n), list(got.ids))
    scaled_NV = logits_NV / (params.temperature or 1.0)
    logp_NV = scaled_NV - np.log(np.exp(scaled_NV).sum(-1, keepdims=True))
    np.testing.assert_allclose(got.logps, logp_NV[taken], rtol=0, atol=1e-4)
    entropies_N = -(np.exp(logp_NV) * logp_NV).sum(-1)
    np.testing.assert_allclose(got.entropies, entropies_N, rtol=0, atol=1e-4)

    score_NV = scaled_NV + noise_NV * (params.temperature > 0)
    score_NV[: params.min_tokens, list(params.stop_ids)] = -np.inf
    lost_N = (score_NV.max(-1) - score_NV[taken])[len(params.forced) :]
    assert (lost_N <= 1e-4).all(), f"another id should have been drawn: {lost_N.tolist()}"
    tally["tokens"] += n
    tally["ties"] += int((lost_N > 0).sum())


# -- any schedule ----------------------------------------------------------------------------------


def any_schedule(kind: str, n: int) -> None:
    tally: collections.Counter[str] = collections.Counter()

    @settings(
        max_examples=n, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(pages=st.sampled_from([FEWEST, FEW, PLENTY]), schedule=SCHEDULES)
    def one(pages: int, schedule: tuple[Step, ...]) -> None:
        played = play(kind, pages, schedule)
        assert not (played.dropped and pages == PLENTY)
        judge(kind, list(played.segments.values()), tally)

    one()
    assert tally["tokens"] > 20 * n
    assert tally["ties"] <= max(1, tally["tokens"] // 10_000)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_that_of_a_full_forward_pass(kind):
    any_schedule(kind, 20)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_that_of_a_full_forward_pass_in_many_schedules(kind):
    any_schedule(kind, 150)


# -- the same schedule twice -----------------------------------------------------------------------


def same_bits(kind: str, n: int) -> None:
    @settings(
        max_examples=n, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(pages=st.sampled_from([FEWEST, FEW]), schedule=SCHEDULES, shuffle=st.integers(1, 9))
    def one(pages: int, schedule: tuple[Step, ...], shuffle: int) -> None:
        calm = play(kind, PLENTY, schedule)
        short = play(kind, pages, schedule, shuffle)
        assert not calm.dropped
        for (number, step), segment in calm.segments.items():
            if number not in short.dropped:
                assert short.segments.get((number, step)) == segment

    one()


@pytest.mark.parametrize("kind", KINDS)
def test_neither_pages_nor_order_change_a_bit(kind):
    same_bits(kind, 6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_neither_pages_nor_order_change_a_bit_in_many_schedules(kind):
    same_bits(kind, 20)


# -- the plain engine ------------------------------------------------------------------------------

LIMITED = SamplingParams(0.7, 9, STOPS, top_p=0.8, top_k=7, min_tokens=3, forced=(9, 8))
CALLS = (
    Step("open", n=36, seed=3),
    Step("open", n=0, seed=4),
    Step("sample", samples=((0, SamplingParams(max_tokens=9)), (1, LIMITED))),
    Step("extend", who=0, n=6, seed=5),
    Step("speculate", who=0, seed=6),
    Step("fork", who=1, seed=7),
    Step("sample", samples=tuple((who, LIMITED) for who in range(4))),
    Step("rewind", who=0, n=9),
    Step("sample", samples=((0, SamplingParams(0.0, 5)), (3, SamplingParams(max_tokens=99)))),
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_engine_samples_the_same(kind):
    eng = PlainEngine(*model(kind), cache_tokens=CACHE, prefill_chunk=8)
    plain = run_simulated(Player(eng).play(CALLS)).segments
    paged = play(kind, PLENTY, CALLS).segments
    assert len(plain) == 8 and plain.keys() == paged.keys()
    for key, segment in plain.items():
        got, other = segment.got, paged[key].got
        assert (got.ids, got.finish) == (other.ids, other.finish)
        np.testing.assert_allclose(got.logps, other.logps, rtol=0, atol=1e-4)
        np.testing.assert_allclose(got.entropies, other.entropies, rtol=0, atol=1e-4)
    unlimited = [segment for segment in plain.values() if segment.params != LIMITED]
    judge(kind, unlimited, collections.Counter())


def test_handles_of_the_plain_engine():
    async def main():
        seq = PlainEngine(*model("dense"), cache_tokens=CACHE).open(words(50, 1), seed=1)
        before = seq.ids
        assert seq.room == CACHE - 50
        with pytest.raises(SequenceTooLong):
            seq.extend([5] * 15)
        task = asyncio.create_task(seq.sample(SamplingParams(max_tokens=4)))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="while the sequence is sampling"):
            seq.rewind(3)
        fork = seq.fork(seed=1)  # the ids before the sample under way
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seq.ids == fork.ids == before
        assert (await seq.sample(SamplingParams(max_tokens=99))).ids == seq.ids[50:]
        assert seq.room == 0 and (await seq.sample(SamplingParams())).ids == ()
        task = asyncio.create_task(fork.sample(SamplingParams()))
        await asyncio.sleep(0)
        fork.close()
        with pytest.raises(SequenceClosed):
            await task
        with pytest.raises(SequenceClosed):
            fork.extend([1])

    run_simulated(main())
