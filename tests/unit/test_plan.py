"""Plans: chip table, loop-true costs, the search, and a small job compiled for a TPU slice."""

from __future__ import annotations

import dataclasses
import functools
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from agentspec import costs, plan
from agentspec.chips import CHIPS, GIB, Slice, slice_named
from agentspec.configuration import ConfigError, settings_from
from agentspec.costs import Cost, Kernel
from agentspec.losses.sft import token_logps
from agentspec.losses.vocabulary import cut_head, logps_by_vocabulary, n_parts
from agentspec.model.config import ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.plan_programs import Measured, Setting, _needs_bytes, slice_devices
from agentspec.plan_report import Phase, Report, candidates, described, nearest, text
from agentspec.plan_sampling import grown
from configs.tiny import get_config

ROOT = Path(__file__).resolve().parents[2]
SMALL = ModelConfig(
    vocab_size=512,
    d_model=256,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=128,
    d_ff=512,
    rope_theta=1e4,
    dtype="bfloat16",
    param_dtype="float32",
    remat="full",
)


# -- chips ----------------------------------------------------------------------------------------


def test_slices() -> None:
    wanted = slice_named("v5e:8x8")
    assert (wanted.n_chips, wanted.host_chips, wanted.host().name) == (64, 4, "v5e:2x2")
    assert [s.name for s in wanted.larger()] == ["v5e:8x16", "v5e:16x16"]
    assert slice_named("v5p:2x2x4").n_chips == 16
    assert slice_named("v6e:1x1").host_chips == 1


@pytest.mark.parametrize("name", ["v5e", "v5e:3x3", "v9:2x2", "", "v5p:2x2"])
def test_unknown_slices_are_named(name: str) -> None:
    with pytest.raises(ValueError, match="known: "):
        slice_named(name)


def test_chip_figures_are_consistent() -> None:
    for chip in CHIPS.values():
        assert chip.page.startswith("https://cloud.google.com/tpu/docs/")
        assert 0.9 < chip.usable_bytes / chip.hbm_bytes < 1.01
        sizes = [slice_named(f"{chip.name}:{shape}").n_chips for shape in chip.slices]
        assert sizes == sorted(sizes)


def test_libtpu_knows_every_slice_listed() -> None:
    pytest.importorskip("libtpu")
    for chip in CHIPS.values():
        for shape in chip.slices:
            wanted = Slice(chip, shape)
            assert len(slice_devices(wanted)) == wanted.n_chips, wanted.name


def test_a_slice_that_libtpu_does_not_know_is_a_fault_of_the_command_line() -> None:
    pytest.importorskip("libtpu")
    with pytest.raises(ConfigError, match="libtpu knows no slice v5e:3x3: "):  # exit code 2
        slice_devices(Slice(CHIPS["v5e"], "3x3"))


# -- costs ----------------------------------------------------------------------------------------


def compiled_loss(config: ModelConfig, chunk_tokens: int, rows: int = 2, n: int = 256) -> Any:
    """Gradients of the small model on one CPU device, compiled."""
    model = LanguageModel(config)

    def loss(params: Any, ids_BT: jax.Array) -> jax.Array:
        hidden = model.hidden(params, ids_BT)
        mask_BT = jnp.ones_like(ids_BT)
        if not chunk_tokens:
            whole = functools.partial(model.unembed, params)
            return token_logps(whole, hidden, ids_BT, mask_BT)[0].sum()
        parts = cut_head(model.head(params), n_parts(n, chunk_tokens))
        logp_BT, _ = logps_by_vocabulary(
            model.unembed_part, parts, config.vocab_size, hidden, ids_BT, mask_BT
        )
        return logp_BT.sum()

    ids = jax.ShapeDtypeStruct((rows, n), jnp.int32)
    return jax.jit(jax.value_and_grad(loss)).lower(model.shapes, ids).compile()


def test_loops_count_as_often_as_they_run() -> None:
    # Layers under a scan and a head in parts against everything written out.
    config = dataclasses.replace(SMALL, dtype="float32", attention="xla")
    loops = costs.program_cost(compiled_loss(dataclasses.replace(config, scan=True), 64))
    plain = costs.program_cost(compiled_loss(config, 0))
    assert loops.counted_once == ()
    # The head in parts is computed twice, like all that is under jax.checkpoint; the other is not.
    head = 2 * 512 * 256 * 2 * 256
    assert loops.flops == pytest.approx(plain.flops + head, rel=0.01)
    once = compiled_loss(dataclasses.replace(config, scan=True), 64).cost_analysis()["flops"]
    assert once < 0.6 * loops.flops  # what XLA says by itself


def test_costs_against_arithmetic() -> None:
    # 6 FLOPs a weight and token; attention's 2 forward and 4 backward products for 4 layers, 2 rows
    # and 4 heads, over all 128 x 128 pairs of a tile. Norms, positions and softmax: within 2 %.
    config = dataclasses.replace(SMALL, dtype="float32", attention="xla", remat="none")
    cost = costs.program_cost(compiled_loss(config, 0, n=128))
    weights = 4 * (256 * 128 * (4 + 2 + 2 + 4) + 3 * 256 * 512) + 512 * 256
    attention = 6 * 4 * 2 * 4 * 2 * 128 * 128 * 128
    assert cost.flops == pytest.approx(6 * weights * 2 * 128 + attention, rel=0.02)


def test_kernel_flops_by_hand() -> None:
    # 4 heads, 256 tokens, head size 128, causal: 256 * 257 / 2 = 32896 pairs, two products of
    # 2 * 128 FLOPs each: 4 * 32896 * 2 * 256 = 67,371,008.
    q, k = ("bf16", (4, 256, 128)), ("bf16", (2, 256, 128))
    forward = Kernel("splash_mha_fwd_residuals.1", (("s32", (1, 2, 2)), q, k, k), (q,), 1)
    assert costs.kernel_flops(forward) == 67_371_008
    assert costs.kernel_bytes(forward) == 16 + 2 * (2 * 4 + 2 * 2) * 256 * 128
    backward = dataclasses.replace(forward, name="splash_mha_dkv_no_residuals")
    assert costs.kernel_flops(backward) == 2 * 67_371_008
    assert costs.kernel_flops(dataclasses.replace(forward, name="sorting")) is None


# -- report and search ----------------------------------------------------------------------------


FIRST = Setting(slice_named("v5e:4x4"), (1, 16, 1), 8, "none", 0, (4, 8))


def test_candidates_change_least_first() -> None:
    found = list(candidates(FIRST, tensor_limit=2))
    assert [described(s, FIRST) for s in found[:5]] == [
        "--config.model.remat=dots",
        "--config.model.remat=full",
        "--config.loss.logits_chunk_tokens=1024",
        "--config.pack.rows_per_batch=4",  # 4 hosts, 16 ways: a row for each
        "--config.engine.rows=2 --config.engine.speculator_rows=4",
    ]
    assert found[5].remat == "full" and found[5].rows == 4 and found[5].chunk_tokens == 1024
    assert {s.mesh[2] for s in found} == {1, 2}  # two key heads divide over no more
    assert found[-1].slice.name == "v5e:8x8"
    assert len(set(found)) == len(found) and FIRST not in found
    for setting in found:
        assert math.prod(setting.mesh) == setting.slice.n_chips
        assert setting.global_rows % math.prod(setting.mesh[:2]) == 0


def test_nearest_takes_the_first_that_fits_and_passes_over_the_hopeless() -> None:
    asked: list[Setting] = []

    def fits(setting: Setting) -> bool:
        asked.append(setting)
        return setting.slice.n_chips == 32

    def state_bytes(setting: Setting) -> int | None:
        return None if setting.mesh[2] == 2 else 17 * GIB * 16 // setting.slice.n_chips

    found, tried = nearest(candidates(FIRST, 2), fits, state_bytes, most=10)
    assert found is not None and found.slice.name == "v5e:4x8" and found.mesh == (1, 32, 1)
    assert tried == len(asked) == 1  # 17 GiB a chip on 4x4: not even tried
    assert nearest(candidates(FIRST, 2), lambda _: False, lambda _: 0, most=3) == (None, 3)


@pytest.mark.parametrize(
    ("first", "bytes_needed", "most", "words"),
    [
        (FIRST, 0, 0, "Nothing else was tried: --most_tries is 0."),
        (FIRST, 0, 3, "None of the 3 other settings tried fits; --most_tries may allow more."),
        (FIRST, 99 * GIB, 3, "There is no other setting to try that could fit."),
        # Nothing is left to change but the halves of two cache rows of an agent.
        (
            Setting(slice_named("v5e:16x16"), (1, 256, 1), 4, "full", 1024, (2, 2)),
            0,
            9,
            "None of the 1 other settings tried fits; there are no more to try.",
        ),
    ],
)
def test_what_is_said_where_nothing_fits(
    first: Setting, bytes_needed: int, most: int, words: str
) -> None:
    planner: Any = SimpleNamespace(
        config=dataclasses.replace(SMALL, n_kv_heads=1),
        report=lambda setting: SimpleNamespace(fits=False),
        state_bytes=lambda setting: bytes_needed,
    )
    assert plan.suggest(planner, first, most) == words


def test_grown_lies_on_the_line() -> None:
    two = Measured("decode", 20, 10, 10, 7, Cost(200.0, 50.0), 1.0)
    three = Measured("decode", 28, 14, 14, 7, Cost(290.0, 70.0), 1.0)
    ten = grown(two, three, 10)
    assert (ten.argument_bytes, ten.output_bytes, ten.temporary_bytes) == (84, 42, 7)
    assert ten.cost == Cost(200 + 8 * 90, 50 + 8 * 20)
    assert ten.total_bytes == 84 + 7


def test_report_sums_and_says_what_does_not_fit() -> None:
    program = Measured("agent update, micro-batch", 6 * GIB, 2 * GIB, 0, 5 * GIB, Cost(1e12, 1e9))
    phase = Phase(program, {"moments": 2 * GIB, "cache": GIB})
    report = Report("title", FIRST, {"cache": GIB}, (phase,), (), GIB // 4, 4)
    assert phase.peak_bytes == 16 * GIB and not report.fits
    assert report.sequences == (15.75 - 15) * 4
    assert "DOES NOT FIT" in text(report)
    smaller = dataclasses.replace(phase, beside={"moments": 2 * GIB})
    assert dataclasses.replace(report, phases=(smaller,)).fits


# -- compiled for a slice -------------------------------------------------------------------------


def small_job(**model: Any) -> Any:
    config = get_config("smoke")
    config.model.update(dict(d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=128))
    config.model.update(dict(d_ff=512, dtype="bfloat16", param_dtype="float32", remat="full"))
    config.model.update(dict(scan=True) | model)
    config.pack.rows_per_batch = 4
    config.loss.logits_chunk_tokens = 128
    return config


@pytest.mark.slow
def test_a_small_job_on_four_chips() -> None:
    pytest.importorskip("libtpu")
    settings = settings_from(small_job())
    planner = plan.Planner(settings, plan.model_config(settings))
    report = planner.report(plan.first_setting(settings, slice_named("v5e:2x2")))
    shapes = LanguageModel(planner.config).shapes
    leaves = jax.tree.leaves(shapes)
    norms = sum(leaf.size for leaf in leaves if leaf.size in (256, 2 * 256, 2 * 128))
    cut = sum(leaf.size for leaf in leaves) - norms
    assert report.parts["weights (float32)"] == 4 * (cut // 4 + norms)  # norms are on every chip
    assert report.parts["optimizer state"] == 2 * 4 * (cut // 4 + norms) + 8
    assert report.fits
    names = [phase.program.name for phase in report.phases]
    assert names == [
        "agent update, micro-batch",
        "speculator update, micro-batch",
        "optimizer step",
        "prefill",
        "decode, agent",
        "decode, speculator",
    ]
    # Forward, forward again and backward on one row of 512 tokens a chip; attention's two forward
    # and 7 backward products, causal.
    weights = 2 * (256 * 128 * (4 + 2 + 2 + 4) + 3 * 256 * 512) + shapes["embedding"].size
    attention = 2 * (2 + 2 + 7) * 4 * 512 * 513 / 2 * 2 * 128
    agent = report.work[0].cost
    assert agent.flops == pytest.approx(8 * weights * 512 + attention, rel=0.05)
    assert agent.unknown_kernels == () and agent.counted_once == ()
    assert "DOES NOT FIT" not in text(report)


@pytest.mark.slow
def test_the_command_ends_with_code_1_where_it_does_not_fit() -> None:
    pytest.importorskip("libtpu")
    # 3 x 256 x 2^23 weights: 6.4 billion, with moments 77 GB on 4 chips of 16 GiB.
    sizes = dict(d_model=256, n_layers=1, n_heads=4, n_kv_heads=4, head_dim=128, d_ff=2**23)
    sizes |= dict(dtype="bfloat16", param_dtype="float32", remat="full", scan=True)
    overrides = [f"--config.model.{key}={value}" for key, value in sizes.items()]
    overrides += ["--config.pack.rows_per_batch=4", "--config.loss.logits_chunk_tokens=128"]
    command = [sys.executable, "-m", "agentspec.plan", "--config=configs/tiny.py:smoke"]
    command += ["--topology=v5e:2x2", "--most_tries=0", "--only=train", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr
    assert "DOES NOT FIT" in done.stdout and "It does not fit." in done.stdout
    assert "optimizer step" in done.stdout and "prefill" not in done.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"model_type": "qwen3"}', "missing vocab_size"),
    ],
)
def test_a_damaged_config_json_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    settings = settings_from(small_job(path=str(tmp_path)))
    pattern = rf"^config key model.path: {tmp_path}/config.json:? .*{words}"
    with pytest.raises(ConfigError, match=pattern):  # exit code 2
        plan.model_config(settings)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--topology=v5e:3x3"], 2, "no v5e slice of shape '3x3'; known: 1x1, 2x2"),
        ([], 2, "--topology is missing"),
    ],
)
def test_wrong_commands_are_refused(arguments: list[str], code: int, words: str) -> None:
    command = [sys.executable, "-m", "agentspec.plan", "--config=configs/tiny.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr


@pytest.mark.parametrize(
    ("message", "n_bytes"),
    [
        ("RESOURCE_EXHAUSTED: Used 20.5G of 15.75G hbm", int(20.5 * 2**30)),
        ("RESOURCE_EXHAUSTED: of HLO (1.06T) exceeds available HBM (15.75G)", int(1.06 * 2**40)),
        ("INTERNAL: Used 20.5G of 15.75G hbm", None),
    ],
)
def test_what_a_program_needs_is_read_from_the_compilers_refusal(message, n_bytes):
    assert _needs_bytes(message) == n_bytes
