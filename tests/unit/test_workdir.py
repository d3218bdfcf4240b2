"""Whose run a folder is."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from agentspec.configuration import ConfigError
from agentspec.settings import Settings
from agentspec.workdir import RunError, check, claim, read_object

SETTINGS = Settings()


def changed(section: str, **values: object) -> Settings:
    part = dataclasses.replace(getattr(SETTINGS, section), **values)
    return dataclasses.replace(SETTINGS, **{section: part})


def test_a_folder_is_claimed_once_and_again_by_the_same_settings(tmp_path: Path):
    run = tmp_path / "a" / "run"
    claim(run, SETTINGS).close()
    written = (run / "config.json").read_text()
    saved = json.loads(written)
    assert saved["joint.kind"] == "rl" and saved["world.names"] == ["lookup", "storefront"]
    lock = claim(run, SETTINGS)
    assert (run / "config.json").read_text() == written
    assert sorted(p.name for p in run.iterdir()) == [".lock", "config.json"]
    with pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
        claim(run, SETTINGS)
    lock.close()
    claim(run, SETTINGS).close()


def test_other_settings_are_refused_by_key_and_nothing_is_written(tmp_path: Path):
    claim(tmp_path, SETTINGS)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ConfigError, match=re.escape("(loss.kl: 0.0 -> 0.5); use another --workd")):
        claim(tmp_path, changed("loss", kl=0.5))
    with pytest.raises(ConfigError, match="seed: 0 -> 1"):
        claim(tmp_path, dataclasses.replace(SETTINGS, seed=1))
    with pytest.raises(ConfigError, match="world.names"):
        check(tmp_path, changed("world", names=("lookup",)))
    assert (tmp_path / "config.json").read_text() == before


def test_what_does_not_change_training_may_differ(tmp_path: Path):
    claim(tmp_path, SETTINGS)
    claim(tmp_path, changed("evaluate", tool_s=9.0))
    claim(tmp_path, changed("checkpoint", keep=5))
    assert json.loads((tmp_path / "config.json").read_text())["checkpoint.keep"] == 5


def test_a_younger_key_counts_as_its_default(tmp_path: Path):
    claim(tmp_path, SETTINGS)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    del saved["loss.kl"]
    file.write_text(json.dumps(saved))
    check(tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match="loss.kl: 0.0 -> 0.5"):
        check(tmp_path, changed("loss", kl=0.5))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n"seed": 0,\n', "config.json:3: not JSON"),
        (b"", "config.json:1: not JSON"),
        (b"[1]", "config.json: a JSON object is wanted, got list"),
        (b'{"name": "\xff"}', "config.json: not UTF-8 at byte 10"),
    ],
)
def test_a_damaged_config_json_is_named_and_kept(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(RunError, match=re.escape(message)):
        claim(tmp_path, SETTINGS)
    with pytest.raises(RunError, match=re.escape(message)):
        read_object(file)
    assert file.read_bytes() == content


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="file is a file; --workdir names a folder"):
        claim(tmp_path / "file", SETTINGS)
    assert (tmp_path / "file").read_text() == "mine"


def test_check_writes_nothing(tmp_path: Path):
    check(tmp_path / "new", SETTINGS)
    assert list(tmp_path.iterdir()) == []
