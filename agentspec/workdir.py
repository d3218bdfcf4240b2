"""The folder of one run: who it belongs to, and where its parts lie.

``config.json`` holds the settings the run began with. Going on with other ones would mix two
experiments, so it is refused, naming the keys; keys that do not change what is trained may differ:
another mesh, say, onto which the checkpoints are laid out anew.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

from agentspec.configuration import ConfigError, flat_settings
from agentspec.settings import Settings

_FREE = ("evaluate.", "checkpoint.", "mesh.", "model.remat", "model.attention")


class RunError(ValueError):
    """A file of a run's folder that cannot be used; the message names it."""


def claim(workdir: Path, settings: Settings) -> IO[str]:
    """Makes ``workdir`` this run's, or checks that it already is; returns its lock, to be kept.

    Raises ``RunError`` while another process trains there. The lock goes with the process.
    """
    check(workdir, settings)
    workdir.mkdir(parents=True, exist_ok=True)
    lock = (workdir / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        raise RunError(f"{workdir} is in use by process {lock.read() or 'unknown'}") from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    file = workdir / "config.json"
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(_plain(settings), indent=1, sort_keys=True))
    partial.replace(file)
    return lock


def check(workdir: Path, settings: Settings) -> None:
    """Raises ``ConfigError`` if ``workdir`` is a run of other settings; a new one is nobody's.

    A key that the run's ``config.json`` lacks, being younger than it, counts as its default.
    """
    if workdir.exists() and not workdir.is_dir():
        raise RunError(f"{workdir} is a file; --workdir names a folder")
    file = workdir / "config.json"
    if not file.exists():
        return
    now = _plain(settings)
    before = _plain(Settings()) | read_object(file)
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


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; raises ``RunError`` naming the line for anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RunError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise RunError(f"{file}: not UTF-8 at byte {error.start}") from error
    if not isinstance(value, dict):
        raise RunError(f"{file}: a JSON object is wanted, got {type(value).__name__}")
    return value


def _plain(settings: Settings) -> dict[str, Any]:
    """Dotted key -> value as JSON has it, tuples as lists."""
    plain: dict[str, Any] = json.loads(json.dumps(flat_settings(settings)))
    return plain
