"""Configs and command lines as people write them: what is wrong is named, by key or file and line.

The flags are parsed by absl and ml_collections themselves, as in the programs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from agentspec import entry
from agentspec.configuration import (
    ConfigError,
    default_config,
    flat_settings,
    settings_from,
)
from agentspec.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
TINY = f"{ROOT}/configs/tiny.py"


def parsed(*arguments: str, config: str = f"{TINY}:smoke") -> Settings:
    """What a program with --config and --workdir gets from a command line."""
    argv = ["program", *([f"--config={config}"] if config else []), *arguments]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", "w", "", flag_values=values)
    assert entry.parse(argv, ["config", "workdir"], values) == ["program"]
    return settings_from(values.config)


def written(tmp_path: Path, *lines: str) -> str:
    """A config file of its own: the defaults that train, then ``lines`` (the first is line 6)."""
    file = tmp_path / "mine.py"
    body = "".join(f"    {line}\n" for line in lines)
    file.write_text(
        "from agentspec.configuration import default_config\n"
        "def get_config(variant=''):\n"
        "    config = default_config()\n"
        "    for name in ('base', 'sft_light', 'sft', 'joint', 'sft_more'):\n"
        "        config[name].update(dict(steps=1, n_examples=1))\n"
        f"{body}    return config\n"
    )
    return str(file)


def broken(key: str, value: object) -> ConfigDict:
    """The defaults that train, with one key set as a plain dictionary would take it."""
    config = default_config()
    for name in ("base", "sft_light", "sft", "joint", "sft_more"):
        config[name].update(dict(steps=1, n_examples=1))
    tree = config.to_dict()
    *path, last = key.split(".")
    node = tree
    for part in path:
        node = node[part]
    node[last] = value
    return ConfigDict(tree)


def test_every_kind_of_value_is_set_by_the_command_line():
    s = parsed(
        "--config.joint.steps=7",
        "--config.joint.lr=1",
        "--config.model.scan",
        "--config.chat.style=smollm2",
        "--config.seed",
        "3",
        "--noconfig.loss.drop_uniform_groups",
    )
    assert (s.joint.steps, s.seed, s.chat.style) == (7, 3, "smollm2")
    assert s.joint.lr == 1.0 and type(s.joint.lr) is float
    assert s.model.scan is True and s.loss.drop_uniform_groups is False


@pytest.mark.parametrize("text", ['("lookup",)', '["lookup"]', "lookup", "('lookup')"])
def test_b97_tuples_may_be_written_in_any_form(text):
    assert parsed(f"--config.world.names={text}").world.names == ("lookup",)


@pytest.mark.parametrize("text", ["1,0", "(1,0)", "[1, 0]", "(1.0, 0.0)"])
def test_b97_tuples_of_numbers(text):
    found = parsed(f"--config.evaluate.temperatures={text}").evaluate.temperatures
    assert found == (1.0, 0.0) and {type(t) for t in found} == {float}


def test_b97_all_repeated_settings_are_tuples_and_b92_none_is_no_default():
    values = flat_settings(Settings()).values()
    assert {type(v) for v in values} == {str, int, float, bool, tuple}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("joint.setps=3", "config key joint.setps does not exist; did you mean joint.steps"),
        ("jiont.steps=3", "config key jiont.steps does not exist; did you mean joint.steps"),
        ("seeed=3", "config key seeed does not exist; did you mean seed"),
        ("joint.steps.x=3", "config key joint.steps.x does not exist"),
        ("joint={}", "config key joint is a section"),
        ("joint=3", "config key joint is a section"),
        ("joint.steps=1e3", "config key joint.steps must be int, got '1e3'"),  # B94
        ("joint.steps=10.0", "config key joint.steps must be int, got '10.0'"),  # B94
        ("joint.steps=None", "config key joint.steps must be int, got 'None'"),  # B92
        ("joint.steps=true", "config key joint.steps must be int, got 'true'"),  # B97
        ("joint.lr=None", "config key joint.lr must be float, got 'None'"),
        ("joint.lr=nan", "config key joint.lr must be a finite number, got nan"),
        ("joint.lr=inf", "config key joint.lr must be a finite number, got inf"),
        ("model.scan=maybe", "config key model.scan must be bool, got 'maybe'"),
        ("model.path=None", "config key model.path is the text 'None'; leave it empty"),
        ("chat.style=hermess", "config key chat.style must be one of ('hermes', 'smollm2')"),
        ("joint.kind=RL", "config key joint.kind must be one of"),
        ("world.names=lookpu", "must be among ('lookup', 'storefront', 'hotpot'), got 'lookpu'; "
         "did you mean 'lookup'?"),
        ("world.names=()", "config key world.names is empty"),
        ('world.names=("lookup","lookup")', "config key world.names names one twice"),
        ("world.names=(", "config key world.names"),
        ("evaluate.temperatures=hot", "config key evaluate.temperatures[0] must be float"),
        ("world.names=(1,2)", "config key world.names[0] must be str, got 1"),
        ("world.names=hotpot", "config key world.corpus is empty; hotpot reads it"),
        ('stages=("sft","base")', "config key sft.start names 'base', which is not a stage before"),
        ('stages=("base","sft","joint","joint")', "config key stages names one twice"),
        ('stages=("base","stf")', "got 'stf'; did you mean 'sft'?"),
        ("sft_more.match_tokens_of=later", "config key sft_more.match_tokens_of names 'later'"),
        ("sft.start=sft", "config key sft.start names 'sft'"),
        ('evaluate.crossing=("jiont",)', "config key evaluate.crossing must be among"),
        ("evaluate.temperatures=()", "config key evaluate.temperatures must be one or more"),
        ("evaluate.temperatures=(1,1)", "config key evaluate.temperatures must be one or more"),
        ("evaluate.temperatures=(1,-1)", "config key evaluate.temperatures must be one or more"),
        ("evaluate.tasks_per_world=0", "config key evaluate.tasks_per_world must be above 0, got"),
        ("agent.temperature=0", "config key agent.temperature must be above 0, got 0.0"),
        ("agent.group_size=-8", "config key agent.group_size must be above 0, got -8"),
        ("speculator.turns_per_episode=0", "config key speculator.turns_per_episode must be above"),
        ("loss.kl=-1", "config key loss.kl must be at least 0, got -1.0"),
        ("joint.lr=-1", "config key joint.lr must be at least 0, got -1.0"),
        ("joint.steps=0", "config key joint.steps must be above 0"),
        ("sft.n_examples=0", "config key sft.n_examples must be above 0"),
        ("sft.eval_every=0", "config key sft.patience needs sft.eval_every above 0"),
        ("optim.b2=1", "optim.b2 must be below 1"),
        ("model.n_kv_heads=3", "is no multiple of model.n_kv_heads=3"),
        ("model.head_dim=15", "config key model.head_dim=15 must be even"),
        ("engine.speculator_rows=1", "config key engine.speculator_rows must be at least 2"),
        ("engine.cache_tokens=30", "config key engine.cache_tokens=30 is below episode.max_tok"),
        ("pack.row_tokens=30", "config key pack.row_tokens=30 is below episode.max_tokens="),
    ],
)  # fmt: skip
def test_b94_wrong_overrides_name_the_key(argument: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parsed(f"--config.{argument}")


def test_schedule_of_no_steps():
    with pytest.raises(ConfigError, match="agent_steps and schedule.speculator_steps are both 0"):
        parsed("--config.schedule.agent_steps=0", "--config.schedule.speculator_steps=0")


def test_one_kind_of_block_is_a_schedule():
    assert parsed("--config.schedule.agent_steps=0").schedule.agent_steps == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("config.joint.setps = 3", "config key joint.setps does not exist; did you mean joint.st"),
        ("config.update(dict(jiont=1))", "config key jiont does not exist; did you mean joint?"),
        ("config.chat.stylle = 'hermes'", "config key chat.stylle does not exist; did you mean"),
        ("config.joint.steps = 10.0", "FILE:6: TypeError: Could not override field 'steps'"),
        ("config.joint.steps = '3'", "FILE:6: TypeError: Could not override field 'steps'"),
        ("config.joint.steps = True", "config key joint.steps must be int, got True"),  # B97
        ("config.joint.steps = None", "config key joint.steps must be int, got None"),
        ("config.model.path = None", "config key model.path must be str, got None"),
        ("config.model.path = 'None'", "config key model.path is the text 'None'"),
        ("config.joint = None", "config key joint is a section of keys, got None"),
        ("config.chat = config.model", "config key chat.attention does not exist"),
        ("1 / 0", "FILE:6: ZeroDivisionError: division by zero"),
        ("raise ValueError('no variant')", "FILE:6: ValueError: no variant"),
        ("open('/no/such/data')", "FILE:6: FileNotFoundError"),
        ("import no_such_module", "FILE:6: ModuleNotFoundError: No module named 'no_such_module'"),
        ("return", "FILE: get_config must return a ConfigDict"),
        ("return 7", "FILE: get_config must return a ConfigDict"),
        ("(", "FILE:6: '(' was never closed"),
    ],
)
def test_wrong_config_files_name_key_or_line(tmp_path: Path, line: str, message: str):
    file = written(tmp_path, line)
    with pytest.raises(ConfigError) as caught:
        parsed(config=file)
    assert message.replace("FILE", file) in str(caught.value)
    with pytest.raises(ConfigError):  # the same with an override, which the library reads earlier
        parsed("--config.seed=1", config=file)


def test_b95_a_type_forgotten_after_none_is_found(tmp_path: Path):
    file = written(tmp_path, "config.joint.steps = None", "config.joint.steps = 'oops'")
    with pytest.raises(ConfigError, match="config key joint.steps must be int, got 'oops'"):
        parsed(config=file)


def test_b97_a_list_in_a_config_file_becomes_the_tuple(tmp_path: Path):
    file = written(tmp_path, "config.world.names = ['lookup']")
    assert parsed(config=file).world.names == ("lookup",)


def test_b94_an_integral_number_for_a_float_is_taken(tmp_path: Path):
    file = written(tmp_path, "config.joint.lr = 1", "config.evaluate.temperatures = (1, 0)")
    s = parsed(config=file)
    assert type(s.joint.lr) is float and s.evaluate.temperatures == (1.0, 0.0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("joint.steps", 10.0, "joint.steps must be int, got 10.0"),
        ("joint.steps", True, "joint.steps must be int, got True"),
        ("joint.lr", True, "joint.lr must be float, got True"),
        ("joint.lr", None, "joint.lr must be float, got None"),
        ("model.scan", 1, "model.scan must be bool, got 1"),
        ("world.names", ["lookup"], "world.names must be a tuple, got ['lookup']"),
        ("world.names", "lookup", "world.names must be a tuple, got 'lookup'"),
        ("evaluate.temperatures", (1.0, "0"), "evaluate.temperatures[1] must be float, got '0'"),
        ("evaluate.temperatures", (float("nan"),), "evaluate.temperatures[0] must be a finite"),
        ("chat.style", ["hermes"], "chat.style must be one of ('hermes', 'smollm2')"),
    ],
)
def test_types_are_checked_whatever_made_the_config(key: str, value: object, message: str):
    with pytest.raises(ConfigError, match=re.escape(f"config key {message}")):
        settings_from(broken(key, value))


def test_what_is_not_set_keeps_its_default():
    s = settings_from(ConfigDict(dict(stages=("base",), base=dict(steps=1, n_examples=1))))
    assert s.optim == Settings().optim and s.base.lr == Settings().base.lr


def test_missing_files_and_flags(tmp_path: Path):
    for arguments in ([], ["--config.seed=1"]):
        with pytest.raises(ConfigError, match=r"--config=none.py: there is no such file in /"):
            parsed(*arguments, config="none.py")
    with pytest.raises(ConfigError, match="there is no such file"):
        parsed(config=str(tmp_path))
    with pytest.raises(ConfigError, match=r"tiny.py:\d+: ValueError: .* has no variant 'smok'"):
        parsed(config=f"{TINY}:smok")
    with pytest.raises(app.UsageError, match="--config is missing"):
        parsed(config="")
    with pytest.raises(app.UsageError, match="--config.seed needs --config=FILE as well"):
        parsed("--config.seed=1", config="")
    with pytest.raises(app.UsageError, match="--workdir is missing"):
        values = flags.FlagValues()
        flags.DEFINE_string("workdir", None, "", flag_values=values)
        entry.parse(["program"], ["workdir"], values)
    with pytest.raises(flags.Error, match="Unknown command line flag 'wrkdir'. Did you mean: work"):
        parsed("--wrkdir=x")
