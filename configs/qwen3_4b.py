"""The paper's setting with Qwen3-4B on TPUs. It has not been run: what is known of it is a plan.

    python -m agentspec.plan --config=configs/qwen3_4b.py:search --topology=v5e:8x8
    bash launch/local.sh configs/qwen3_4b.py:search --config.model.path=FOLDER     (on every host)

``:search``: question answering with search, episodes of up to 16K tokens. ``:conversation``: tools
in conversation, up to 32K tokens. As in the paper: 8 samples a group, learning rate 3e-6, blocks of
4 agent and 8 speculator updates, 200 updates, no KL. Tasks a step are ours, since it gives none.

``model.path`` names a folder that holds the sizes of Qwen/Qwen3-4B (its config.json) and no
weights, enough for a plan; to train, name one with the weights. Mesh and rows are for the 64 chips
of ``v5e:8x8``, 4 a host; ``pack.rows_per_batch`` and ``engine`` count the rows of one host. Smaller
slices, and the flags for them: BENCHMARKS.md, "Plans".
"""

from configs import common, hotpot_smollm2

# (fsdp, tensor) on 64 chips. A row of 36K tokens is too much for one chip of a v5e: two share it.
MESHES = {"search": (64, 1), "conversation": (32, 2)}
ENGINE_ROWS = {"search": (4, 6), "conversation": (2, 4)}  # of a host: agent's, speculator's
HOSTS = 16
TOKENS = {"search": 16384, "conversation": 32768}
ROOM_TOKENS = 4096  # of a row behind an episode, for the predictions that branch off it


def get_config(variant: str = "search"):
    """The config; ``variant`` is ``search`` or ``conversation``."""
    config = of_model("qwen3_4b", variant)
    return config


def of_model(name: str, variant: str):
    """The paper's setting with the model whose sizes are in ``configs/models/name``."""
    if variant not in TOKENS:
        known = ", ".join(TOKENS)
        raise ValueError(f"configs/{name}.py has no variant {variant!r}; known: {known}")
    tokens, (fsdp, tensor), rows = TOKENS[variant], MESHES[variant], ENGINE_ROWS[variant]
    config = common.base()
    config.name = f"{name}_{variant}"
    config.stages = ("base", "sft", "joint")
    config.model.path = str(hotpot_smollm2.ROOT / "configs" / "models" / name)
    config.model.update(dict(dtype="bfloat16", param_dtype="float32", remat="full", scan=True))
    config.mesh.update(dict(data=1, fsdp=fsdp, tensor=tensor))
    config.chat.tools_in_prompt = True
    config.world.names = ("hotpot",) if variant == "search" else ("storefront",)
    if variant == "search":
        data = hotpot_smollm2.data_root()
        questions = ("hotpotqa", "hotpotqa_dev_questions_only")
        config.world.corpus = str(data / "multihop_qa" / "corpus.jsonl.gz")
        config.world.questions = tuple(
            str(data / "multihop_qa" / f"{name}.jsonl.gz") for name in questions
        )
        recorded = "fireact_finetune_multitask_multimethod"
        config.world.trajectories = (str(data / "search_trajectories" / f"{recorded}.jsonl.gz"),)
        config.world.update(dict(search_chars=400, read_chars=4000))
    config.episode.update(dict(max_turns=20, max_turn_tokens=2048, max_tokens=tokens))
    config.pack.update(dict(row_tokens=tokens + ROOM_TOKENS, rows_per_batch=fsdp // HOSTS))
    config.engine.update(dict(rows=rows[0], speculator_rows=rows[1], cache_tokens=tokens + 512))
    config.engine.update(dict(prefill_chunk=256, tokens_per_call=32))
    config.agent.update(dict(tasks_per_step=16, group_size=8))
    config.speculator.update(dict(tasks_per_step=64, prefixes_per_step=64, group_size=8))
    config.speculator.update(dict(max_tokens=256, turns_per_episode=5.0))
    config.loss.logits_chunk_tokens = 512
    config.base.kind = "load"
    config.sft.update(dict(start="base", steps=50, lr=1e-5, warmup_steps=5, n_examples=5000))
    config.sft.update(dict(rows_per_step=64, eval_every=0))
    config.joint.update(dict(start="sft", steps=200, lr=3e-6))
    return config
