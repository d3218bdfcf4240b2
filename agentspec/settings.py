"""Every setting of a job, typed, with its default: a config's keys are these fields' paths.

``loss.clip_high`` is ``LossSettings.clip_high``. Units end names: ``_s`` seconds, ``_tokens``,
``_frac``. ``configuration`` makes these from a config and checks them.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """``path`` names a Hugging Face folder or a GGUF file; empty: a fresh model of these sizes.

    ``dtype`` is computed with; ``param_dtype`` is what weights, and so gradients, are stored in
    (empty: as ``dtype``; bfloat16 weights lose updates of small learning rates). ``remat``: what
    the backward pass computes again, ``full`` all but each layer's input, ``dots`` all but products
    with weights. ``scan``: layers stacked, compile time independent of depth, slower on CPU.
    ``attention``: ``splash`` is TPU's Pallas kernel, ``auto`` takes it on TPU. ``chunk``: tokens
    that a DeltaNet layer takes at a time.
    """

    path: str = ""
    d_model: int = 96
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 24
    d_ff: int = 256
    rope_theta: float = 10000.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    param_dtype: Literal["", "float32", "bfloat16"] = ""
    remat: Literal["none", "full", "dots"] = "none"
    scan: bool = False
    attention: Literal["auto", "xla", "splash"] = "auto"
    chunk: int = 64


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """Devices of each mesh axis; their product is the number of devices. All 1: one device.

    Rows of a batch are cut over ``data`` and ``fsdp``, weights over ``fsdp`` (width) and ``tensor``
    (heads, feed-forward, vocabulary).
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class ChatSettings:
    """How conversations become ids. ``suffix`` is the speculation suffix's one instruction."""

    style: Literal["hermes", "smollm2"] = "hermes"
    tools_in_prompt: bool = False
    system: str = ""
    think: bool = True
    suffix: str = "Predict your next tool call. Output only the call."


@dataclasses.dataclass(frozen=True)
class WorldSettings:
    """Which worlds, and what they are made from. Paths serve the worlds that read files."""

    names: tuple[str, ...] = ("lookup", "storefront")
    seed: int = 0
    corpus: str = ""
    questions: tuple[str, ...] = ()
    trajectories: tuple[str, ...] = ()
    search_chars: int = 160
    read_chars: int = 400
    n_test: int = 192
    n_validation: int = 64


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Rows and cache of the sampling engine; all device shapes follow from these.

    ``rows`` and ``speculator_rows`` sample in one device call; more sequences may be open.
    ``pages`` of ``page_tokens`` tokens are the cache; 0: all agent rows at full length, and four
    pages a speculator row.
    """

    rows: int = 32
    speculator_rows: int = 64
    cache_tokens: int = 320
    page_tokens: int = 64
    pages: int = 0
    prefill_chunk: int = 32
    tokens_per_call: int = 16


@dataclasses.dataclass(frozen=True)
class EpisodeSettings:
    """Limits of one episode."""

    max_turns: int = 8
    max_turn_tokens: int = 64
    max_tokens: int = 256


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    """An agent update: ``tasks_per_step`` groups of ``group_size`` episodes (paper: G_ag = 8)."""

    tasks_per_step: int = 16
    group_size: int = 8
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class SpeculatorSettings:
    """A speculator update: fresh episodes, about ``prefixes_per_step`` turn starts of them.

    ``targets``: ``current`` (the present agent's calls) or ``frozen_sft`` (the SFT agent's).
    ``turns_per_episode`` is the expected number of turns, from which the share of turn starts to
    draw follows.
    """

    tasks_per_step: int = 24
    prefixes_per_step: int = 32
    group_size: int = 8
    temperature: float = 1.0
    max_tokens: int = 48
    targets: Literal["current", "frozen_sft"] = "current"
    merge_equal_prefixes: bool = True
    turns_per_episode: float = 2.5


@dataclasses.dataclass(frozen=True)
class SpeculationSettings:
    """Pre-execution. During agent updates the first ``agent_block_members`` episodes of each group
    take one greedy fork a turn, for metrics.
    """

    cut: Literal["turn_start"] = "turn_start"
    agent_block_members: int = 1
    calls_per_turn: int = 1
    calls_per_episode: int = 32


@dataclasses.dataclass(frozen=True)
class RewardSettings:
    """R_sp averages token-F1 over the ``target``'s argument keys (the paper) or the ``union``.

    ``repeat_penalty``: off R_ag for each exact repeat of an earlier call. ``no_call_turns``: skip
    leaves prefixes whose turn made no call out; reward scores abstaining there 1 and any call 0,
    and abstaining before a call ``abstain_on_call``.
    """

    argument_keys: Literal["target", "union"] = "target"
    repeat_penalty: float = 0.1
    no_call_turns: Literal["skip", "reward"] = "skip"
    abstain_on_call: float = 0.0


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Clipped surrogate. ``old_logp``: trainer (its own: ratio 1, no clip acts) | sampler.

    ``logits_chunk_tokens``: 0 has all logits at once; above 0 the head goes over parts of the
    vocabulary, each of as many logits as that many tokens of every row have.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    aggregate: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    kl: float = 0.0
    old_logp: Literal["trainer", "sampler"] = "trainer"
    drop_uniform_groups: bool = True
    logits_chunk_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class ScheduleSettings:
    """Blocks of agent and speculator updates; ``reset``: new optimizer moments at each switch."""

    agent_steps: int = 4
    speculator_steps: int = 8
    reset: bool = True


@dataclasses.dataclass(frozen=True)
class OptimSettings:
    """AdamW. The learning rate is a stage's, and a function of the global step, unless
    ``reset_schedule`` starts it anew with the moments.
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    reset_schedule: bool = False


@dataclasses.dataclass(frozen=True)
class PackSettings:
    """Training batches: rows of ``row_tokens``, ``rows_per_batch`` rows a micro-batch."""

    row_tokens: int = 512
    rows_per_batch: int = 8


@dataclasses.dataclass(frozen=True)
class StageSettings:
    """One stage of the job.

    ``kind``: load (the model as it is) | pretrain (agent turns only) | sft (agent turns and
    speculation branches) | rl. ``start`` names the stage whose weights it begins with; empty: the
    fresh or loaded model. ``n_examples`` expert episodes, ``rows_per_step`` of them a step. An SFT
    stage with ``patience`` > 0 looks at held-out Hit@1 every ``eval_every`` steps, stops after
    ``patience`` looks without a new best, and ends with the best weights. ``match_tokens_of``:
    train until as many tokens as that stage trained.
    """

    kind: Literal["load", "pretrain", "sft", "rl"] = "sft"
    start: str = ""
    steps: int = 0
    lr: float = 1e-3
    decay: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    n_examples: int = 0
    rows_per_step: int = 32
    eval_every: int = 0
    eval_tasks: int = 48
    patience: int = 0
    match_tokens_of: str = ""


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """How often a stage saves, in steps, and how many saves it keeps."""

    every: int = 20
    keep: int = 2


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """Evaluation. Times are simulated at ``token_s`` a token and tools that take ``tool_s``.

    ``crossing`` names the stages whose agents and speculators are crossed, on ``crossing_tasks``
    a world. ``agreement``: independent continuations a turn, for the ceiling of Hit@1.
    """

    tasks_per_world: int = 192
    temperatures: tuple[float, ...] = (1.0, 0.0)
    agreement: int = 1
    token_s: float = 0.02
    prefill_token_s: float = 0.0
    tool_s: float = 0.3
    tool_spread: float = 0.0
    crossing: tuple[str, ...] = ("base", "sft", "joint")
    crossing_tasks: int = 64


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything one job needs, typed."""

    name: str = "tiny"
    seed: int = 0
    stages: tuple[str, ...] = ("base", "sft_light", "sft", "joint", "sft_more")
    model: ModelSettings = ModelSettings()
    mesh: MeshSettings = MeshSettings()
    chat: ChatSettings = ChatSettings()
    world: WorldSettings = WorldSettings()
    engine: EngineSettings = EngineSettings()
    episode: EpisodeSettings = EpisodeSettings()
    agent: AgentSettings = AgentSettings()
    speculator: SpeculatorSettings = SpeculatorSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    reward: RewardSettings = RewardSettings()
    loss: LossSettings = LossSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    optim: OptimSettings = OptimSettings()
    pack: PackSettings = PackSettings()
    base: StageSettings = StageSettings(kind="pretrain")
    sft_light: StageSettings = StageSettings(start="base")
    sft: StageSettings = StageSettings(start="base")
    joint: StageSettings = StageSettings(kind="rl", start="sft")
    sft_more: StageSettings = StageSettings(start="sft", match_tokens_of="joint")
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluate: EvalSettings = EvalSettings()

    def stage(self, name: str) -> StageSettings:
        """The settings of the stage of that name."""
        return typing.cast(StageSettings, getattr(self, name))


STAGE_NAMES = tuple(f.name for f in dataclasses.fields(Settings) if f.type == "StageSettings")
