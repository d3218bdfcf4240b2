"""The embedded default: a 0.4M-parameter model learns two toy worlds on a laptop CPU.

    bash launch/local.sh            (or: bash launch/local.sh configs/tiny.py --config.seed=1)

Hardware: 2 CPU cores. Figures to expect: README. Two variants serve the tests:
``configs/tiny.py:smoke`` is the whole job in half a minute, too short to learn anything;
``:short`` trains base and SFT for a minute or two.
"""

from configs import common


def get_config(variant: str = ""):
    """The config; ``variant`` is empty, ``smoke`` or ``short``."""
    config = common.base()
    config.name = "tiny"
    config.chat.suffix = "next call ?"
    config.base.update(dict(steps=450, lr=3e-3, decay="cosine", warmup_steps=20, n_examples=8000))
    sft = dict(start="base", lr=5e-4, warmup_steps=5, n_examples=8000)
    config.sft_light.update(sft | dict(steps=20, n_examples=32))
    config.sft.update(sft | dict(steps=300, eval_every=25, eval_tasks=128, patience=3))
    config.joint.update(dict(start="sft", steps=288, lr=1e-4))
    config.sft_more.update(dict(start="sft", lr=1e-4, n_examples=8000, match_tokens_of="joint"))
    if variant == "smoke":
        config.model.update(dict(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16))
        config.model.d_ff = 64
        config.engine.update(dict(rows=8, speculator_rows=8))
        for stage, steps in dict(base=4, sft_light=2, sft=4).items():
            config[stage].update(dict(steps=steps, n_examples=16, rows_per_step=8, eval_every=0))
            config[stage].update(dict(patience=0, warmup_steps=1))
        config.sft.update(dict(eval_every=2, eval_tasks=4, patience=2))
        config.sft_more.update(dict(n_examples=16, rows_per_step=8))
        config.joint.steps = 6
        config.schedule.update(dict(agent_steps=1, speculator_steps=2))
        config.agent.update(dict(tasks_per_step=2, group_size=4))
        config.speculator.update(dict(tasks_per_step=4, prefixes_per_step=4, group_size=4))
        config.evaluate.tasks_per_world = 4
        config.checkpoint.every = 2
    elif variant == "short":
        config.stages = ("base", "sft")
        config.base.update(dict(steps=200, n_examples=3000))
        config.sft.update(dict(steps=60, n_examples=1000, eval_every=0, patience=0))
    elif variant:
        raise ValueError(f"configs/tiny.py has no variant {variant!r}; known: smoke, short")
    return config
