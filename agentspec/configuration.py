"""From a ``ml_collections`` config to typed, checked settings.

A config file (``configs/*.py``) is the record of an experiment. Only the entry points see it; they
call ``settings_from`` once and pass the typed pieces on. In: a config. Out: ``settings.Settings``,
or a ``ConfigError`` that names the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from typing import Any, Literal

from ml_collections import ConfigDict

from agentspec.settings import STAGE_NAMES, Settings


class ConfigError(ValueError):
    """A config value that cannot be used; the message names the key."""


_WORLDS = ("lookup", "storefront", "hotpot")


def default_config() -> ConfigDict:
    """The config whose every key stands at its default (``settings``)."""
    return ConfigDict(dataclasses.asdict(Settings()))


def check_key(path: str) -> None:
    """Raises ``ConfigError``, with names near it, unless ``path`` is a key such as ``loss.kl``."""
    keys = _KEYS
    if path in keys:
        return
    if any(key.startswith(f"{path}.") for key in keys):
        raise ConfigError(f"config key {path} is a section; set one of its keys, {path}.KEY")
    near = difflib.get_close_matches(path, keys, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"config key {path} does not exist{hint}")


def key_type(path: str) -> str:
    """The name of a key's type, as error messages give it."""
    return type(_KEYS[path]).__name__


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{path}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def flat_settings(settings: Settings) -> dict[str, Any]:
    """Dotted key -> value."""
    return _flat(dataclasses.asdict(settings))


_KEYS = flat_settings(Settings())


def settings_from(config: ConfigDict) -> Settings:
    """Typed settings of a config; every wrong key, type or combination is a ``ConfigError``."""
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"the config must be a ConfigDict, got {type(config).__name__}")
    settings = typing.cast(Settings, _typed(Settings, config, ""))
    check_config(settings)
    return settings


def _typed(cls: type, config: Any, path: str) -> Any:
    hints = typing.get_type_hints(cls)
    for key in config:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean {path}{near[0]}?" if near else ""
            raise ConfigError(f"config key {path}{key} does not exist{hint}")
    values = {}
    for key, kind in hints.items():
        if key in config:
            value = config[key]
            name = f"{path}{key}"
            values[key] = (
                _typed(kind, value, f"{name}.")
                if isinstance(kind, type)
                and dataclasses.is_dataclass(kind)
                and isinstance(value, ConfigDict | dict)
                else _checked(value, kind, name)
            )
    return cls(**values)


def _checked(value: Any, kind: Any, name: str) -> Any:
    if isinstance(kind, types.GenericAlias):
        item = typing.get_args(kind)[0]
        if not isinstance(value, tuple):
            raise ConfigError(f"config key {name} must be a tuple, got {value!r}")
        return tuple(_checked(v, item, f"{name}[{i}]") for i, v in enumerate(value))
    if typing.get_origin(kind) is Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            raise ConfigError(f"config key {name} must be one of {allowed}, got {value!r}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if dataclasses.is_dataclass(kind):
        raise ConfigError(f"config key {name} is a section of keys, got {value!r}")
    if type(value) is not kind:
        raise ConfigError(f"config key {name} must be {kind.__name__}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"config key {name} must be a finite number, got {value!r}")
    if value == "None":
        raise ConfigError(f"config key {name} is the text 'None'; leave it empty instead")
    return value


_ABOVE_0 = {
    "model": "d_model n_layers n_heads n_kv_heads head_dim d_ff rope_theta",
    "world": "search_chars read_chars n_test",
    "engine": "rows cache_tokens prefill_chunk tokens_per_call",
    "episode": "max_turns max_turn_tokens max_tokens",
    "agent": "tasks_per_step group_size temperature",
    "speculator": "tasks_per_step prefixes_per_step group_size max_tokens turns_per_episode "
    "temperature",
    "optim": "eps clip_norm",
    "pack": "row_tokens rows_per_batch",
    "checkpoint": "every keep",
    "evaluate": "tasks_per_world crossing_tasks",
}
_NOT_BELOW_0 = {
    "world": "n_validation",
    "speculation": "agent_block_members calls_per_turn calls_per_episode",
    "reward": "repeat_penalty",
    "loss": "clip_low clip_high kl logits_chunk_tokens",
    "schedule": "agent_steps speculator_steps",
    "optim": "b1 b2 weight_decay",
    "evaluate": "agreement token_s prefill_token_s tool_s tool_spread",
}
_STAGE_ABOVE_0 = "rows_per_step eval_tasks"
_STAGE_NOT_BELOW_0 = "steps lr warmup_steps n_examples eval_every patience"


def _need(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def check_config(s: Settings) -> None:
    """Raises ``ConfigError`` naming the key for any value or combination that cannot work."""
    for bounds, lowest in ((_ABOVE_0, "above 0"), (_NOT_BELOW_0, "at least 0")):
        for section, keys in bounds.items():
            _check_bounds(getattr(s, section), section, keys, lowest)
    _check_names("world.names", s.world.names, _WORLDS)
    _check_names("stages", s.stages, STAGE_NAMES)
    _check_names("evaluate.crossing", s.evaluate.crossing, STAGE_NAMES, empty=True)
    for name in s.stages:
        _check_stage(s, name)
    temperatures = s.evaluate.temperatures
    _need(
        bool(temperatures)
        and min(temperatures) >= 0
        and len(set(temperatures)) == len(temperatures),
        "config key evaluate.temperatures must be one or more distinct numbers, at least 0, got "
        f"{temperatures}",
    )
    for name, group in (("agent", s.agent.group_size), ("speculator", s.speculator.group_size)):
        _need(group >= 2, f"config key {name}.group_size={group}: a group of one has no advantage")
    shorter = min(s.schedule.agent_steps, s.schedule.speculator_steps)
    _need(
        not s.optim.reset_schedule or s.joint.warmup_steps < shorter,
        f"config key optim.reset_schedule starts the warm-up anew at each switch, but joint."
        f"warmup_steps={s.joint.warmup_steps} is not below the shorter block of {shorter} steps",
    )
    _need(s.optim.b1 < 1 and s.optim.b2 < 1, "config keys optim.b1 and optim.b2 must be below 1")
    _need(
        s.model.n_heads % s.model.n_kv_heads == 0,
        f"config key model.n_heads={s.model.n_heads} is no multiple of model.n_kv_heads="
        f"{s.model.n_kv_heads}",
    )
    _need(s.model.head_dim % 2 == 0, f"config key model.head_dim={s.model.head_dim} must be even")
    _need(s.engine.speculator_rows >= 2, "config key engine.speculator_rows must be at least 2")
    longest = s.episode.max_tokens + s.speculator.max_tokens
    _need(
        longest <= s.engine.cache_tokens,
        f"config key engine.cache_tokens={s.engine.cache_tokens} is below episode.max_tokens="
        f"{s.episode.max_tokens} + speculator.max_tokens={s.speculator.max_tokens}",
    )
    _need(
        s.episode.max_tokens <= s.pack.row_tokens,
        f"config key pack.row_tokens={s.pack.row_tokens} is below episode.max_tokens="
        f"{s.episode.max_tokens}",
    )
    most = s.speculator.tasks_per_step * s.speculator.turns_per_episode
    _need(
        s.speculator.prefixes_per_step <= most,
        f"config key speculator.prefixes_per_step={s.speculator.prefixes_per_step} is above "
        f"speculator.tasks_per_step * speculator.turns_per_episode={most:g}",
    )
    _need(
        s.schedule.agent_steps + s.schedule.speculator_steps > 0,
        "config keys schedule.agent_steps and schedule.speculator_steps are both 0",
    )
    if "hotpot" in s.world.names:
        for key in ("corpus", "questions", "trajectories"):
            _need(bool(getattr(s.world, key)), f"config key world.{key} is empty; hotpot reads it")


def _check_bounds(settings: Any, section: str, keys: str, lowest: str) -> None:
    for key in keys.split():
        value = getattr(settings, key)
        ok = value > 0 if lowest == "above 0" else value >= 0
        _need(ok, f"config key {section}.{key} must be {lowest}, got {value}")


def _check_names(
    key: str, names: tuple[str, ...], allowed: tuple[str, ...], empty: bool = False
) -> None:
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"config key {key} must be among {allowed}, got {name!r}{hint}")
    _need(len(set(names)) == len(names), f"config key {key} names one twice: {names}")
    _need(empty or bool(names), f"config key {key} is empty; name at least one of {allowed}")


def _check_stage(s: Settings, name: str) -> None:
    stage, before = s.stage(name), s.stages[: s.stages.index(name)]
    _check_bounds(stage, name, _STAGE_ABOVE_0, "above 0")
    _check_bounds(stage, name, _STAGE_NOT_BELOW_0, "at least 0")
    for key in ("start", "match_tokens_of"):
        earlier = getattr(stage, key)
        _need(
            not earlier or earlier in before,
            f"config key {name}.{key} names {earlier!r}, which is not a stage before it "
            f"in stages={s.stages}",
        )
    if stage.kind in ("pretrain", "sft"):
        _need(stage.n_examples > 0, f"config key {name}.n_examples must be above 0")
    if stage.kind != "load":
        _need(
            stage.steps > 0 or (stage.kind != "rl" and bool(stage.match_tokens_of)),
            f"config key {name}.steps must be above 0",
        )
    _need(
        stage.patience == 0 or stage.eval_every > 0,
        f"config key {name}.patience needs {name}.eval_every above 0",
    )
    imitates = stage.kind in ("pretrain", "sft")
    for key in ("patience", "eval_every", "match_tokens_of"):
        _need(
            imitates or not getattr(stage, key),
            f"config key {name}.{key} does nothing in a stage of kind {stage.kind}",
        )
    _need(
        not stage.patience or bool(stage.match_tokens_of) or stage.eval_every <= stage.steps,
        f"config key {name}.eval_every={stage.eval_every} is above {name}.steps={stage.steps}",
    )
    _need(
        stage.decay == "constant"
        or (stage.steps > stage.warmup_steps and not stage.match_tokens_of),
        f"config key {name}.decay=cosine needs steps above warmup_steps and no match_tokens_of",
    )
