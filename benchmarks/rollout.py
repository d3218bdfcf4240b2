"""Rollouts on CPU: our engine against google-tunix's sampler and transformers, same episodes.

    python -m benchmarks.rollout [--turns=4,8] [--only=3m|135m] [--pairs=3]
        [--peers=tunix,hf,hf_cache] [--tunix_python=PYTHON] [--episodes=64] [--episodes_135m=16]
        [--[no]single_turn]

8 tasks x 8 members with prompts of 64 ids; every turn samples a forced number of tokens, 8 to 64,
and a 200-token observation follows. Contents and lengths are the same on every side; weights are
random and of one shape. The figure is sampled tokens a second, of whole runs:

- ``tunix``: google-tunix's sampler, whole conversations sent anew each turn (PYTHON has it);
- ``hf``: transformers' ``generate``, the same, one batch padded on the left;
- ``hf_cache``: transformers' model by hand, its cache kept over turns, surplus ids masked.

Each side is a process of its own that has done the whole work once before it is timed; sides take
turns. A ratio is that of one pair of runs, ours first; above 1 ours is faster. ``1 even`` is one
turn of 64 tokens for every row. The last line is JSON: ``vs_tunix`` and so on, at 8 turns, null
where not run; ``_135m`` for that shape.

The machine must be idle. All sides get the same settings, unless the environment has others: the
allocator keeps freed memory (GLIBC_TUNABLES), and torch's threads sleep while they wait for each
other (OMP_WAIT_POLICY); if they spin, one busy core makes torch ten times slower.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

from agentspec.model.config import ModelConfig
from benchmarks.rollout_peers import SIDES, Lengths, Run, Work

PEERS = tuple(name for name in SIDES if name != "ours")
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=68719476736"
PAGE_TOKENS = 64
SHAPES = {
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

_TURNS = flags.DEFINE_list("turns", ["4", "8"], "Numbers of turns.")
_ONLY = flags.DEFINE_enum("only", None, ["3m", "135m"], "One shape; default: both.")
_PAIRS = flags.DEFINE_integer("pairs", 3, "Timed runs of each side.", lower_bound=1)
_PEERS = flags.DEFINE_list("peers", list(PEERS), "Peers to run.")
_TUNIX_PYTHON = flags.DEFINE_string("tunix_python", "", "Python with google-tunix; empty: not run.")
_EPISODES = flags.DEFINE_integer("episodes", 64, "Episodes at 3m.", lower_bound=1)
_EPISODES_135M = flags.DEFINE_integer("episodes_135m", 16, "Episodes at 135m.", lower_bound=1)
_SINGLE_TURN = flags.DEFINE_boolean("single_turn", True, "Also one turn of equal lengths.")


def ours(shape: dict[str, Any], work: Work) -> Run:
    """Our engine: one coroutine an episode, each turn one ``sample``."""
    import jax

    from agentspec.model.transformer import LanguageModel
    from agentspec.rollout.engine import Engine
    from agentspec.types import SamplingParams

    model = LanguageModel(ModelConfig(**shape))
    engine = Engine(
        model,
        model.init(jax.random.key(0)),
        rows=work.n_episodes,
        speculator_rows=0,
        cache_tokens=-(-work.most_context // PAGE_TOKENS) * PAGE_TOKENS,
        page_tokens=PAGE_TOKENS,
    )
    prompts, lengths, observations = work.draw()

    async def episode(i: int, seed: int) -> list[int]:
        sequence = engine.open(prompts[i], seed=seed)
        sampled = []
        for turn, n in enumerate(lengths[i]):
            params = SamplingParams(temperature=1.0, max_tokens=n)
            sampled.append(len((await sequence.sample(params)).ids))
            if turn + 1 < work.n_turns:
                sequence.extend(observations[i][turn])
        context = work.prompt_tokens + (work.n_turns - 1) * work.observation_tokens
        assert len(sequence.ids) == context + sum(lengths[i])
        sequence.close()
        return sampled

    async def episodes() -> Lengths:
        return list(await asyncio.gather(*(episode(i, i) for i in range(work.n_episodes))))

    def run() -> Lengths:
        engine.forget()  # a run may not find the prompts of the one before
        return asyncio.run(episodes())

    return run


class Worker:
    """A side's process."""

    def __init__(self, python: str, side: str, shape: dict[str, Any], work: Work) -> None:
        """Starts it; ``wait`` says when it is ready."""
        self.side = side
        environment = {
            "GLIBC_TUNABLES": MALLOC,
            "OMP_WAIT_POLICY": "passive",
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
            **os.environ,
        }
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.rollout_peers", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.send({"shape": shape, "work": dataclasses.asdict(work)})

    def send(self, message: Any) -> None:
        """Writes one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def wait(self) -> Any:
        """Reads one line. RuntimeError when the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.side} ended with status {self.process.wait()}")
        return json.loads(line)

    def run(self, expected: Lengths) -> tuple[float, float]:
        """Seconds and CPU seconds of one run, whose turns must have the expected lengths."""
        self.send(None)
        taken_s, cpu_s, lengths = self.wait()
        if lengths != expected:
            raise AssertionError(f"{self.side} sampled other numbers of tokens than was asked")
        return taken_s, cpu_s


@contextlib.contextmanager
def worker(python: str, side: str, shape: dict[str, Any], work: Work) -> Iterator[Worker]:
    """A ready worker, which ends with the block."""
    made = Worker(python, side, shape, work)
    try:
        made.wait()
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def compare(config: ModelConfig, work: Work, pythons: dict[str, str], pairs: int) -> dict[str, Any]:
    """The figures of one work: tokens a second by side, and ratios ours/peer by peer."""
    shape = dataclasses.asdict(config)
    expected = work.draw()[1]
    n_tokens = sum(map(sum, expected))
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(worker(pythons[side], side, shape, work)) for side in pythons
        ]
        for each in workers:
            each.run(expected)  # compiles, fills the heap
        seconds: dict[str, list[float]] = {side: [] for side in pythons}
        cpu_seconds: dict[str, list[float]] = {side: [] for side in pythons}
        for pair in range(pairs):
            for each in workers if pair % 2 == 0 else workers[::-1]:
                taken_s, cpu_s = each.run(expected)
                seconds[each.side].append(taken_s)
                cpu_seconds[each.side].append(cpu_s)
    row: dict[str, Any] = {"episodes": work.n_episodes, "tokens": n_tokens}
    for side in pythons:
        row[side] = {
            "tokens_per_s": n_tokens / statistics.median(seconds[side]),
            "cpu_s": statistics.median(cpu_seconds[side]),
        }
        if side != "ours":
            ratios = sorted(b / a for a, b in zip(seconds["ours"], seconds[side], strict=True))
            row[side] |= {
                "ratio": statistics.median(ratios),
                "ratio_min": ratios[0],
                "ratio_max": ratios[-1],
            }
    return row


def line(name: str, label: str, row: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [f"{name:6}{label:>8}{row['episodes']:>10}{row['ours']['tokens_per_s']:>10.1f}"]
    for peer in PEERS:
        if peer in row:
            tps, ratio = row[peer]["tokens_per_s"], row[peer]["ratio"]
            low, high = row[peer]["ratio_min"], row[peer]["ratio_max"]
            cells.append(f"{tps:>9.1f} {f'{ratio:.2f}x ({low:.2f}-{high:.2f})':<20}")
        else:
            cells.append(f"{'not run':>9} {'':20}")
    return " ".join(cells)


def works(name: str) -> dict[str, Work]:
    """What is run for a shape, by label."""
    n_episodes = _EPISODES_135M.value if name == "135m" else _EPISODES.value
    n_members = min(8, n_episodes)
    if n_episodes % n_members:
        raise app.UsageError(f"{n_episodes} episodes: must be a multiple of {n_members}")
    base = Work(
        n_tasks=n_episodes // n_members,
        n_members=n_members,
        vocab_size=SHAPES[name].vocab_size,
    )
    out = {turns: dataclasses.replace(base, n_turns=int(turns)) for turns in _TURNS.value}
    if _SINGLE_TURN.value:
        out["1 even"] = dataclasses.replace(base, n_turns=1, least_tokens=base.most_tokens)
    return out


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    del argv
    if unknown := set(_PEERS.value) - set(PEERS):
        raise app.UsageError(f"--peers has {sorted(unknown)}; allowed are {list(PEERS)}")
    pythons = {"ours": sys.executable} | {peer: sys.executable for peer in _PEERS.value}
    if "tunix" in pythons:
        pythons["tunix"] = _TUNIX_PYTHON.value
    pythons = {side: python for side, python in pythons.items() if python}
    report: dict[str, Any] = {
        "pairs": _PAIRS.value,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "omp_wait": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "malloc": os.environ.get("GLIBC_TUNABLES", MALLOC),
    }
    print(f"{os.cpu_count()} cores, {platform.machine()}, float32, sampled tokens a second")
    heads = " ".join(f"{peer:>9} {'ours/' + peer:<20}" for peer in PEERS)
    print(f"{'shape':6}{'turns':>8}{'episodes':>10}{'ours':>10} {heads}", flush=True)
    names = [_ONLY.value] if _ONLY.value else list(SHAPES)
    for name in SHAPES:
        suffix = "" if name == "3m" else f"_{name}"
        report |= {f"vs_{peer}{suffix}": None for peer in PEERS}
        for label, work in works(name).items() if name in names else ():
            row = compare(SHAPES[name], work, pythons, _PAIRS.value)
            print(line(name, label, row), flush=True)
            report[f"{name}, {label}"] = row
            if label == "8":
                report |= {f"vs_{p}{suffix}": row[p]["ratio"] for p in PEERS if p in row}
    print(json.dumps(report))


if __name__ == "__main__":
    app.run(main)
