"""The paper's setting with Qwen3-4B on TPUs. It has not been run: what is known of it is a plan.

    python -m agentspec.plan --config=configs/qwen3_4b.py:search --topology=v5e:8x8
    bash launch/local.sh configs/qwen3_4b.py:search --config.model.path=FOLDER     (on every host)

``:search``: episodes of up to 16K tokens over question answering with search. ``:conversation``:
32K tokens, conversations with tools. As in the paper: 8 samples a group, learning rate 3e-6, blocks
of 4 agent and 8 speculator updates, 200 updates, no KL. Tasks a step are ours, the paper gives none.

``model.path`` is where `configs/models/qwen3_4b` holds the model's sizes only, enough for a plan;
to train, give a folder with the weights of Qwen/Qwen3-4B. Rows and mesh are for 64 chips of
``v5e:8x8``, which has 4 chips a host: ``pack.rows_per_batch`` and ``engine`` count a host's rows.
"""

from configs import common, hotpot_smollm2

TOKENS = {"search": 16384, "conversation": 32768}
ROOM_TOKENS = 4096  # of a row behind an episode, for the predictions that branch off it


def get_config(variant: str = "search"):
    """The config; ``variant`` is ``search`` or ``conversation``."""
    if variant not in TOKENS:
        raise ValueError(f"configs/qwen3_4b.py has no variant {variant!r}; known: {', '.join(TOKENS)}")
    config = common.base()
    config.name = f"qwen3_4b_{variant}"
    config.stages = ("base", "sft", "joint")
    paper(config, TOKENS[variant])
    config.model.path = str(hotpot_smollm2.ROOT / "configs" / "models" / "qwen3_4b")
    if variant == "search":
        hotpot = hotpot_smollm2.get_config if False else None  # noqa: F841
    return config


def paper(config, tokens: int) -> None:
    """Sets what both of the paper's models share, for episodes of ``tokens``."""
    config.model.update(dict(dtype="bfloat16", param_dtype="float32", remat="full", scan=True))
    config.mesh.update(dict(data=1, fsdp=64, tensor=1))
    config.episode.update(dict(max_turns=20, max_turn_tokens=2048, max_tokens=tokens))
    config.pack.update(dict(row_tokens=tokens + ROOM_TOKENS, rows_per_batch=4))
    config.engine.update(dict(rows=4, speculator_rows=8, cache_tokens=tokens + 512))
    config.engine.update(dict(prefill_chunk=512, tokens_per_call=32))
    config.agent.update(dict(tasks_per_step=16, group_size=8))
    config.speculator.update(dict(tasks_per_step=64, prefixes_per_step=64, group_size=8))
    config.speculator.update(dict(max_tokens=256, turns_per_episode=5.0))
    config.loss.logits_chunk_tokens = 512
    config.base.kind = "load"
    config.sft.update(dict(start="base", steps=50, lr=1e-5, warmup_steps=5, n_examples=5000))
    config.sft.update(dict(rows_per_step=64, eval_every=0))
    config.joint.update(dict(start="sft", steps=200, lr=3e-6))
