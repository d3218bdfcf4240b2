"""The engine against a full forward pass; independence of rows, neighbours, forks and calls."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentspec.model.config import ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.rollout.engine import (
    Engine,
    Sequence,
    SequenceClosed,
    SequenceTooLong,
)
from agentspec.speculation.clock import LatencyModel, run_simulated
from agentspec.types import Completion, SamplingParams, SequenceDropped

V = 61  # odd, so that no vector width divides it
CACHE = 96
PROMPT = tuple(range(3, 25))
SUFFIX = (7, 8, 9, 10, 11)


@functools.cache
def model() -> tuple[LanguageModel, dict]:
    config = ModelConfig(
        vocab_size=V,
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        d_ff=48,
        rope_theta=1e4,
        tie_embeddings=False,
    )
    language_model = LanguageModel(config)
    params = language_model.init(jax.random.key(5))
    params["head"] = params["head"] * 1.5  # sharper than at the start of training
    return language_model, params


def engine(rows: int = 8, speculator_rows: int = 4, **kwargs) -> Engine:
    kwargs = {"cache_tokens": CACHE, "prefill_chunk": 8} | kwargs
    return Engine(*model(), rows=rows, speculator_rows=speculator_rows, **kwargs)


def held(eng: Engine) -> int:
    """Pages that are held, prompts kept for reuse aside."""
    eng.forget()
    return eng.counters["pages_used"]


def run(main: Callable[[], Awaitable]):
    return run_simulated(main())


@functools.cache
def _forward():
    return jax.jit(model()[0].apply)


def full_logits(ids) -> np.ndarray:
    """Logits after every id, from the uncached forward pass, in float64."""
    padded = np.zeros((1, CACHE), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(_forward()(model()[1], padded), np.float64)[0, : len(ids)]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def words(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, V, n).tolist()


HOT = SamplingParams(temperature=1.0, max_tokens=20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


# -- against the full forward pass -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.5])
def test_logps_and_entropies_equal_the_full_forward(temperature):
    async def main():
        seq = engine().open(PROMPT, seed=3)
        first = await seq.sample(SamplingParams(temperature, max_tokens=17))
        seq.extend(SUFFIX)
        second = await seq.sample(SamplingParams(temperature, max_tokens=9))
        return seq.ids, first, second

    ids, first, second = run(main)
    assert ids == PROMPT + first.ids + SUFFIX + second.ids
    logp = log_softmax(full_logits(ids) / (temperature or 1.0))
    for completion, start in ((first, len(PROMPT)), (second, len(ids) - 9)):
        for i, token in enumerate(completion.ids):
            row = logp[start + i - 1]
            assert abs(completion.logps[i] - row[token]) < 1e-4
            assert abs(completion.entropies[i] + (np.exp(row) * row).sum()) < 1e-4
            if temperature == 0.0:
                assert row[token] >= row.max() - 1e-5


def test_the_first_draw_is_the_gumbel_argmax_at_that_seed_and_position():
    async def main():
        return await engine().open(PROMPT, seed=12).sample(SamplingParams(0.7, max_tokens=1))

    (token,) = run(main).ids
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 12), len(PROMPT))
    noise = np.asarray(jax.random.gumbel(key, (V,), jnp.float32))
    assert token == np.argmax(full_logits(PROMPT)[-1] / 0.7 + noise)


# -- what a completion may not depend on (bit-equal) ----------------------------------------------


async def alone(eng: Engine, prompt=PROMPT, seed=3, params=HOT) -> tuple[Completion, Completion]:
    """Two segments of one agent sequence, nobody else about."""
    seq = eng.open(prompt, seed=seed)
    try:
        first = await seq.sample(params)
        seq.extend(SUFFIX)
        return first, await seq.sample(params)
    finally:
        seq.close()


@functools.cache
def reference() -> tuple[Completion, Completion]:
    return run(lambda: alone(engine()))


def test_neighbours_change_nothing():
    async def main():
        eng = engine()
        others = [alone(eng, words(5 + 6 * i, i), i, GREEDY if i % 2 else HOT) for i in range(7)]
        return (await asyncio.gather(*others[:4], alone(eng), *others[4:]))[4]

    assert run(main) == reference()


@pytest.mark.parametrize("row", [1, 5, 7])
def test_the_row_changes_nothing(row):
    async def main():
        eng = engine()
        for i in range(row):  # these keep their rows
            await eng.open([1 + i]).sample(SamplingParams(max_tokens=1))
        return await alone(eng)

    assert run(main) == reference()


@pytest.mark.parametrize("tokens_per_call", [1, 7])
def test_tokens_per_call_changes_nothing(tokens_per_call):
    assert run(lambda: alone(engine(tokens_per_call=tokens_per_call))) == reference()


@pytest.mark.parametrize("rows", [3, 5])
def test_row_counts_that_no_vector_width_divides(rows):
    async def main(fill: bool):
        eng = engine(rows=rows)
        if not fill:
            return await alone(eng)
        others = [alone(eng, words(9 + i, i), i) for i in range(rows - 1)]
        return (await asyncio.gather(*others, alone(eng)))[-1]

    assert run(lambda: main(True)) == run(lambda: main(False))


def test_an_extension_in_pieces_changes_nothing():
    async def main():
        eng = engine()
        seq = eng.open(PROMPT[:3], seed=3)
        seq.extend(PROMPT[3:4])
        seq.extend(PROMPT[4:])
        return await seq.sample(HOT)

    assert run(main) == reference()[0]


@pytest.mark.parametrize("cut", [1, 4, 7, 12, 21])
def test_prefill_split_by_a_fork_changes_nothing(cut):
    async def main():
        seq = engine().open(PROMPT[:cut], seed=3)
        await seq.fork(seed=9).sample(SamplingParams(max_tokens=2))  # makes the parent prefill
        seq.extend(PROMPT[cut:])
        return await seq.sample(HOT)

    assert run(main) == reference()[0]


def test_speculator_forks_change_nothing_for_the_agent():
    async def speculate(seq: Sequence, seed: int) -> list[Completion]:
        stem = seq.fork(seed=seed, mode="speculator")
        stem.extend(SUFFIX)
        children = [stem.fork(seed=seed + i) for i in range(3)]
        stem.close()

        async def one(child: Sequence) -> Completion:
            completion = await child.sample(SamplingParams(max_tokens=6))
            child.close()
            return completion

        return await asyncio.gather(*map(one, children))

    async def main():
        seq = engine().open(PROMPT, seed=3)
        early = await speculate(seq, 100)  # before the agent has read its own prompt
        late, first = await asyncio.gather(speculate(seq, 100), seq.sample(HOT))
        seq.extend(SUFFIX)
        second, _ = await asyncio.gather(seq.sample(HOT), speculate(seq, 300))
        return early, late, (first, second)

    early, late, agent = run(main)
    assert agent == reference()
    assert early == late
    assert len({completion.ids for completion in early}) == 3


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_fork_equals_its_parent_whenever_it_samples(when):
    async def main():
        eng = engine()
        seq = eng.open(PROMPT, seed=3)
        await seq.sample(HOT)
        seq.extend(SUFFIX)
        fork = seq.fork(seed=3)
        if when == "before":
            got, parent = await fork.sample(HOT), await seq.sample(HOT)
        elif when == "during":
            parent, got = await asyncio.gather(seq.sample(HOT), fork.sample(HOT))
        else:
            parent = await seq.sample(HOT)
            seq.extend((1, 2))
            await seq.sample(HOT)
            got = await fork.sample(HOT)
        return parent, got

    parent, got = run(main)
    assert parent == got == reference()[1]


def test_a_fork_of_a_fork_equals_one_sequence():
    async def main():
        eng = engine()
        a = eng.open(PROMPT[:6], seed=1)
        b = a.fork(seed=2)
        b.extend(PROMPT[6:15])
        c = b.fork(seed=3)
        c.extend(PROMPT[15:])
        a.close()
        b.close()
        first = await c.sample(HOT)
        d = c.fork(seed=3)
        c.close()
        d.extend(SUFFIX)
        second = await d.sample(HOT)
        d.close()
        return first, second, held(eng)

    assert run(main) == (*reference(), 0)


def test_seeds_give_different_samples_and_the_same_seed_the_same():
    async def main():
        eng = engine()
        return await asyncio.gather(*[eng.open(PROMPT, seed=s).sample(HOT) for s in range(8)])

    samples = run(main)
    assert len({completion.ids for completion in samples}) == 8
    assert samples[3] == reference()[0]


# -- forks and rows --------------------------------------------------------------------------------


def candidates(eng: Engine, mode: str, close_stem: bool, close_children: bool) -> list[Completion]:
    async def main():
        root = eng.open(PROMPT, seed=1)
        await root.sample(SamplingParams(max_tokens=3))
        stem = root.fork(seed=2, mode=mode)
        stem.extend(SUFFIX)
        children = [stem.fork(seed=10 + i) for i in range(8)]
        if close_stem:
            stem.close()

        async def one(child: Sequence) -> Completion:
            completion = await child.sample(SamplingParams(max_tokens=5))
            if close_children:
                child.close()
            return completion

        return await asyncio.gather(*map(one, children))

    return run(main)


@pytest.mark.parametrize("close_stem", [True, False])
@pytest.mark.parametrize("close_children", [True, False])
def test_eight_candidates_of_one_stem_go_through_few_rows(close_stem, close_children):
    wide = candidates(engine(speculator_rows=16), "speculator", True, True)
    assert len({c.ids for c in wide}) == 8
    for speculator_rows in (2, 4):
        eng = engine(speculator_rows=speculator_rows)
        narrow = candidates(eng, "speculator", close_stem, close_children)
        assert [c.ids for c in narrow] == [c.ids for c in wide]
        np.testing.assert_allclose(
            [c.logps for c in narrow], [c.logps for c in wide], rtol=0, atol=1e-5
        )
        # The suffix and the last sampled id before it: read once, not eight times.
        assert eng.counters["prefilled_tokens/speculator"] == len(SUFFIX)


def test_eight_agent_forks_on_three_rows():
    async def main(rows: int):
        root = engine(rows=rows).open(PROMPT, seed=1)

        async def one(seed: int) -> Completion:
            child = root.fork(seed=seed)
            try:
                return await child.sample(HOT)
            finally:
                child.close()

        tasks = [asyncio.ensure_future(one(seed)) for seed in range(8)]
        await asyncio.sleep(0)
        root.close()
        return await asyncio.gather(*tasks)

    assert [c.ids for c in run(lambda: main(3))] == [c.ids for c in run(lambda: main(8))]


def test_many_stems_with_children_do_not_block_each_other():
    async def main():
        eng = engine(rows=8, speculator_rows=4)

        async def episode(i: int) -> int:
            agent = eng.open(words(4 + i, i), seed=i)
            stem = agent.fork(seed=0, mode="speculator")
            stem.extend(SUFFIX)
            children = [stem.fork(seed=s) for s in range(5)]
            done = await asyncio.gather(
                agent.sample(HOT), *[c.sample(SamplingParams(max_tokens=3 + i)) for c in children]
            )
            for seq in (agent, stem, *children):
                seq.close()
            return len(done)

        assert await asyncio.gather(*map(episode, range(8))) == [6] * 8
        return held(eng)

    assert run(main) == 0


def test_stems_that_sample_themselves_and_close_last_do_not_block_each_other():
    """The way of self-speculation: the stem is the first candidate; all close at the end."""

    async def main(speculator_rows: int):
        eng = engine(speculator_rows=speculator_rows, latency=LatencyModel(token_s=1.0))

        async def propose(i: int) -> list[tuple[int, ...]]:
            agent = eng.open(words(4 + i, i), seed=i)
            await agent.sample(SamplingParams(max_tokens=3))
            stem = agent.fork(seed=0, mode="speculator")
            stem.extend(SUFFIX)
            handles = [stem, *(stem.fork(seed=s) for s in (1, 2, 3))]
            done = await asyncio.gather(
                *[h.sample(SamplingParams(max_tokens=4 + n)) for n, h in enumerate(handles)]
            )
            for handle in (*handles, agent):
                handle.close()
            return [completion.ids for completion in done]

        found = await asyncio.gather(*map(propose, range(4)))
        assert held(eng) == 0
        return found, eng.counters

    wide, wide_counters = run(lambda: main(16))
    for speculator_rows in (2, 4):
        narrow, counters = run(lambda n=speculator_rows: main(n))
        assert narrow == wide
        for name in ("prefilled_tokens/speculator", "sampled_tokens/speculator"):
            assert counters[name] == wide_counters[name]


def test_closing_children_that_never_sampled_frees_the_closed_parent():
    async def main():
        eng = engine(rows=2)
        seq = eng.open(PROMPT)
        await seq.sample(SamplingParams(max_tokens=2))
        children = [seq.fork(seed=i) for i in range(2)]
        grandchild = children[0].fork(seed=7)
        seq.close()
        children[0].close()
        children[1].close()
        assert held(eng) == 1
        grandchild.close()
        grandchild.close()
        return held(eng)

    assert run(main) == 0


def test_ten_sequences_on_four_rows_are_all_served_and_one_prompt_is_read_once():
    async def main():
        eng = engine(rows=4, latency=LatencyModel(token_s=1.0))
        loop = asyncio.get_running_loop()
        done = []

        async def one(i: int) -> Completion:
            seq = eng.open(PROMPT, seed=i)
            completion = await seq.sample(HOT)
            done.append((i, loop.time()))
            seq.close()
            return completion

        return await asyncio.gather(*map(one, range(10))), done, eng.counters

    completions, done, counters = run(main)
    assert done == [(i, 20.0) for i in range(10)]
    assert completions[3] == run(lambda: alone(engine(rows=4)))[0]
    assert counters["prefilled_tokens/agent"] == len(PROMPT) - 1
    assert counters["prefix_tokens_hit"] == 9 * (len(PROMPT) - 1)


def test_idle_sequences_keep_no_row_from_others():
    async def main():
        eng = engine(rows=1)
        holder = eng.open(PROMPT, seed=3)
        first = await holder.sample(HOT)
        await eng.open(words(9, 1)).sample(HOT)
        holder.extend(SUFFIX)
        return first, await holder.sample(HOT)

    assert run(main) == run(lambda: alone(engine(rows=1)))


# -- rewind, limits, cancellation, weights ---------------------------------------------------------


def test_rewind_then_resample_equals_fresh():
    async def main():
        eng = engine()
        seq = eng.open(PROMPT, seed=3)
        first = await seq.sample(HOT)
        kept = len(PROMPT) + 6
        seq.rewind(kept)
        again = await seq.sample(HOT)
        fresh = await eng.open(PROMPT + first.ids[:6], seed=3).sample(HOT)
        return first, again, fresh

    first, again, fresh = run(main)
    assert again.ids[:14] == first.ids[6:]  # the same cache and the same positions
    assert again.logps[:14] == first.logps[6:]
    assert fresh.ids == again.ids
    np.testing.assert_allclose(fresh.logps, again.logps, rtol=0, atol=1e-5)


def test_rewinding_a_parent_leaves_its_forks_their_ids():
    async def main():
        eng = engine()
        seq = eng.open(PROMPT, seed=1)
        fork = seq.fork(seed=3)
        await seq.sample(HOT)
        seq.rewind(4)
        seq.extend((50, 51, 52, 53, 54, 55, 56))
        await seq.sample(HOT)
        return await fork.sample(HOT)

    got = run(main)
    assert got.ids == reference()[0].ids
    np.testing.assert_allclose(got.logps, reference()[0].logps, rtol=0, atol=1e-5)


def test_stop_ids_end_a_segment_and_are_part_of_it():
    full = reference()[0]
    stop = full.ids[5]
    n = full.ids.index(stop) + 1

    async def main():
        eng = engine()
        other = eng.open(PROMPT, seed=4).sample(HOT)
        params = SamplingParams(1.0, 20, stop_ids=(V - 1 if V - 1 != stop else 0, stop))
        return (await asyncio.gather(other, eng.open(PROMPT, seed=3).sample(params)))[1]

    got = run(main)
    assert (got.ids, got.logps, got.finish) == (full.ids[:n], full.logps[:n], "stop")
    assert full.finish == "length"


def test_the_end_of_the_cache():
    async def main():
        eng = engine()
        seq = eng.open(words(CACHE - 5, 0))
        last = await seq.sample(SamplingParams(max_tokens=50))
        assert (len(last.ids), last.finish, seq.room) == (5, "length", 0)
        logp = log_softmax(full_logits(seq.ids))
        assert abs(last.logps[4] - logp[CACHE - 2, last.ids[4]]) < 1e-4
        assert await seq.sample(HOT) == Completion((), (), "length")
        with pytest.raises(SequenceTooLong, match=f"{CACHE + 1} ids .*cache_tokens={CACHE}"):
            seq.extend([1])
        assert len(seq.ids) == CACHE
        with pytest.raises(SequenceTooLong, match="200 ids"):
            eng.open([1] * 200)

    run(main)


@pytest.mark.parametrize("latency", [None, LatencyModel(token_s=1.0, prefill_token_s=0.5)])
def test_cancelled_samples_leave_the_sequence_usable(latency):
    async def main():
        eng = engine(rows=2, latency=latency)
        seq = eng.open(PROMPT, seed=3)
        task = asyncio.ensure_future(seq.sample(HOT))
        await asyncio.sleep(4.0 if latency else 0)  # computed but undelivered; or not yet computed
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seq.ids == PROMPT
        first = await seq.sample(HOT)
        seq.extend(SUFFIX)
        second = await seq.sample(HOT)
        seq.close()
        return first, second, held(eng)

    assert run(main) == (*run(lambda: alone(engine(rows=2))), 0)


def test_modelled_time_counts_what_the_segment_reads_and_samples():
    async def main():
        eng = engine(latency=LatencyModel(token_s=1.0, prefill_token_s=0.5))
        now = asyncio.get_running_loop().time
        seq = eng.open(PROMPT, seed=3)
        fork = seq.fork(seed=4, mode="speculator")
        fork.extend(SUFFIX)
        child = fork.fork(seed=5)
        times = []
        for sequence in (seq, child):
            start = now()
            await sequence.sample(SamplingParams(max_tokens=4))
            times.append(now() - start)
        seq.extend((1, 2))
        start = now()
        await seq.sample(SamplingParams(max_tokens=4))
        return [*times, now() - start]

    assert run(main) == [11 + 4.0, 11 + 2.5 + 4.0, 1 + 4.0]


def test_load_swaps_weights_and_what_was_read_with_the_old_ones_is_read_anew():
    _, params = model()
    other = jax.tree.map(lambda x: x * 1.5, params)

    async def main():
        eng = engine(tokens_per_call=5)  # programs of its own, so that compilations can be counted
        seq = eng.open(PROMPT, seed=3)
        task = asyncio.ensure_future(seq.sample(HOT))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"load\(version=7\) while 1 sequences"):
            eng.load(other, version=7)
        old = await task
        seq.extend(SUFFIX)
        eng.load(other, version=7)
        new, again = await seq.sample(HOT), await eng.open(PROMPT, seed=3).sample(HOT)
        compiled = {k: n for k, n in eng.counters.items() if k.startswith("compiled")}
        fresh = engine()
        fresh.load(other, version=7)
        expected = [await fresh.open(ids, seed=3).sample(HOT) for ids in (seq.ids[:-20], PROMPT)]
        return old, [new, again], expected, compiled

    old, new, expected, compiled = run(main)
    assert old.ids == reference()[0].ids and old.version == 0
    assert new == expected and new[0].version == 7 and new[1].logps != old.logps
    assert compiled == {"compiled/prefill": 1, "compiled/decode": 1}


def test_misuse_is_refused_in_words():
    with pytest.raises(ValueError, match="speculator_rows must be at least 0, got -1"):
        engine(speculator_rows=-1)
    with pytest.raises(ValueError, match="pages=6 of 64 tokens are too few.* at least 8"):
        engine(pages=6)
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        engine(rows=0)
    eng = engine(speculator_rows=0)
    with pytest.raises(ValueError, match="no rows for mode 'speculator'"):
        eng.open(PROMPT, mode="speculator")
    with pytest.raises(ValueError, match="seed -1"):
        eng.open(PROMPT, seed=-1)

    async def main():
        seq = eng.open(PROMPT)
        for params, words_ in (
            (SamplingParams(max_tokens=0), "max_tokens"),
            (SamplingParams(temperature=math.nan), "temperature"),
            (SamplingParams(temperature=-0.5), "temperature"),
            (SamplingParams(stop_ids=tuple(range(9))), "at most 8 stop ids, got 9"),
            (SamplingParams(top_p=0.0), "top_p must be above 0 and at most 1, got 0.0"),
            (SamplingParams(top_k=-1), "top_k must be at least 0"),
            (SamplingParams(max_tokens=3, min_tokens=4), "min_tokens must be 0 to max_tokens=3"),
            (SamplingParams(max_tokens=1, forced=(1, 2)), "2 forced ids"),
        ):
            with pytest.raises(ValueError, match=words_):
                await seq.sample(params)
        with pytest.raises(ValueError, match="at least one id"):
            await eng.open(()).sample(HOT)
        with pytest.raises(ValueError, match="rewind to 23: the sequence has 22 ids"):
            seq.rewind(23)
        task = asyncio.ensure_future(seq.sample(HOT))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="extend while the sequence is sampling"):
            seq.extend([1])
        seq.close()
        with pytest.raises(SequenceClosed):
            await task
        with pytest.raises(SequenceClosed, match="fork on a closed sequence of 22 ids"):
            seq.fork(seed=1)
        speculator = engine().open(PROMPT, mode="speculator")
        with pytest.raises(ValueError, match="cannot be forked in mode 'agent'"):
            speculator.fork(seed=1, mode="agent")

    run(main)


# -- limits of a draw and of the cache ------------------------------------------------------------


def test_forced_ids_come_first_with_the_log_probs_of_the_model():
    async def main():
        eng = engine()
        free = await eng.open(PROMPT, seed=3).sample(HOT)
        forced = dataclasses.replace(HOT, forced=free.ids[:18])
        same = await eng.open(PROMPT, seed=3).sample(forced)
        other = await eng.open(PROMPT, seed=3).sample(dataclasses.replace(HOT, forced=(1, 2, 3)))
        return free, same, other

    free, same, other = run(main)
    assert same == free
    assert other.ids[:3] == (1, 2, 3)
    logp = log_softmax(full_logits(PROMPT + other.ids))
    for i, token in enumerate(other.ids):
        assert abs(other.logps[i] - logp[len(PROMPT) + i - 1][token]) < 1e-4


def test_no_stop_id_before_the_minimum_and_limits_of_a_neighbour_change_nothing():
    async def main():
        eng = engine()
        stop = (await eng.open(PROMPT, seed=3).sample(HOT)).ids[2]
        late = SamplingParams(max_tokens=20, stop_ids=(stop,), min_tokens=9)
        narrow = SamplingParams(max_tokens=20, top_k=1)
        return await asyncio.gather(
            eng.open(PROMPT, seed=3).sample(late),
            eng.open(PROMPT, seed=5).sample(narrow),
            eng.open(PROMPT, seed=6).sample(GREEDY),
            eng.open(PROMPT, seed=3).sample(HOT),
            eng.open(PROMPT, seed=3).sample(dataclasses.replace(HOT, top_p=1e-6)),
        ), stop

    (late, narrow, greedy, hot, top), stop = run(main)
    assert stop not in late.ids[:9]
    assert narrow.ids == greedy.ids == top.ids
    assert hot == reference()[0]


@pytest.mark.parametrize("pages", [32, 40])
def test_under_pressure_agents_finish_with_the_same_bits_and_speculators_are_dropped(pages):
    async def main(pages: int):
        eng = engine(rows=6, speculator_rows=4, page_tokens=8, pages=pages)

        async def episode(i: int):
            agent = eng.open(words(6 + i, i), seed=i)
            turns, dropped = [], 0
            for _ in range(3):
                fork = agent.fork(seed=9, mode="speculator")
                fork.extend(SUFFIX)
                both = await asyncio.gather(
                    agent.sample(HOT), fork.sample(HOT), return_exceptions=True
                )
                assert isinstance(both[1], (Completion, SequenceDropped))
                dropped += isinstance(both[1], SequenceDropped)
                turns.append(both[0])
                fork.close()
                agent.extend(SUFFIX)
            agent.close()
            return turns, dropped

        found = await asyncio.gather(*map(episode, range(9)))
        return [turns for turns, _ in found], sum(n for _, n in found), eng, held(eng)

    calm, n_dropped, _, n_held = run(lambda: main(400))
    assert n_dropped == n_held == 0
    pressed, n_dropped, eng, n_held = run(lambda: main(pages))
    assert pressed == calm
    assert n_held == 0
    assert eng.counters["pauses"] > 0 and eng.counters["saved_pages"] > 0
    assert n_dropped == eng.counters.get("drops", 0)


# -- the live driver -------------------------------------------------------------------------------


def test_live_driver_gives_the_same_and_survives_cancellation():
    async def main():
        eng = engine(rows=3, speculator_rows=2)

        async def agent(seed: int):
            return await alone(eng, seed=seed)

        async def speculator(seed: int):
            seq = eng.open(PROMPT + SUFFIX, seed=seed, mode="speculator")
            completion = await seq.sample(HOT)
            seq.close()
            return completion

        doomed = [asyncio.ensure_future(agent(90 + i)) for i in range(4)]
        tasks = [asyncio.ensure_future(agent(i)) for i in range(6)]
        others = [asyncio.ensure_future(speculator(i)) for i in range(5)]
        await asyncio.sleep(0.005)
        for task in doomed:
            task.cancel()
        done = await asyncio.wait_for(asyncio.gather(*tasks, *others), 60)
        rest = await asyncio.gather(*doomed, return_exceptions=True)
        return done, rest, held(eng)

    eng_rows_3 = run(lambda: alone(engine(rows=3)))
    done, rest, n_held = asyncio.run(main())
    assert done[3] == eng_rows_3
    assert len({c.ids for c in done[6:]}) == 5
    assert all(isinstance(r, asyncio.CancelledError) for r in rest)
    assert n_held == 0


def test_a_failing_device_call_reaches_everyone_who_waits():
    async def main():
        eng = engine(rows=2)
        eng.load(eng.params | {"head": jnp.zeros((V, 3))}, version=1)
        samples = [eng.open(PROMPT, seed=i).sample(HOT) for i in range(3)]
        return await asyncio.wait_for(asyncio.gather(*samples, return_exceptions=True), 60)

    assert [type(error) for error in asyncio.run(main())] == [TypeError] * 3
