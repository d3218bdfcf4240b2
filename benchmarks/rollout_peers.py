"""The work of ``benchmarks.rollout``, its worker process, and the three peers that do it.

    python -m benchmarks.rollout_peers SIDE

The worker reads lines of JSON: first the model's shape and the work, then null for each run. It
answers ready with null, and each run with its seconds, its CPU seconds and the sampled tokens of
every turn. Imports nothing of ours but for the side ``ours``, so that a peer's own Python can run
it.

A peer is a function from (model, work) to a function that does the whole work once and returns how
many tokens it sampled in each turn of each episode. Peers move in lockstep: a turn is one batch of
all episodes, which lasts until its longest row. None is asked for log-probs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Lengths = list[list[int]]  # [episode][turn]
Run = Callable[[], Lengths]

SIDES = {
    "ours": "benchmarks.rollout:ours",
    "tunix": "benchmarks.rollout_peers:tunix",
    "hf": "benchmarks.rollout_peers:hf",
    "hf_cache": "benchmarks.rollout_peers:hf_cache",
}
PAD, EOS, FIRST_ID = 0, 1, 2  # the work's ids start after tunix's special ones
BUCKET_TOKENS = 64
BUFFER_BYTES = 5e9  # largest prefill buffers a peer may ask for; smaller batches above that


@dataclasses.dataclass(frozen=True)
class Work:
    """Episodes of forced content: only the sampled ids are free, their numbers are not."""

    n_tasks: int = 8
    n_members: int = 8
    n_turns: int = 4
    prompt_tokens: int = 64
    observation_tokens: int = 200
    least_tokens: int = 8
    most_tokens: int = 64
    vocab_size: int = 512

    @property
    def n_episodes(self) -> int:
        """All members of all tasks."""
        return self.n_tasks * self.n_members

    @property
    def most_context(self) -> int:
        """Longest possible episode, in tokens."""
        seen = self.prompt_tokens + (self.n_turns - 1) * self.observation_tokens
        return seen + self.n_turns * self.most_tokens

    def draw(self) -> tuple[list[list[int]], Lengths, list[list[list[int]]]]:
        """Prompts [episode], numbers of tokens [episode][turn], observations [episode][turn]."""
        random = np.random.default_rng(0)

        def ids(*shape: int) -> Any:
            return random.integers(FIRST_ID, self.vocab_size, size=shape).tolist()

        by_task = ids(self.n_tasks, self.prompt_tokens)
        shape = (self.n_episodes, self.n_turns)
        lengths = random.integers(self.least_tokens, self.most_tokens + 1, size=shape).tolist()
        observations = ids(self.n_episodes, self.n_turns - 1, self.observation_tokens)
        return [p for p in by_task for _ in range(self.n_members)], lengths, observations


class Ids:
    """Stands in for a tokenizer: prompts are ids already."""

    def encode(self, text: list[int], **_: Any) -> list[int]:
        """The ids themselves."""
        return list(text)

    def decode(self, ids: list[int], **_: Any) -> str:
        """Nothing: a peer need not spend time on text."""
        return ""

    def bos_id(self) -> None:
        """None is added."""

    def eos_id(self) -> int:
        """An id that is forbidden, so that no row ends early."""
        return EOS

    def pad_id(self) -> int:
        """Its padding."""
        return PAD


def resent(work: Work, sample: Callable[[list[list[int]], int], list[list[int]]]) -> Run:
    """A run that sends whole conversations at every turn.

    ``sample(conversations, n)`` returns at least the n sampled ids of each; a row's surplus is cut.
    """

    def run() -> Lengths:
        conversations, lengths, observations = work.draw()
        sampled: Lengths = [[] for _ in conversations]
        for turn in range(work.n_turns):
            new = sample(conversations, max(row[turn] for row in lengths))
            for i, ids in enumerate(new):
                kept = [int(token) for token in ids[: lengths[i][turn]]]
                sampled[i].append(len(kept))
                conversations[i] = conversations[i] + kept
                if turn + 1 < work.n_turns:
                    conversations[i] = conversations[i] + observations[i][turn]
        return sampled

    return run


def tunix(shape: dict[str, Any], work: Work) -> Run:
    """google-tunix's own sampler, turn by turn, all episodes in one batch.

    Kinder than its agentic loop, which calls the sampler for one episode at a time. Prompts are
    padded to whole buckets, each with a sampler whose cache is just long enough; the first run
    compiles them all. The batch is halved, as its micro-batches are, until the prefill's scores and
    logits fit.
    """
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler  # type: ignore[import-not-found]

    common = dict(
        num_layers=shape["n_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["d_model"],
        hidden_dim=shape["d_ff"],
        num_heads=shape["n_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["n_kv_heads"],
        rope_theta=int(shape["rope_theta"]),
        norm_eps=shape["norm_eps"],
    )
    if shape["family"] == "llama":
        from tunix.models.llama3 import model as llama  # type: ignore[import-not-found]

        config = llama.ModelConfig(**common, weight_tying=True)
        model = llama.Llama3(config, rngs=nnx.Rngs(0))
    else:
        from tunix.models.qwen3 import model as qwen  # type: ignore[import-not-found]

        model = qwen.Qwen3(qwen.ModelConfig(**common, use_tied_embedding=True), rngs=nnx.Rngs(0))

    samplers: dict[int, Sampler] = {}
    calls = 0

    def sample(conversations: list[list[int]], n: int) -> list[list[int]]:
        nonlocal calls
        longest = max(len(ids) for ids in conversations)
        bucket = -(-longest // BUCKET_TOKENS) * BUCKET_TOKENS
        total = bucket + n
        if total not in samplers:
            cache = CacheConfig(total, shape["n_layers"], shape["n_kv_heads"], shape["head_dim"])
            samplers[total] = Sampler(model, Ids(), cache)
        row_bytes = 4 * bucket * (total * shape["n_heads"] + shape["vocab_size"])
        rows = len(conversations)
        while rows > 1 and rows * row_bytes > BUFFER_BYTES:
            rows = -(-rows // 2)
        out: list[list[int]] = []
        for start in range(0, len(conversations), rows):
            calls += 1
            result = samplers[total](
                conversations[start : start + rows],
                max_generation_steps=n,
                max_prompt_length=bucket,
                temperature=1.0,
                top_p=1.0,
                forbidden_tokens=[PAD, EOS],
                seed=calls,
            )
            out += [ids.tolist() for ids in result.tokens]
        return out

    return resent(work, sample)


def torch_model(shape: dict[str, Any]) -> Any:
    """A transformers model of this shape with random weights, on all cores."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_of, model_of = kinds[shape["family"]]
    config = config_of(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["d_model"],
        num_hidden_layers=shape["n_layers"],
        num_attention_heads=shape["n_heads"],
        num_key_value_heads=shape["n_kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["d_ff"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        rms_norm_eps=shape["norm_eps"],
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    return model_of(config).eval()


def hf(shape: dict[str, Any], work: Work) -> Run:
    """The ``generate`` of transformers: whole conversations, one batch padded on the left."""
    import torch
    from transformers import GenerationConfig

    model = torch_model(shape)

    def sample(conversations: list[list[int]], n: int) -> list[list[int]]:
        longest = max(len(ids) for ids in conversations)
        ids_BT = torch.tensor([[PAD] * (longest - len(ids)) + ids for ids in conversations])
        mask_BT = torch.tensor(
            [[0] * (longest - len(ids)) + [1] * len(ids) for ids in conversations]
        )
        settings = GenerationConfig(
            max_new_tokens=n, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=PAD
        )
        with torch.inference_mode():
            out_BT = model.generate(
                input_ids=ids_BT, attention_mask=mask_BT, generation_config=settings
            )
        new: list[list[int]] = out_BT[:, longest:].tolist()
        return new

    return resent(work, sample)


def hf_cache(shape: dict[str, Any], work: Work) -> Run:
    """A transformers model driven by hand, its cache kept over the turns.

    A turn's surplus ids stay in the cache and are masked. Of the longest rows the last id has not
    been read when the turn ends: it is read as a column before the observation, which is masked in
    all other rows.
    """
    import torch
    from transformers import DynamicCache

    model = torch_model(shape)

    @torch.inference_mode()
    def run() -> Lengths:
        prompts, lengths, observations = work.draw()
        n_rows = work.n_episodes
        cache = DynamicCache(config=model.config)
        n_columns = work.most_context + work.n_turns  # one more a turn, see above
        mask_BS = torch.zeros((n_rows, n_columns), dtype=torch.long)
        next_B = torch.zeros((n_rows,), dtype=torch.long)  # position of a row's next id
        n_cached = 0

        def read(ids_BT: Any, real_BT: Any) -> Any:
            """Reads a block of ids and returns one sampled id a row [B]."""
            nonlocal n_cached
            n_new = ids_BT.shape[1]
            mask_BS[:, n_cached : n_cached + n_new] = real_BT
            n_cached += n_new
            logits_B1V = model(
                input_ids=ids_BT,
                attention_mask=mask_BS[:, :n_cached],
                position_ids=next_B[:, None] + real_BT.cumsum(1) - real_BT,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            next_B.add_(real_BT.sum(1))
            return torch.multinomial(logits_B1V[:, -1].softmax(-1), 1)[:, 0]

        ids_BT = torch.tensor(prompts)
        real_BT = torch.ones_like(ids_BT)
        sampled = np.zeros((n_rows, work.n_turns), int)
        for turn in range(work.n_turns):
            n_B = torch.tensor([row[turn] for row in lengths])
            longest = int(n_B.max())
            new_B = read(ids_BT, real_BT)
            for step in range(1, longest):
                # Ids are drawn for every row; a row that has its own is fed masked ones.
                sampled[:, turn] += (step <= n_B).numpy()
                new_B = read(new_B[:, None], (step <= n_B).long()[:, None])
            sampled[:, turn] += (n_B >= longest).numpy()
            if turn + 1 < work.n_turns:
                seen_BT = torch.tensor([row[turn] for row in observations])
                ids_BT = torch.cat([new_B[:, None], seen_BT], dim=1)
                last_B1 = (n_B == longest).long()[:, None]
                real_BT = torch.cat([last_B1, torch.ones_like(seen_BT)], dim=1)
        # Positions count what was read: all but the last id of the last turn's longest rows.
        expected_B = torch.tensor([sum(row) for row in lengths]) - (n_B == longest).long()
        context = work.prompt_tokens + (work.n_turns - 1) * work.observation_tokens
        assert torch.equal(next_B, expected_B + context)
        return sampled.tolist()

    return run


def main(side: str) -> None:
    """Serves one side until standard input ends."""
    # Libraries print what they like: only we write to the pipe.
    with os.fdopen(os.dup(1), "w") as pipe, contextlib.suppress(BrokenPipeError):
        os.dup2(2, 1)
        first = json.loads(sys.stdin.readline())
        module, name = SIDES[side].split(":")
        run: Run = getattr(importlib.import_module(module), name)(
            first["shape"], Work(**first["work"])
        )
        print("null", file=pipe, flush=True)
        for _ in sys.stdin:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            lengths = run()
            answer = (time.perf_counter() - start_s, time.process_time() - start_cpu_s, lengths)
            print(json.dumps(answer), file=pipe, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
