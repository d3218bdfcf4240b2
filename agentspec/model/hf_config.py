"""A Hugging Face ``config.json`` to a ``ModelConfig`` and back.

In: the parsed file (Llama, Qwen3, Qwen3.5; transformers 4 and 5 forms). Anything in it that would
change the computation and that this model does not do is refused by name, since ignoring it gives a
fluent but wrong model.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from agentspec.model.config import DTYPES, LinearShape, Llama3Rope, ModelConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
MULTIMODAL = {"qwen3_5": "Qwen3_5ForConditionalGeneration"}  # its text part is ``qwen3_5_text``
_FAMILIES = {"llama": "llama", "qwen3": "qwen3", "qwen3_5_text": "qwen3_5"}
_KINDS = {"full_attention": "full", "linear_attention": "linear"}

# keys that say nothing about the forward computation
_IGNORED = frozenset(
    "architectures bos_token_id eos_token_id pad_token_id initializer_range use_cache dtype "
    "torch_dtype transformers_version max_window_layers pretraining_tp id2label label2id "
    "problem_type output_hidden_states output_attentions return_dict chunk_size_feed_forward "
    "is_llama_config transformers.js_config mtp_num_hidden_layers "
    "mtp_use_dedicated_embeddings".split()
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
}
_ONLY_FAMILY: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {"partial_rotary_factor": (1.0, None)},
    "qwen3": {"partial_rotary_factor": (1.0, None)},
    "qwen3_5": {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32", None)},
}
_LINEAR = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_kernel": "linear_conv_kernel_dim",
}
_QWEN3_5 = {*_LINEAR.values(), "full_attention_interval", "partial_rotary_factor"}
_VISION = frozenset(
    "model_type text_config vision_config image_token_id video_token_id vision_start_token_id "
    "vision_end_token_id tie_word_embeddings language_model_only".split()
)

_Check = tuple[str, Callable[[Any], bool]]  # what a value must be, in words and as a test
_SIZE: _Check = ("a positive integer", lambda v: type(v) is int and v > 0)
_NUMBER: _Check = (
    "a finite number above 0",
    lambda v: type(v) in (int, float) and 0 < v <= sys.float_info.max,
)
_FLAG: _Check = ("true or false", lambda v: type(v) is bool)
_ID: _Check = ("a token id", lambda v: type(v) is int and v >= 0)
_IDS: _Check = (
    "a token id or a list of them",
    lambda v: all(map(_ID[1], v if isinstance(v, list) else [v])),
)
_NAME: _Check = ("a name", lambda v: isinstance(v, str))
_NAMES: _Check = ("a list of names", lambda v: isinstance(v, list) and all(map(_NAME[1], v)))
_OBJECT: _Check = ("an object", lambda v: isinstance(v, Mapping))


def config_from_hf(hf: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Returns the config of a parsed ``config.json``; ``source`` is for errors.

    Of a multimodal Qwen3.5 it is the text part's.

    Raises:
        ValueError: naming every missing key, or the feature that is not supported.
    """
    kind = str(hf.get("model_type"))
    if kind in MULTIMODAL:
        hf, kind = _text_part(hf, source)
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{source}: model_type {kind!r} is not supported, allowed: "
            f"{', '.join(sorted([*ARCHITECTURES, *MULTIMODAL]))}"
        )
    family = _FAMILIES[kind]
    _refuse_unsupported(hf, kind, source)
    required = "vocab_size hidden_size num_hidden_layers num_attention_heads "
    required += "intermediate_size rms_norm_eps"
    if family != "llama":  # where transformers' own defaults do not follow from other keys
        required += " head_dim num_key_value_heads"
    if family == "qwen3_5":
        required += " " + " ".join(_LINEAR.values())
    missing = [key for key in required.split() if hf.get(key) is None]
    if missing:
        raise ValueError(f"{source}: missing {', '.join(missing)}")
    theta, scaling, share = _rope(hf, family, source)
    read = functools.partial(_read, hf, source)
    width, heads = read("hidden_size", _SIZE), read("num_attention_heads", _SIZE)
    head_dim = read("head_dim", _SIZE)
    if head_dim is None:
        if width % heads:
            raise ValueError(
                f"{source}: head_dim is missing and hidden_size={width} is not a multiple of "
                f"num_attention_heads={heads}"
            )
        head_dim = width // heads
    eos = read("eos_token_id", _IDS, [])
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    layer_types = _layer_types(hf, family, source)
    linear = None
    if family == "qwen3_5":
        linear = LinearShape(**{ours: read(name, _SIZE) for ours, name in _LINEAR.items()})
    return ModelConfig(
        vocab_size=read("vocab_size", _SIZE),
        d_model=width,
        n_layers=read("num_hidden_layers", _SIZE),
        n_heads=heads,
        n_kv_heads=read("num_key_value_heads", _SIZE, heads),
        head_dim=head_dim,
        d_ff=read("intermediate_size", _SIZE),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=_rotary_dim(head_dim, share, source),
        norm_eps=float(read("rms_norm_eps", _NUMBER)),
        tie_embeddings=read("tie_word_embeddings", _FLAG, False),
        family=family,
        layer_types=layer_types,
        linear=linear,
        dtype=dtype if dtype in DTYPES else "float32",  # float16 widens exactly
        max_positions=read("max_position_embeddings", _SIZE, 32768),
        bos_id=read("bos_token_id", _ID),
        eos_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        pad_id=read("pad_token_id", _ID),
    )


def _read(hf: Mapping[str, Any], source: str, key: str, check: _Check, default: Any = None) -> Any:
    """Returns ``hf[key]``, checked, or ``default`` where it is absent or null."""
    value = hf.get(key)
    return default if value is None else _checked(value, source, key, check)


def _checked(value: Any, source: str, key: str, check: _Check) -> Any:
    wanted, fits = check
    if not fits(value):
        raise ValueError(f"{source}: {key} must be {wanted}, got {value!r}")
    return value


def _rotary_dim(head_dim: int, share: float, source: str) -> int:
    """How much of a head is turned; 0 stands for all of it."""
    if share == 1:
        return 0
    turned = int(head_dim * share)
    if not 0 < share <= 1 or turned < 2 or turned % 2:
        raise ValueError(
            f"{source}: partial_rotary_factor {share} of head_dim={head_dim} gives {turned} "
            "dimensions to turn; it must be above 0, at most 1, and give an even number from 2 on"
        )
    return turned


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Returns the ``config.json`` of this model, readable by transformers 4 and 5.

    Qwen3.5 becomes the text model's own (``qwen3_5_text``), whatever it was read from.
    """
    c = config
    kind = next(kind for kind, family in _FAMILIES.items() if family == c.family)
    rope: dict[str, Any] = {"rope_theta": c.rope_theta, "rope_type": "default"}
    if c.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(c.rope_scaling)}
    old_scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    eos: Any = list(c.eos_ids) or None
    hf: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.d_ff,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": c.max_positions,
        "bos_token_id": c.bos_id,
        "eos_token_id": c.eos_ids[0] if len(c.eos_ids) == 1 else eos,
        "pad_token_id": c.pad_id,
        "dtype": c.stored_dtype,
        "torch_dtype": c.stored_dtype,
        "rope_parameters": rope,
    }
    if c.family == "qwen3_5":
        assert c.linear is not None
        names = {ours: theirs for theirs, ours in _KINDS.items()}
        share = (c.rotary_dim or c.head_dim) / c.head_dim
        rope |= {"partial_rotary_factor": share}
        hf |= {name: getattr(c.linear, ours) for ours, name in _LINEAR.items()}
        hf |= {"layer_types": [names[kind] for kind in c.kinds], "partial_rotary_factor": share}
    else:
        hf |= {"rope_theta": c.rope_theta}
        hf |= {"rope_scaling": None if c.rope_scaling is None else old_scaling}
    if c.family == "llama":
        hf |= {"mlp_bias": False}
    return hf


def _text_part(hf: Mapping[str, Any], source: str) -> tuple[Mapping[str, Any], str]:
    """Returns the text model's part of a multimodal config, and its type."""
    text = _read(hf, source, "text_config", _OBJECT)
    if text is None:
        raise ValueError(f"{source}: model_type {hf['model_type']!r} without a text_config")
    unknown = sorted(hf.keys() - _VISION - _IGNORED)
    if unknown:
        raise ValueError(f"{source}: unknown features, not supported: {', '.join(unknown)}")
    named = _read(hf, source, "architectures", _NAMES) or [MULTIMODAL[hf["model_type"]]]
    if named != [MULTIMODAL[hf["model_type"]]]:
        raise ValueError(f"{source}: architectures {named} are not supported")
    kind = _read(text, source, "model_type", _NAME, f"{hf['model_type']}_text")
    merged = dict(text) | {"model_type": kind}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype"):
        if merged.get(key) is None and hf.get(key) is not None:
            merged[key] = hf[key]
    if hf.get("tie_word_embeddings") is not None:  # transformers heeds the outer one
        merged["tie_word_embeddings"] = hf["tie_word_embeddings"]
    return merged, kind


def _layer_types(hf: Mapping[str, Any], family: str, source: str) -> tuple[str, ...]:
    """Returns the kinds of Qwen3.5's layers: listed, or every n-th full attention; else ()."""
    n = _read(hf, source, "num_hidden_layers", _SIZE)
    named = _read(hf, source, "layer_types", _NAMES)
    if not named and family != "qwen3_5":
        return ()
    if not named:
        every = _read(hf, source, "full_attention_interval", _SIZE, 4)
        return tuple("linear" if (i + 1) % every else "full" for i in range(n))
    kinds = _KINDS if family == "qwen3_5" else {"full_attention": "full"}
    odd = sorted(set(named) - kinds.keys())
    if odd:
        raise ValueError(
            f"{source}: layer_types {odd} are not supported, allowed: {', '.join(kinds)}"
        )
    if len(named) != n:
        raise ValueError(f"{source}: layer_types names {len(named)} layers, num_hidden_layers={n}")
    return tuple(kinds[name] for name in named) if family == "qwen3_5" else ()


def _refuse_unsupported(hf: Mapping[str, Any], kind: str, source: str) -> None:
    """Raises ValueError naming the first feature in ``hf`` that this model does not compute."""
    family = _FAMILIES[kind]
    only = _ONLY | _ONLY_FAMILY[family]
    for key, allowed in only.items():
        if key in hf and hf[key] not in allowed:
            raise ValueError(
                f"{source}: {key}={hf[key]!r} is not supported, allowed: {allowed[0]!r}"
            )
    window = hf.get("sliding_window")
    if window is not None and hf.get("use_sliding_window", True):
        raise ValueError(f"{source}: sliding_window={window} in use is not supported")
    named = _read(hf, source, "architectures", _NAMES) or [ARCHITECTURES[kind]]
    if named not in ([ARCHITECTURES[kind]], list(MULTIMODAL.values())):
        raise ValueError(
            f"{source}: architectures {named} are not supported, "
            f"allowed for {kind}: {ARCHITECTURES[kind]}"
        )
    known = _IGNORED | _USED | only.keys() | {"sliding_window", "layer_types"}
    known |= _QWEN3_5 if family == "qwen3_5" else set()
    unknown = [
        f"{key}={value!r}"
        for key, value in hf.items()
        if key not in known and not key.startswith("_") and value  # an empty value switches nothing
    ]
    if unknown:
        raise ValueError(f"{source}: unknown features, not supported: {', '.join(unknown)}")


def _rope(
    hf: Mapping[str, Any], family: str, source: str
) -> tuple[float, Llama3Rope | None, float]:
    """Returns rotary base, scaling and share of the head, from the 4.x or the 5.x form."""
    new, old = (_rope_form(hf, source, key) for key in ("rope_parameters", "rope_scaling"))
    rope = new or old or {"rope_type": "default"}
    top = {key: hf.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    older = {k: v for k, v in top.items() if k in rope and v is not None} | (old if new else {})
    other = {k: v for k, v in older.items() if rope.get(k) != v}
    if other:
        raise ValueError(
            f"{source}: {'rope_parameters' if new else 'rope_scaling'}={rope} and the older keys "
            f"disagree on {', '.join(sorted(other))} ({other}); remove one form"
        )
    theta, rope_type = (top | rope)["rope_theta"], rope["rope_type"]
    if theta is None:
        raise ValueError(
            f"{source}: rope_theta is missing, at the top level and in rope_parameters; "
            "its default differs between models, so there is none here"
        )
    base, share = float(_checked(theta, source, "rope_theta", _NUMBER)), 1.0
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    if family == "qwen3_5":  # text positions are equal in all sections, so sections do not matter
        share = scaling.pop("partial_rotary_factor", hf.get("partial_rotary_factor", 0.25))
        share = _checked(share, source, "partial_rotary_factor", _NUMBER)
        scaling.pop("mrope_section", None)
        scaling.pop("mrope_interleaved", None)
    elif scaling.get("partial_rotary_factor") == 1.0:
        scaling.pop("partial_rotary_factor")
    fields = [field.name for field in dataclasses.fields(Llama3Rope)]
    allowed: dict[str, list[str]] = {"default": [], "llama3": fields}
    if family == "qwen3_5":
        allowed.pop("llama3")
    if not isinstance(rope_type, str) or rope_type not in allowed:
        raise ValueError(
            f"{source}: rope_type {rope_type!r} is not supported, allowed: {', '.join(allowed)}"
        )
    extra = [key for key in scaling if key not in allowed[rope_type]]
    missing = [key for key in allowed[rope_type] if scaling.get(key) is None]
    if extra or missing:
        raise ValueError(
            f"{source}: rope_type {rope_type!r} lacks {missing}, has unsupported {extra}"
        )
    if rope_type == "default":
        return base, None, share
    stretch = {key: float(_read(scaling, source, key, _NUMBER)) for key in fields[:-1]}
    original = _read(scaling, source, fields[-1], _SIZE)
    return base, Llama3Rope(**stretch, original_max_position_embeddings=original), share


def _rope_form(hf: Mapping[str, Any], source: str, key: str) -> dict[str, Any]:
    """Returns one of the two rope objects, its kind called ``rope_type``; {} where absent."""
    form = _read(hf, source, key, _OBJECT, {})
    rest = {name: value for name, value in form.items() if name != "type"}
    return {"rope_type": form.get("type", "default")} | rest if form else {}
