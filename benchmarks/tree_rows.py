"""Tree rows against separate rows: the time of one speculator update, and the tokens saved.

    python -m benchmarks.tree_rows [--steps=5] [--trunk=2048]

One trajectory of ``trunk`` tokens with 10 cuts and 8 samples of 24 tokens at each, on a model of
3.3M parameters (4 layers of width 256), float32: once as one tree row, once as 80 sequences, each
sample behind a copy of its prefix, packed first-fit. The same real update for both, in turn in one
process; the median of the paired steps' ratios. Both must give the same loss. The last line is
JSON: ``speedup``, and packed tokens over the trajectory's at 16K and 32K tokens and 20 turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import jax
import numpy as np
from absl import app, flags

from agentspec.model.config import ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.optim import Optimizer
from agentspec.settings import LossSettings
from agentspec.tokens.pack import PackedBatch, pack
from agentspec.types import Branch, TreeRow
from agentspec.update import make_update

STEPS = flags.DEFINE_integer("steps", 5, "timed steps of each kind", lower_bound=1)
TRUNK = flags.DEFINE_integer("trunk", 2048, "tokens of the trajectory", lower_bound=20)
CUTS, SAMPLES, SAMPLE_TOKENS = 10, 8, 24


def tree(n_trunk: int, cuts: int, samples: int, tokens: int) -> TreeRow:
    """A trajectory with ``samples`` branches of ``tokens`` at each of ``cuts`` turn starts."""
    rng = np.random.default_rng(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(1, 512, n))

    mask, logps = (0,) * 4 + (1,) * (tokens - 4), (-6.0,) * tokens  # a short suffix, then sampled
    branches = tuple(
        Branch(n_trunk * (i + 1) // (cuts + 1), ids(tokens), mask, logps, float(rng.normal()))
        for i in range(cuts)
        for _ in range(samples)
    )
    nothing = (0,) * n_trunk
    return TreeRow(ids(n_trunk), nothing, (0.0,) * n_trunk, 1.0, branches)


def separate(row: TreeRow) -> list[TreeRow]:
    """Every branch behind its own copy of the trunk's tokens before its cut."""
    return [
        TreeRow(
            row.ids[: b.cut] + b.ids,
            (0,) * b.cut + b.mask,
            (0.0,) * b.cut + b.logps,
            b.advantage,
        )
        for b in row.branches
    ]


def saved(n_trunk: int, turns: int) -> dict[str, float]:
    """Tokens of one tree and of its separate rows, as multiples of the trajectory's."""
    row = tree(n_trunk, turns, SAMPLES, SAMPLE_TOKENS)
    alone = sum(len(one.ids) for one in separate(row))
    return {"tree": round(row.n_tokens / n_trunk, 2), "separate": round(alone / n_trunk, 1)}


def main(_: list[str]) -> None:
    """Runs and prints; see the module's text."""
    config = ModelConfig(
        vocab_size=512,
        d_model=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=4,
        head_dim=64,
        d_ff=704,
        rope_theta=1e4,
    )
    model, optimizer = LanguageModel(config), Optimizer(lr=1e-6)
    update = make_update(model, optimizer, LossSettings())
    row = tree(TRUNK.value, CUTS, SAMPLES, SAMPLE_TOKENS)
    longest = max(len(one.ids) for one in separate(row))
    batches: dict[str, list[PackedBatch]] = {
        "tree": pack([row], -(-row.n_tokens // 128) * 128, 1),
        "separate": pack(separate(row), -(-longest // 128) * 128, 4),
    }
    states = {
        name: optimizer.init(jax.jit(model.init)(jax.random.key(0))) for name in batches
    }
    times: dict[str, list[float]] = {name: [] for name in batches}
    losses: dict[str, list[float]] = {name: [] for name in batches}
    for step in range(STEPS.value + 1):
        for name in batches:
            start = time.perf_counter()
            states[name], numbers = update(states[name], batches[name])
            jax.block_until_ready(states[name].params)
            if step:  # the first one compiles
                times[name].append(time.perf_counter() - start)
            losses[name].append(numbers["loss"])
        both = " ".join(f"{name} {values[-1]:.6f}" for name, values in losses.items())
        print(f"step {step}: loss {both}", flush=True)
    np.testing.assert_allclose(losses["tree"], losses["separate"], atol=1e-5)
    speedup = statistics.median(
        slow / fast for slow, fast in zip(times["separate"], times["tree"], strict=True)
    )
    n_tokens = {name: sum(b.ids_BT.size for b in batches[name]) for name in batches}
    for name in batches:
        print(f"{name}: {n_tokens[name]} packed tokens, {statistics.median(times[name]):.2f} s")
    result = {
        "benchmark": "tree_rows",
        "speedup": round(speedup, 2),
        "tree_s": round(statistics.median(times["tree"]), 3),
        "separate_s": round(statistics.median(times["separate"]), 3),
        "steps": STEPS.value,
        "tokens_16k_20_turns": saved(16384, 20),
        "tokens_32k_20_turns": saved(32768, 20),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    app.run(main)
