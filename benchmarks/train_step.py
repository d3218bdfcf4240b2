"""A train step on CPU: ours against torch running transformers' model of the same shape.

    python -m benchmarks.train_step [--steps=12] [--only=3m|135m]

Forward, loss, backward, clipping and AdamW, float32, on one packed batch of 2 rows x 512 tokens
with several sequences a row. Each side is a process of its own with all cores to itself while it
steps; they take turns, and each pair of steps gives one ratio. Both start from the same weights
(ours, written as a Hugging Face folder) and must report the same loss, at the first step and at the
last. torch runs transformers' own way with packed rows (positions that restart, sdpa with the mask
made from them) and its fused AdamW. Ratios above 1 mean that ours is faster; the last line is JSON.

The machine must be idle: torch's threads wait for each other at every product, so that a busy core
slows it far more than it slows ours. The JSON has the load before the run and each side's CPU time
for judging that. Both sides inherit the environment: GLIBC_TUNABLES=glibc.malloc.hugetlb=1 (huge
pages) makes our step of 135m about a fifth faster.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from agentspec.model.config import ModelConfig
from agentspec.tokens.pack import PackedBatch, pack
from agentspec.types import TreeRow

_STEPS = flags.DEFINE_integer("steps", 12, "Pairs of timed steps.", lower_bound=1)
_ONLY = flags.DEFINE_enum("only", None, ["3m", "135m"], "One shape; default: both.")

CONFIGS = {
    "3m": ModelConfig(
        vocab_size=512,
        d_model=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        d_ff=768,
        rope_theta=1e4,
    ),
    "135m": ModelConfig(  # SmolLM2-135M's shape
        vocab_size=49152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        d_ff=1536,
        rope_theta=1e5,
        norm_eps=1e-5,
        family="llama",
    ),
}
ROWS, ROW_TOKENS = 2, 512
LENGTHS = (200, 180, 132, 300, 212)  # fills both rows
WARM_UP_STEPS = 2
LR, B1, B2, EPS, CLIP = 1e-4, 0.9, 0.95, 1e-8, 1.0
# Adam's first steps are of size lr whatever the gradient's: rounding decides some signs.
FIRST_AND_LAST_GAP = {0: 5e-5, -1: 1e-2}


def batch_of(config: ModelConfig) -> PackedBatch:
    """The one batch: random ids, every token but a sequence's first is trained on."""
    draw = np.random.default_rng(0)
    rows = [
        TreeRow(
            ids=tuple(draw.integers(config.vocab_size, size=n).tolist()),
            mask=(0,) + (1,) * (n - 1),
            logps=(0.0,) * n,
        )
        for n in LENGTHS
    ]
    (batch,) = pack(rows, ROW_TOKENS, ROWS)
    return batch


def ours(config: ModelConfig, folder: Path) -> Callable[[], float]:
    """Our real update; each call is one step and returns its loss. Writes the weights first."""
    import jax

    from agentspec.model.transformer import LanguageModel
    from agentspec.model.weights import make_loaded, save_hf
    from agentspec.optim import Optimizer
    from agentspec.settings import LossSettings
    from agentspec.update import make_update

    model = LanguageModel(config)
    params = model.init(jax.random.key(0))
    save_hf(make_loaded(model, params), folder)
    optimizer = Optimizer(lr=LR, b1=B1, b2=B2, eps=EPS, clip_norm=CLIP)
    update = make_update(model, optimizer, LossSettings(), "sft")
    batch, state = batch_of(config), optimizer.init(params)

    def step() -> float:
        nonlocal state
        state, numbers = update(state, [batch])
        jax.block_until_ready(state)
        return numbers["loss"]

    return step


def theirs(config: ModelConfig, folder: Path) -> Callable[[], float]:
    """The same step by torch and transformers, from the weights in ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=LR, betas=(B1, B2), eps=EPS, weight_decay=0.0, fused=True
    )
    batch = batch_of(config)
    ids = torch.from_numpy(batch.ids_BT).long()
    positions = torch.from_numpy(batch.positions_BT).long()
    targets = torch.from_numpy(np.where(batch.mask_BT, batch.targets_BT, -100)).long().flatten()

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.view(len(targets), -1), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return loss.item()

    return step


def work(
    side: Callable[[ModelConfig, Path], Callable[[], float]], name: str, folder: Path, pipe: Any
) -> None:
    """A worker process: makes its side, then does one step for each message until None."""
    step = side(CONFIGS[name], folder)
    pipe.send(None)
    while pipe.recv() is not None:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        loss = step()
        pipe.send((time.perf_counter() - start_s, time.process_time() - start_cpu_s, loss))


@contextlib.contextmanager
def worker(side: Callable[..., Any], name: str, folder: Path) -> Iterator[Connection]:
    """The pipe to a ready worker, which ends with the block."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=work, args=(side, name, folder, there), daemon=True)
    process.start()
    there.close()
    try:
        here.recv()
        yield here
        here.send(None)
        process.join()
    finally:
        process.kill()


def compare(name: str, n_steps: int) -> dict[str, Any]:
    """The figures of one shape: medians over pairs of steps, sides taking turns in going first."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pipes = [stack.enter_context(worker(side, name, Path(folder))) for side in (ours, theirs)]
        seconds: tuple[list[float], list[float]] = ([], [])
        cpu_seconds: tuple[list[float], list[float]] = ([], [])
        losses: tuple[list[float], list[float]] = ([], [])
        for pair in range(WARM_UP_STEPS + n_steps):
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                pipes[side].send("step")
                taken_s, cpu_s, loss = pipes[side].recv()
                losses[side].append(loss)
                if pair >= WARM_UP_STEPS:
                    seconds[side].append(taken_s)
                    cpu_seconds[side].append(cpu_s)
    for which, most in FIRST_AND_LAST_GAP.items():
        a, b = losses[0][which], losses[1][which]
        if abs(a - b) >= most:
            raise AssertionError(f"{name}: losses differ by {most} or more: ours {a}, torch {b}")
    ratios = sorted(b / a for a, b in zip(*seconds, strict=True))
    return {
        "ours_s": statistics.median(seconds[0]),
        "torch_s": statistics.median(seconds[1]),
        "ours_cpu_s": statistics.median(cpu_seconds[0]),
        "torch_cpu_s": statistics.median(cpu_seconds[1]),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "first_loss": losses[0][0],
        "last_loss": losses[0][-1],
    }


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    del argv
    versions = {name: version(name) for name in ("jax", "torch", "transformers")}
    print(f"{os.cpu_count()} cores, {platform.machine()}, float32, {ROWS} x {ROW_TOKENS} tokens")
    print(", ".join(f"{name} {number}" for name, number in versions.items()))
    print(f"{'shape':6}{'ours s':>10}{'torch s':>10}{'torch/ours':>12}{'min':>8}{'max':>8}")
    report: dict[str, Any] = {
        "steps": _STEPS.value,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "malloc": os.environ.get("GLIBC_TUNABLES", ""),
        **versions,
    }
    for name in [_ONLY.value] if _ONLY.value else list(CONFIGS):
        row = compare(name, _STEPS.value)
        print(
            f"{name:6}{row['ours_s']:>10.3f}{row['torch_s']:>10.3f}{row['ratio']:>12.2f}"
            f"{row['ratio_min']:>8.2f}{row['ratio_max']:>8.2f}",
            flush=True,
        )
        report[f"vs_torch_{name}"] = row.pop("ratio")
        report[name] = row
    print(json.dumps(report))


if __name__ == "__main__":
    app.run(main)
