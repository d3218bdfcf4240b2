"""The paper's setting with Qwen3.5-4B on TPUs. It has not been run: what is known of it is a plan.

    python -m agentspec.plan --config=configs/qwen3_5_4b.py:search --topology=v5e:8x8
    bash launch/local.sh configs/qwen3_5_4b.py:search --config.model.path=FOLDER   (on every host)

Everything but the model is as in ``configs/qwen3_4b.py``. Three of four layers are Gated DeltaNet,
whose cache does not grow with the sequence. The sizes (``configs/models/qwen3_5_4b``) are those of
the text part of Qwen/Qwen3.5-4B: without its vision tower and its multi-token prediction.
"""

from configs import qwen3_4b


def get_config(variant: str = "search"):
    """The config; ``variant`` is ``search`` or ``conversation``."""
    return qwen3_4b.of_model("qwen3_5_4b", variant)
