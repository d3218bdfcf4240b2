"""Bad input at the programs' doors: one clear line, nothing lost; faults of tools are data."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from agentspec import entry
from agentspec.checkpoint import CheckpointError, DamagedCheckpoint, restore_params
from agentspec.configuration import ConfigError, settings_from
from agentspec.envs.base import World
from agentspec.envs.episode import EpisodeLimits, run_scripted
from agentspec.envs.experts import AssistantAct
from agentspec.envs.tools import ToolBox
from agentspec.evaluate import evaluate_checkpoint, evaluate_run
from agentspec.job import build_job
from agentspec.rollout.recorded import RecordedEngine
from agentspec.settings import Settings
from agentspec.speculation import runtime
from agentspec.speculation.clock import run_simulated
from agentspec.tasks.jsonlines import DataError
from agentspec.train import train
from agentspec.types import Candidate, Completion, Message, Score, Task, ToolCall, ToolSpec
from agentspec.workdir import RunError
from configs.tiny import get_config

ROOT = Path(__file__).resolve().parents[2]
SMOKE = "--config=configs/tiny.py:smoke"


def program(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program as a user starts it, from the repository's root."""
    command = [sys.executable, "-m", f"agentspec.{name}", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=240
    )


def fails(done: subprocess.CompletedProcess[str], code: int, message: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr
    assert done.stdout == ""


def smoke(**world: object) -> Settings:
    """The smoke config with its first stage only."""
    config = get_config("smoke")
    config.stages = ("base",)
    config.evaluate.crossing = ("base",)
    config.world.update(world)
    return settings_from(config)


def with_path(path: Path) -> Settings:
    settings = smoke()
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, path=str(path)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of stage ``base`` with checkpoints of steps 2 and 4."""
    workdir = tmp_path_factory.mktemp("run")
    train(smoke(), workdir)
    return workdir


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def largest(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


# --- command lines ---


@pytest.mark.parametrize("name", ["train", "evaluate", "report"])
def test_help_tells_what_the_program_does_and_its_own_flags(name: str):
    done = program(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    text = (ROOT / "agentspec" / f"{name}.py").read_text()
    assert done.stdout.startswith(text.split('"""')[1].strip().splitlines()[0])
    wanted = {
        "train": {"config", "workdir"},
        "evaluate": {"config", "workdir", "checkpoint", "speculator_checkpoint"},
        "report": {"workdir", "out"},
    }
    assert set(re.findall(r"^  --(\w+):", done.stdout, re.MULTILINE)) == wanted[name]
    assert done.stdout.count("\n") < 40


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("train", [SMOKE, "--config.joint.setps=3"], "config key joint.setps does not exist; did"),
        ("train", [SMOKE, "--config.joint.steps=1e3"], "joint.steps must be int, got '1e3'"),
        ("train", [SMOKE], "--workdir is missing"),
        ("train", ["--config=configs/none.py"], "--config=configs/none.py: there is no such file"),
        ("train", ["--config=configs/tiny.py:x"], "configs/tiny.py:44: ValueError: configs/tiny.p"),
        ("evaluate", [SMOKE], "give either --workdir or --checkpoint"),
        ("report", ["runs/tiny"], "--workdir is missing"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(name, arguments, message, tmp_path: Path):
    if "--workdir" not in message and name == "train":
        arguments = [*arguments, f"--workdir={tmp_path / 'run'}"]
    message = re.sub(r":44: .*", ":", message)  # whatever the line is
    fails(program(name, *arguments), 2, message)
    assert list(tmp_path.iterdir()) == [], "nothing is made"


def start(body: str) -> subprocess.CompletedProcess[str]:
    code = f"from agentspec import entry\ndef main(_):\n    {body}\nentry.run(main)\n"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_fault_of_the_program_keeps_its_traceback():
    done = start("raise ValueError('a fault of ours')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "a fault of ours" in done.stderr
    assert "Traceback" in start("import agentspec.nothing").stderr


def test_a_file_is_named_and_an_interrupt_says_how_to_go_on():
    fails(start("open('/no/such/file')"), 1, "No such file or directory: '/no/such/file'")
    fails(start("import bm52s"), 1, "the package bm52s is not installed")
    done = start("raise KeyboardInterrupt")
    assert done.returncode == 130 and done.stderr.count("\n") == 1
    assert "the same command goes on" in done.stderr


# --- checkpoints ---


def test_a_checkpoint_that_is_not_there(run: Path):
    where = run / "checkpoints" / "base"
    fails(
        program("evaluate", SMOKE, f"--checkpoint={where}:999"),
        1,
        f"no checkpoint of step 999 in {where}; steps there: [2, 4]",
    )
    with pytest.raises(CheckpointError, match="no checkpoint in .*jiont; steps there: none"):
        evaluate_checkpoint(smoke(), str(run / "checkpoints" / "jiont"), None)


def test_a_checkpoint_of_another_model(run: Path):
    settings = smoke()
    model = dataclasses.replace(settings.model, d_ff=48)
    with pytest.raises(CheckpointError, match="array params/.* was saved as .* the target wants"):
        evaluate_checkpoint(
            dataclasses.replace(settings, model=model), str(run / "checkpoints" / "base"), None
        )


def test_stages_that_were_never_trained_are_named(run: Path, tmp_path: Path):
    before = contents(run)
    whole = settings_from(get_config("smoke"))
    with pytest.raises(
        RunError, match="holds no finished checkpoints of sft_light, sft, joint, sft_more; t"
    ):
        evaluate_run(whole, run)
    with pytest.raises(RunError, match="nowhere holds no finished checkpoints of base"):
        evaluate_run(smoke(), tmp_path / "nowhere")
    assert contents(run) == before and not (tmp_path / "nowhere").exists()


def test_a_damaged_newest_checkpoint_is_passed_over_and_made_again(run: Path, finished: Path):
    stage = run / "checkpoints" / "base"
    victim = largest(stage / "00000004")
    truncate(victim)
    with pytest.warns(UserWarning, match=re.escape(str(victim))):
        train(smoke(), run)
    whole = restore_params(finished / "checkpoints" / "base")
    for a, b in zip(leaves(whole), leaves(restore_params(stage)), strict=True):
        np.testing.assert_array_equal(a, b)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]


def test_no_sound_checkpoint_is_one_error_and_nothing_is_deleted(run: Path):
    for step in ("00000002", "00000004"):
        truncate(largest(run / "checkpoints" / "base" / step))
    before = contents(run)
    with pytest.raises(DamagedCheckpoint, match="no sound checkpoint is left: .*00000004.*000002"):
        train(smoke(), run)
    assert contents(run) == before
    done = program(
        "train", SMOKE, '--config.stages=("base",)', '--config.evaluate.crossing=("base",)',
        f"--workdir={run}",
    )  # fmt: skip
    fails(done, 1, "no sound checkpoint is left")
    assert contents(run) == before


def leaves(tree) -> list[np.ndarray]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    return [np.asarray(tree)]


# --- files of a run ---


def test_a_run_of_another_config_is_refused(run: Path):
    before = contents(run)
    for program_ in (train, evaluate_run):
        with pytest.raises(ConfigError, match=r"another config \(world.seed: 0 -> 5\)"):
            program_(smoke(seed=5), run)
    assert contents(run) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"stage": "ba', "metrics.jsonl:2"), ("[1]", "metrics.jsonl"), ("{}", "metrics.jsonl")],
)
def test_a_damaged_metrics_file_stops_training_before_it_begins(run: Path, line, message):
    file = run / "metrics.jsonl"
    rows = file.read_text().splitlines()
    file.write_text("\n".join([rows[0], line, *rows[1:]]) + "\n")
    shutil.rmtree(run / "checkpoints" / "base" / "00000004")  # so that there is something to do
    before = contents(run)
    with pytest.raises(RunError, match=message) as caught:
        train(smoke(), run)
    assert "checkpoints are untouched" in str(caught.value)
    assert contents(run) == before


def test_a_metrics_file_cut_in_its_last_line_goes_on(run: Path):
    file = run / "metrics.jsonl"
    file.write_text(file.read_text() + '{"stage": "base", "st')
    shutil.rmtree(run / "checkpoints" / "base" / "00000004")
    train(smoke(), run)
    steps = [json.loads(row)["step"] for row in file.read_text().splitlines()]
    assert steps == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ['{"rows": [', "[]"])
def test_a_damaged_results_file_is_named_and_kept(run: Path, text: str):
    file = run / "results.json"
    file.write_text(text)
    with pytest.raises(RunError, match=re.escape(str(file))):
        evaluate_run(smoke(), run)
    assert file.read_text() == text
    fails(program("report", f"--workdir={run}"), 1, str(file))
    assert not (run / "report.html").exists()


# --- data and weights ---


def test_a_data_line_cut_in_half_is_named_and_no_run_is_begun(tmp_path: Path):
    corpus, questions, recorded = (tmp_path / f"{n}.jsonl" for n in ("corpus", "qa", "recorded"))
    whole = json.dumps({"title": "Oslo", "text": "Oslo is the capital of Norway."})
    corpus.write_text(f"{whole}\n{whole[:25]}\n{whole}\n")
    questions.write_text("")
    recorded.write_text("")
    paths = dict(corpus=str(corpus), questions=(str(questions),), trajectories=(str(recorded),))
    with pytest.raises(
        DataError, match=rf"{corpus}:2: not one whole JSON value .* is the line cut"
    ):
        train(smoke(names=("hotpot",), **paths), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    done = program(
        "train", SMOKE, "--config.world.names=hotpot", f"--config.world.corpus={tmp_path}/no.jsonl",
        f"--config.world.questions={questions}", f"--config.world.trajectories={recorded}",
        f"--workdir={tmp_path / 'run'}",
    )  # fmt: skip
    fails(done, 1, f"{tmp_path}/no.jsonl: there is no such file")
    assert not (tmp_path / "run").exists()


def write_gguf(path: Path, architecture: str) -> None:
    """A file whose tokenizer can be read (bytes and chat tokens) and whose weights are absent."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(b) for b in kept] + [chr(256 + n) for n in range(256 - len(kept))]
    controls = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, "ab", *controls])
    writer.add_token_types([1] * (len(letters) + 1) + [3] * len(controls))
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_that_cannot_be_read_name_key_and_file(tmp_path: Path):
    other, here = tmp_path / "other.gguf", tmp_path / "run"
    write_gguf(other, "qwen3")
    cases = {
        other: "other.gguf: GGUF architecture 'qwen3', allowed: 'llama'",
        tmp_path / "none.gguf": "none.gguf",
        tmp_path: "neither a .gguf file nor a folder with tokenizer.json",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError, match=f"config key model.path: .*{re.escape(message)}"):
            train(with_path(path), here)
        assert not here.exists(), "a later try with the right path must not meet another config"
    fails(
        program("train", SMOKE, f"--config.model.path={other}", f"--workdir={here}"),
        2,
        "allowed: 'llama'",
    )


def test_a_truncated_gguf_names_key_and_file(tmp_path: Path):
    write_gguf(tmp_path / "m.gguf", "llama")
    truncate(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="config key model.path: .*m.gguf"):
        train(with_path(tmp_path / "m.gguf"), tmp_path / "run")


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_an_unreadable_tokenizer_names_key_and_file(tmp_path: Path, file: str):
    folder = tmp_path / "model"
    build_job(smoke()).tokenizer.save(folder)
    truncate(folder / file)
    with pytest.raises(ConfigError, match=f"config key model.path: .*{file}"):
        train(with_path(folder), tmp_path / "run")


# --- tools ---

KEY = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
NAMES = ("fine", "raises", "hangs", "floods", "bytes", "nothing", "surrogate")
TOOLS = tuple(
    ToolSpec(name, "", KEY, read_only=True, repeatable=True, time_limit_s=2.0) for name in NAMES
)
CALLS = tuple(ToolCall(name, {"key": "a"}) for name in (*NAMES, "unknown"))
WANTED = {
    "fine": "ok",
    "raises": "error: raises: RuntimeError: b",
    "hangs": "error: hangs: no result within its time limit of 2 s",
    "floods": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n[cut: the first 30 of 10000000 characters]",
    "bytes": "\ufffd\ufffdok",
    "nothing": "null",
    "surrogate": "\ufffd",
    "unknown": "error: unknown tool 'unknown'; the tools are: " + ", ".join(NAMES),
}


class Hostile:
    """A world whose tools misbehave, each in its way; its state never changes."""

    tools = TOOLS
    state_version = "v"

    def reset(self, task: Task) -> list[Message]:
        return [Message("user", "go")]

    async def step(self, call: ToolCall) -> object:
        match call.name:
            case "raises":
                raise RuntimeError("b")
            case "hangs":
                await asyncio.sleep(1e9)
            case "floods":
                return "x" * 10_000_000
            case "bytes":
                return b"\xff\xfeok"
            case "surrogate":
                return "\ud800"
            case "fine":
                return "ok"
        return None

    async def reply(self, content: str) -> None:
        return None

    def fork(self) -> World:
        raise NotImplementedError

    def score(self) -> Score:
        return Score(1.0, 1.0)


class OneByOne:
    """Makes the calls one a turn, whatever comes back, then answers."""

    def __init__(self) -> None:
        self.turn = -1

    def act(self, observations: object) -> AssistantAct:
        self.turn += 1
        if self.turn < len(CALLS):
            return AssistantAct(thinking="", content="", calls=(CALLS[self.turn],))
        return AssistantAct(thinking="", content="done", calls=())


class Predicts:
    """Predicts the call of each turn, so that each tool misbehaves ahead of time, too."""

    async def propose(self, seq: object, turn: int, seed: int) -> list[Candidate]:
        now_s = asyncio.get_running_loop().time()
        return [Candidate((5,), (-0.1,), CALLS[turn], (), now_s)] if turn < len(CALLS) else []


TASK = Task("t", "hostile", {})


def test_misbehaving_tools_are_observations_and_the_scripted_episode_goes_on():
    chat = build_job(smoke()).chat
    limits = EpisodeLimits(max_turns=20, max_turn_tokens=500, max_tokens=100_000)
    t = run_simulated(run_scripted(Hostile(), TASK, chat, OneByOne(), limits, 0))
    seen = {turn.calls[0].name: turn.observations[0] for turn in t.turns if turn.calls}
    flood = seen.pop("floods")
    assert flood.startswith("x" * 16_000 + "\n[cut: ") and len(flood) < 16_100
    assert seen == {name: text for name, text in WANTED.items() if name != "floods"}
    assert t.finish == "answered" and t.score.success == 1.0


def test_misbehaving_tools_in_an_episode_of_the_real_engine_with_and_without_speculation():
    """The turns that call are given; the rest is the engine's, which reads every observation."""
    settings = smoke()
    engine = dataclasses.replace(settings.engine, cache_tokens=1024, rows=4, speculator_rows=2)
    job = build_job(dataclasses.replace(settings, engine=engine))
    limits = EpisodeLimits(max_turns=len(CALLS) + 3, max_turn_tokens=64, max_tokens=900)
    sampling = dataclasses.replace(job.agent_sampling(1.0), max_tokens=8)
    real = job.engine(job.initial_params())
    given = [job.chat.turn_ids(job.chat.assistant_text("", "", [call])) for call in CALLS]

    class Given(RecordedEngine):
        """The real engine, but for the first turns."""

        def open(self, ids, seed=0, mode="agent"):
            seq = super().open(ids, seed, mode)
            sample, turns = seq.sample, iter(given)

            async def next_turn(params):
                ids = next(turns, None)
                if ids is not None:
                    known = Completion(tuple(ids), (-0.5,) * len(ids), "stop")
                    self._known[tuple(seq.ids), seq.seed, seq.mode, params] = known
                return await sample(params)

            seq.sample = next_turn
            return seq

    def play(speculator):
        world = Hostile()
        box = ToolBox(world, max_chars=30)
        return run_simulated(
            runtime.run_episode(
                Given(real), world, TASK, job.chat, sampling, limits, 7,
                toolbox=box, speculator=speculator,
            )
        )  # fmt: skip

    plain, speculated = play(None), play(Predicts())
    for t in (plain, speculated):
        seen = [turn.observations[0] for turn in t.turns[: len(CALLS)]]
        assert seen == [WANTED[call.name] for call in CALLS]
        assert len(t.turns) > len(CALLS), "the engine went on"
        assert sum(len(turn.calls) for turn in t.turns[len(CALLS) :]) == 0
    assert plain.ids == speculated.ids and plain.logps == speculated.logps
    hits = {t.calls[0].name for t in speculated.turns[: len(CALLS)] if t.hits[0]}
    assert hits == {"fine", "floods", "bytes", "nothing", "surrogate"}  # errors run once more


def test_the_errors_that_users_see_are_no_program_faults():
    assert set(entry.FILE_ERRORS) == {RunError, OSError}
    for error in (ConfigError, RunError, CheckpointError, DataError):
        assert issubclass(error, ValueError)
