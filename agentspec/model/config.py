"""Shape of a decoder, and what of a Hugging Face ``config.json`` it comes from.

In: a parsed ``config.json`` (Qwen3 or Llama; transformers 4 and 5 forms). Out: ``ModelConfig``, all
that ``transformer`` needs. Anything in the file that would change the computation and that this
model does not do is refused by name, since ignoring it gives a fluent but wrong model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
DTYPES = ("float32", "bfloat16")

# keys that say nothing about the forward computation
_IGNORED = frozenset(
    "architectures bos_token_id eos_token_id pad_token_id initializer_range use_cache dtype "
    "torch_dtype transformers_version max_window_layers pretraining_tp id2label label2id "
    "problem_type output_hidden_states output_attentions return_dict chunk_size_feed_forward "
    "is_llama_config transformers.js_config".split()
)
_USED = frozenset(
    "model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim intermediate_size rms_norm_eps tie_word_embeddings rope_theta rope_scaling "
    "rope_parameters max_position_embeddings".split()
)
# keys with the only values that this model computes; an absent key means the first one
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "use_sliding_window": (False, None),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1.0, None),
}


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's stretching of the rotary frequencies: names as in ``config.json``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder: pre-norm, rotary, grouped-query attention, gated SiLU MLP.

    ``qk_norm`` tells Qwen3 (RMS norm on each query and key head) from Llama. ``remat`` recomputes
    each layer in the backward pass: less memory for about a third more time.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float
    rope_scaling: Llama3Rope | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = True
    dtype: str = "float32"
    remat: bool = False
    max_positions: int = 32768
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, for a shape that cannot be computed."""
        names = "vocab_size d_model n_layers n_heads n_kv_heads head_dim d_ff max_positions"
        for name in names.split():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"model.{name} must be a positive integer, got {value!r}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_heads={self.n_heads} is not a multiple of "
                f"model.n_kv_heads={self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim must be even for rotary pairs, got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype={self.dtype!r}, allowed: {', '.join(DTYPES)}")
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError(
                f"model.rope_theta={self.rope_theta} and model.norm_eps={self.norm_eps} "
                "must be above 0"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """Returns the config of a parsed Hugging Face ``config.json``; ``source`` is for errors.

        Raises:
            ValueError: naming every missing key, or the feature that is not supported.
        """
        kind = hf.get("model_type")
        if kind not in ARCHITECTURES:
            raise ValueError(
                f"{source}: model_type {kind!r} is not supported, allowed: "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
        _refuse_unsupported(hf, kind, source)
        required = "vocab_size hidden_size num_hidden_layers num_attention_heads "
        required += "intermediate_size rms_norm_eps"
        if kind == "qwen3":  # where transformers' own defaults do not follow from other keys
            required += " head_dim num_key_value_heads"
        missing = [key for key in required.split() if hf.get(key) is None]
        if missing:
            raise ValueError(f"{source}: missing {', '.join(missing)}")
        theta, scaling = _rope(hf, source)
        width, heads = int(hf["hidden_size"]), int(hf["num_attention_heads"])
        head_dim = hf.get("head_dim")
        if head_dim is None:
            if width % heads:
                raise ValueError(
                    f"{source}: head_dim is missing and hidden_size={width} is not a multiple of "
                    f"num_attention_heads={heads}"
                )
            head_dim = width // heads
        eos = hf.get("eos_token_id")
        dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
        return cls(
            vocab_size=int(hf["vocab_size"]),
            d_model=width,
            n_layers=int(hf["num_hidden_layers"]),
            n_heads=heads,
            n_kv_heads=int(hf.get("num_key_value_heads") or heads),
            head_dim=int(head_dim),
            d_ff=int(hf["intermediate_size"]),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(hf["rms_norm_eps"]),
            tie_embeddings=bool(hf.get("tie_word_embeddings") or False),
            qk_norm=kind == "qwen3",
            dtype=dtype if dtype in DTYPES else "float32",  # float16 widens exactly
            max_positions=int(hf.get("max_position_embeddings") or 32768),
            bos_id=hf.get("bos_token_id"),
            eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
            pad_id=hf.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the ``config.json`` of this model, readable by transformers 4 and 5."""
        kind = "qwen3" if self.qk_norm else "llama"
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3", **dataclasses.asdict(self.rope_scaling)}
        old_scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        return {
            "architectures": [ARCHITECTURES[kind]],
            "model_type": kind,
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.d_ff,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else old_scaling,
            "rope_parameters": rope,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_ids[0]
            if len(self.eos_ids) == 1
            else list(self.eos_ids)
            if self.eos_ids
            else None,
            "pad_token_id": self.pad_id,
            "dtype": self.dtype,
            "torch_dtype": self.dtype,
        } | ({} if self.qk_norm else {"mlp_bias": False})


def _refuse_unsupported(hf: Mapping[str, Any], kind: str, source: str) -> None:
    """Raises ValueError naming the first feature in ``hf`` that this model does not compute."""
    for key, allowed in _ONLY.items():
        if key in hf and hf[key] not in allowed:
            raise ValueError(
                f"{source}: {key}={hf[key]!r} is not supported, allowed: {allowed[0]!r}"
            )
    window = hf.get("sliding_window")
    if window is not None and hf.get("use_sliding_window", True):
        raise ValueError(f"{source}: sliding_window={window} in use is not supported")
    layer_types = set(hf.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise ValueError(
            f"{source}: layer_types {sorted(layer_types)} are not supported, "
            "allowed: full_attention"
        )
    named = hf.get("architectures") or [ARCHITECTURES[kind]]
    if list(named) != [ARCHITECTURES[kind]]:
        raise ValueError(
            f"{source}: architectures {list(named)} are not supported, "
            f"allowed for {kind}: {ARCHITECTURES[kind]}"
        )
    known = _IGNORED | _USED | _ONLY.keys() | {"sliding_window", "layer_types"}
    unknown = [
        f"{key}={value!r}"
        for key, value in hf.items()
        if key not in known and not key.startswith("_") and value  # an empty value switches nothing
    ]
    if unknown:
        raise ValueError(f"{source}: unknown features, not supported: {', '.join(unknown)}")


def _rope(hf: Mapping[str, Any], source: str) -> tuple[float, Llama3Rope | None]:
    """Returns rotary base and scaling from the old (4.x) or the new (5.x) form of the config."""
    new = hf.get("rope_parameters") or {}
    scaling = dict(hf.get("rope_scaling") or {})
    if new:
        scaling = {key: value for key, value in new.items() if key != "rope_theta"}
    theta = new.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise ValueError(
            f"{source}: rope_theta is missing, at the top level and in rope_parameters; "
            "its default differs between models, so there is none here"
        )
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    fields = [field.name for field in dataclasses.fields(Llama3Rope)]
    allowed = {"default": [], "llama3": fields}
    if rope_type not in allowed:
        raise ValueError(
            f"{source}: rope_type {rope_type!r} is not supported, allowed: default, llama3"
        )
    extra = [key for key in scaling if key not in allowed[rope_type]]
    missing = [key for key in allowed[rope_type] if scaling.get(key) is None]
    if extra == ["partial_rotary_factor"] and scaling["partial_rotary_factor"] == 1.0:
        extra = []
    if extra or missing:
        raise ValueError(
            f"{source}: rope_type {rope_type!r} lacks {missing}, has unsupported {extra}"
        )
    if rope_type == "default":
        return float(theta), None
    return float(theta), Llama3Rope(
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
    )
