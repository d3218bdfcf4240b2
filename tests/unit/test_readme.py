"""README names only config keys, modules and files that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from agentspec.configuration import default_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.split("## From the paper to the code")[1].split("## Layout")[0]


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.splitlines() if line.startswith("| ")]
    found = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    return [row for row in found if row[0] not in ("paper",)]


def test_config_keys_exist():
    config = default_config()
    keys = [key for row in rows() for key in re.findall(r"`([^`]+)`", row[2])]
    keys += re.findall(r"`((?:world|evaluate)\.\w+)`", README)
    keys += re.findall(r"--config\.([\w.]+)=", README)
    assert len(keys) > 30
    for key in keys:
        value = config
        for part in key.split("."):
            assert part in value, f"README names config key {key}"
            value = value[part]


def test_names_of_the_code_exist():
    names = [name for row in rows() for name in re.findall(r"`([a-z_.]+\.\w+)", row[1])]
    assert len(names) >= 10
    for name in names:
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                value = importlib.import_module(".".join(["agentspec", *parts[:cut]]))
            except ModuleNotFoundError:
                continue
            break
        else:
            raise AssertionError(f"README names {name}")
        for part in parts[cut:]:
            assert hasattr(value, part) or part in getattr(value, "__annotations__", {}), name
            value = getattr(value, part, None)


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
    for script in re.findall(r"bash (launch/\S+\.sh)", README):
        assert (ROOT / script).exists(), script
