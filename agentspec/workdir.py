"""The folder of one run: who it belongs to, and where its parts lie.

``config.json`` holds the settings the run began with. Going on with other ones would mix two
experiments, so it is refused, naming the keys; keys that do not change training may differ.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from agentspec.configuration import ConfigError, Settings

_FREE = ("evaluate.", "checkpoint.")


def claim(workdir: Path, settings: Settings) -> None:
    """Makes ``workdir`` this run's, or checks that it already is."""
    workdir.mkdir(parents=True, exist_ok=True)
    file = workdir / "config.json"
    now = json.loads(json.dumps(_flat(dataclasses.asdict(settings))))
    if file.exists():
        try:
            before = json.loads(file.read_text())
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from error
        keys = sorted(
            k
            for k in before.keys() | now.keys()
            if before.get(k) != now.get(k) and not k.startswith(_FREE)
        )
        if keys:
            changed = ", ".join(f"{k}: {before.get(k)!r} -> {now.get(k)!r}" for k in keys)
            raise ConfigError(
                f"{workdir} was trained with another config ({changed}); "
                "use another --workdir or the config it began with"
            )
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(now, indent=1, sort_keys=True))
    partial.replace(file)


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{path}{key}.")
        else:
            flat[f"{path}{key}"] = value
    return flat
