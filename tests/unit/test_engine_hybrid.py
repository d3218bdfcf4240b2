"""The engine with a hybrid model, whose rows hold a state instead of single tokens.

Every completion's log-probs are compared with a full forward pass over its ids: a row that was
copied at the wrong token, or not wound back, shows at once.
"""

from __future__ import annotations

import asyncio
import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.model.config import LinearShape, ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.rollout.engine import Engine, Sequence
from agentspec.speculation.clock import LatencyModel, run_simulated
from agentspec.types import Completion, SamplingParams

CONFIG = ModelConfig(
    vocab_size=61,
    d_model=32,
    n_layers=4,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    rotary_dim=4,
    d_ff=48,
    rope_theta=1e4,
    family="qwen3_5",
    layer_types=("linear", "linear", "linear", "full"),
    linear=LinearShape(key_heads=1, value_heads=2, key_dim=8, value_dim=8),
    chunk=16,
)
PROMPT = tuple(range(3, 40))
TEN = SamplingParams(1.0, 10, ())


@functools.cache
def model() -> tuple[LanguageModel, dict]:
    language_model = LanguageModel(CONFIG)
    params = language_model.init(jax.random.key(5))
    # logits that leave much open, so that a wrong state shows
    return language_model, params | {"embedding": params["embedding"] * 2.5}


@functools.cache
def forward():
    return jax.jit(model()[0].apply)


def engine(rows: int = 6, speculator_rows: int = 4) -> Engine:
    return Engine(
        *model(),
        rows=rows,
        speculator_rows=speculator_rows,
        cache_tokens=160,
        prefill_chunk=16,
        tokens_per_call=4,
    )


def check(sequence: Sequence, completion: Completion) -> None:
    """The completion's log-probs are those of the full forward pass, and so is the next one."""
    ids = np.zeros((1, 160), np.int32)
    ids[0, : len(sequence.ids)] = sequence.ids
    logits = np.asarray(forward()(model()[1], ids)[0], np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    first = len(sequence.ids) - len(completion.ids)
    wanted = [logp[first + i - 1, token] for i, token in enumerate(completion.ids)]
    assert len(completion.ids) > 0
    np.testing.assert_allclose(completion.logps, wanted, atol=1e-4)


async def sampled(sequence: Sequence, params: SamplingParams = TEN) -> Completion:
    completion = await sequence.sample(params)
    check(sequence, completion)
    return completion


def test_turns_extensions_and_rewinds():
    async def main():
        seq = engine().open(PROMPT, seed=1)
        first = await sampled(seq)
        seq.extend((5, 6, 7))
        await sampled(seq)
        seq.rewind(len(PROMPT) + 4)
        await sampled(seq)
        seq.rewind(len(PROMPT))
        assert (await sampled(seq)).ids == first.ids
        seq.rewind(1)
        await sampled(seq)

    run_simulated(main())


@pytest.mark.parametrize("mode", ["agent", "speculator"])
@pytest.mark.parametrize("when", ["before", "beside", "after"])
def test_a_fork_at_a_turn_start_whenever_it_samples(mode, when):
    async def main():
        eng = engine()
        seq = eng.open(PROMPT, seed=1)
        await sampled(seq)
        seq.extend((5, 6, 7))
        fork = seq.fork(seed=2, mode=mode)
        fork.extend((9, 8))
        if when == "before":
            await sampled(fork)
        jobs = [sampled(seq)] + ([sampled(fork)] if when == "beside" else [])
        await asyncio.gather(*jobs)
        if when == "after":
            await sampled(fork)
        await sampled(fork)
        fork.close()
        await sampled(seq)

    run_simulated(main())


def test_candidates_of_one_stem_read_the_suffix_once():
    async def main():
        eng = engine()
        seq = eng.open(PROMPT, seed=1)
        await sampled(seq)
        stem = seq.fork(seed=3, mode="speculator")
        stem.extend((9, 8, 7))
        before = eng.counters.get("prefilled_tokens/speculator", 0)
        forks = [stem.fork(seed=10 + i) for i in range(3)]
        await asyncio.gather(*(sampled(fork) for fork in forks))
        read = eng.counters["prefilled_tokens/speculator"] - before
        assert read <= len(seq.ids) + 3  # not once a candidate
        again = await sampled(stem)
        assert again.ids != ()

    run_simulated(main())


def test_more_sequences_than_rows_and_cancellation():
    async def main():
        eng = engine(rows=2, speculator_rows=2)
        sequences = [eng.open(PROMPT[: 20 + i], seed=i) for i in range(5)]

        async def whole(seq: Sequence) -> None:
            await sampled(seq)
            seq.extend((4, 4))
            await sampled(seq)
            seq.close()

        await asyncio.gather(*map(whole, sequences))
        seq = eng.open(PROMPT, seed=9)
        task = asyncio.ensure_future(seq.sample(SamplingParams(1.0, 60, ())))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sampled(seq)

    run_simulated(main())


@pytest.mark.parametrize("mode", ["agent", "speculator"])
def test_a_grandchild_is_copied_before_its_parent_reads_on(mode):
    """All three are seated in one plan; c shares what b held when it was forked."""

    async def main():
        a = engine().open(PROMPT, seed=1, mode=mode)
        b = a.fork(seed=2)
        c = b.fork(seed=3)
        b.extend(range(9))
        await asyncio.gather(sampled(a), sampled(c), sampled(b))

    run_simulated(main())


def test_a_sample_cancelled_after_its_last_token_leaves_the_sequence_as_it_was():
    async def main():
        eng = engine()
        eng.latency = LatencyModel(token_s=0.1)
        seq = eng.open(PROMPT, seed=1)
        fork = seq.fork(seed=7)
        task = asyncio.ensure_future(seq.sample(TEN))
        await asyncio.sleep(0.5)  # its tokens are there, their time has not passed
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sampled(fork)
        await sampled(seq)

    run_simulated(main())


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_order_of_calls(data):
    """Opens, extensions, forks, rewinds and samples side by side."""

    async def main():
        eng = engine(rows=5, speculator_rows=3)  # open agent sequences keep their rows
        live = [eng.open(PROMPT[: data.draw(st.integers(1, 37))], seed=0)]
        for step in range(6):
            seq = data.draw(st.sampled_from(live))
            act = data.draw(st.sampled_from(["extend", "fork", "speculate", "rewind", "sample"]))
            if act == "extend":
                seq.extend(range(1, data.draw(st.integers(2, 6))))
            elif act in ("fork", "speculate") and len(live) < 5:
                mode = "speculator" if act == "speculate" else seq.mode
                live.append(seq.fork(seed=step + 1, mode=mode))
            elif act == "rewind":
                seq.rewind(data.draw(st.integers(1, len(seq.ids))))
            else:
                chosen = data.draw(st.lists(st.sampled_from(live), min_size=1, unique=True))
                await asyncio.gather(*(sampled(one, SamplingParams(1.0, 3, ())) for one in chosen))
        for seq in live:
            await sampled(seq, SamplingParams(1.0, 3, ()))
            seq.close()

    run_simulated(main())
