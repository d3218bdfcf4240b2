"""Checkpoints as Hugging Face folders: transformers loads them strictly and computes the same."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentspec.checkpoint import Checkpointer, CheckpointError, DamagedCheckpoint, open_params
from agentspec.configuration import ConfigError, flat_settings, settings_from
from agentspec.export import export
from agentspec.job import build_job
from agentspec.model import safetensors_files
from agentspec.model.weights import load_model
from agentspec.settings import Settings
from agentspec.state import TrainState
from agentspec.train import train
from agentspec.workdir import RunError
from configs.tiny import get_config

ROOT = Path(__file__).resolve().parents[2]
IDS = np.arange(14).reshape(2, 7)
SIZES = dict(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    eos_token_id=2,
    initializer_range=0.2,
)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
)
VISION = dict(
    depth=1,
    hidden_size=8,
    intermediate_size=8,
    num_heads=2,
    out_hidden_size=16,
    patch_size=2,
    num_position_embeddings=4,
)


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


def hf_model(transformers, kind, tied=False):
    """transformers' own, with random weights."""
    import torch

    torch.manual_seed(0)
    if kind == "qwen3":
        config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=tied)
        model = transformers.Qwen3ForCausalLM(config)
    elif kind == "qwen3_5":
        config = transformers.Qwen3_5TextConfig(**SIZES, **LINEAR, tie_word_embeddings=tied)
        model = transformers.Qwen3_5ForCausalLM(config)
    else:
        text = SIZES | LINEAR | {"tie_word_embeddings": tied}
        config = transformers.Qwen3_5Config(
            text_config=text, vision_config=VISION, tie_word_embeddings=tied
        )
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    return model.to(torch.float32).eval()


def write_run(run: Path, params, path="", step=5, stage="joint", **changes) -> str:
    """A run's folder with one checkpoint; returns what --checkpoint is given."""
    run.mkdir(parents=True, exist_ok=True)
    settings = flat_settings(Settings()) | {"model.path": str(path)} | changes
    (run / "config.json").write_text(json.dumps(settings))
    state = TrainState(params=params, opt_state=(), step=jnp.int32(step))
    with Checkpointer(run / "checkpoints" / stage) as checkpointer:
        checkpointer.save(step, state, {"step": step, "done": True})
    return str(run / "checkpoints" / stage)


def as_if_trained(params):
    """Other weights than those that the run began with."""
    return jax.tree.map(lambda x: (x * 1.25 - 0.01).astype(x.dtype), params)


def load_strictly(transformers, folder, name="AutoModelForCausalLM"):
    model, report = getattr(transformers, name).from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(report.values()), report
    return model.eval()


def hf_logits(model, ids):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(ids)).logits.float().numpy()


@pytest.mark.parametrize(
    ("kind", "scan", "tied"),
    [
        ("qwen3", True, True),
        ("qwen3_5", False, True),
        ("qwen3_5", True, False),
    ],
)
def test_transformers_computes_the_same(tmp_path, transformers, kind, scan, tied):
    source = tmp_path / "source"
    hf_model(transformers, kind, tied).save_pretrained(source)
    (source / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "notes.txt").write_text("not of the model")
    loaded = load_model(source, scan=scan)
    params = as_if_trained(loaded.params)
    checkpoint = write_run(tmp_path / "run", params, source)
    n_bytes = export(f"{checkpoint}:5", tmp_path / "out", max_shard_bytes=4000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert n_bytes == sum(a.nbytes for file in files for a in load_file(file).values())
    model = load_strictly(transformers, tmp_path / "out")
    ours = loaded.apply(params, IDS)
    np.testing.assert_allclose(hf_logits(model, IDS), ours, atol=1e-4)
    assert np.abs(ours - loaded.apply(loaded.params, IDS)).max() > 0.1  # not the source's weights
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "out" / "notes.txt").exists()
    assert not (tmp_path / "out.partial").exists()


def test_the_dtype_is_cast_and_told(tmp_path, transformers):
    source = tmp_path / "source"
    hf_model(transformers, "qwen3").save_pretrained(source)
    loaded = load_model(source)
    checkpoint = write_run(tmp_path / "run", loaded.params, source)
    export(checkpoint, tmp_path / "out", "bfloat16")
    model = load_strictly(transformers, tmp_path / "out")
    assert str(model.dtype) == "torch.bfloat16"
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, array in load_file(source / "model.safetensors").items():
        assert found[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(found[name], array.astype(jnp.bfloat16), err_msg=name)


@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_multimodal_model_stays_whole(tmp_path, transformers):
    source = tmp_path / "source"
    hf_model(transformers, "multimodal").save_pretrained(source)
    loaded = load_model(source)
    params = as_if_trained(loaded.params)
    export(write_run(tmp_path / "run", params, source), tmp_path / "out")
    model = load_strictly(transformers, tmp_path / "out", "AutoModelForImageTextToText")
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    np.testing.assert_allclose(hf_logits(model, IDS), loaded.apply(params, IDS), atol=1e-4)
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert not any("visual" in name for name in changed) and len(changed) > 20


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """A run of the embedded default, trained for a few steps, and its job."""
    config = get_config("smoke")
    config.stages = ("base",)
    settings = settings_from(config)
    run = tmp_path_factory.mktemp("run")
    train(settings, run)
    return run, build_job(settings)


def test_a_trained_run_with_its_own_tokenizer(tmp_path, transformers, small_run):
    run, job = small_run
    command = [sys.executable, "-m", "agentspec.export", f"--out={tmp_path / 'out'}"]
    command += [f"--checkpoint={run / 'checkpoints' / 'base'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "[export] tensors" in done.stderr and "GB of weights" in done.stderr
    model = load_strictly(transformers, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    world = next(iter(job.worlds.values()))
    text = "".join(world.pieces()[:40]) + '{"name": "'
    ids = job.tokenizer.encode(text)
    assert tokenizer.encode(text) == ids and len(ids) > 20
    saved = open_params(run / "checkpoints" / "base")
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: np.concatenate(list(saved.blocks(".".join(key.key for key in path)))),
        job.model.shapes,
    )
    row = np.asarray([ids])
    np.testing.assert_allclose(hf_logits(model, row), job.model.apply(params, row), atol=1e-4)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == list(job.tokenizer.eos_ids)


def test_a_gguf_brings_its_tokenizer_and_chat_template(tmp_path, transformers):
    gguf = pytest.importorskip("gguf")
    letters = [chr(i) for i in range(33, 127)]  # as byte-level BPE writes bytes
    letters += [chr(i) for i in range(0xA1, 0xAD)] + [chr(i) for i in range(0xAE, 0x100)]
    letters += [chr(256 + i) for i in range(256 - len(letters))]
    tokens = [*letters, "he", "<|im_end|>"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    sizes = dict(block_count=1, embedding_length=8, feed_forward_length=12, context_length=64)
    for key, value in sizes.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(257)
    writer.add_chat_template("{{ messages[0].content }}<|im_end|>")
    shapes = {"token_embd": (258, 8), "output_norm": (8,), "blk.0.attn_norm": (8,)}
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (12, 8), "blk.0.ffn_up": (12, 8), "blk.0.ffn_down": (8, 12)}
    shapes |= {"blk.0.ffn_norm": (8,)}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load_model(tmp_path / "m.gguf")
    export(write_run(tmp_path / "run", loaded.params, tmp_path / "m.gguf"), tmp_path / "out")
    model = load_strictly(transformers, tmp_path / "out")
    np.testing.assert_allclose(hf_logits(model, IDS), loaded.apply(loaded.params, IDS), atol=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "hehi"}]
    ids = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    assert ids == [256, letters.index("h"), letters.index("i"), 257]
    assert tokenizer.eos_token_id == 257 == model.config.eos_token_id


# What is refused --------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a run that began with a folder made by us."""
    from agentspec.model.config import ModelConfig
    from agentspec.model.transformer import LanguageModel
    from agentspec.model.weights import make_loaded, save_hf

    config = ModelConfig(
        vocab_size=20,
        d_model=8,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=6,
        d_ff=12,
        rope_theta=1e4,
    )
    model = LanguageModel(config)
    loaded = make_loaded(model, model.init(jax.random.key(0)))
    save_hf(loaded, tmp_path / "source")
    return write_run(tmp_path / "run", loaded.params, tmp_path / "source")


def test_a_folder_in_use_is_refused(tmp_path, checkpoint):
    (tmp_path / "out").mkdir()
    export(checkpoint, tmp_path / "out")  # an empty folder is fine
    with pytest.raises(RunError, match="out is there already and not empty"):
        export(checkpoint, tmp_path / "out")


def test_what_an_export_that_was_killed_left_is_replaced(tmp_path, checkpoint):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "model.safetensors.partial").write_bytes(b"x")
    with pytest.raises(RunError, match="out.partial is in the way, and no export left it"):
        export(checkpoint, tmp_path / "out")
    (tmp_path / "out.partial" / ".export").touch()
    export(checkpoint, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_refused(tmp_path, checkpoint, there):
    target = tmp_path / "target"
    if there:
        target.mkdir()
    (tmp_path / "out").symlink_to(target)
    with pytest.raises(RunError, match="--out=.*/out is a link; name the folder itself"):
        export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out").is_symlink() and target.exists() == there
    assert not (tmp_path / "out.partial").exists()


def test_the_checkpoint_must_be_of_the_settings_model(tmp_path, checkpoint):
    file = tmp_path / "source" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"not of the model in .*run/config.json: 11 arrays"):
        export(checkpoint, tmp_path / "out")
    file.write_text(json.dumps(config | {"intermediate_size": 14}))
    text = r"layers.0.mlp.down is \(8, 12\), expected \(8, 14\)"
    with pytest.raises(CheckpointError, match=text):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_not_there_is_named(tmp_path, checkpoint):
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 6 in .*; steps there: \[5\]"):
        export(f"{checkpoint}:6", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no checkpoint in .*checkpoints/other"):
        export(str(run / "checkpoints" / "other"), tmp_path / "out")
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="config key model.path: .*source, which is not there"):
        export(checkpoint, tmp_path / "out")
    (run / "config.json").unlink()
    with pytest.raises(RunError, match="run/config.json is not there"):
        export(checkpoint, tmp_path / "out")


def test_a_damaged_checkpoint_is_named(tmp_path, checkpoint):
    data = max(Path(checkpoint).rglob("params/**/d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 255
    data.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=f"{data.name} is damaged"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["files", "paths", "arrays"])
def test_a_manifest_without_a_key_is_named(tmp_path, checkpoint, key):
    file = Path(checkpoint) / "00000005" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest[key]
    file.write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match=f"manifest.json is damaged: KeyError.*{key}"):
        export(checkpoint, tmp_path / "out")


def test_a_checkpoint_that_vanishes_before_it_is_read(tmp_path, checkpoint, monkeypatch):
    def write_folder(*args):
        shutil.rmtree(Path(checkpoint) / "00000005")
        safetensors_files.write_folder(*args)

    monkeypatch.setattr("agentspec.export.write_folder", write_folder)
    with pytest.raises(DamagedCheckpoint, match="/00000005 vanished while it was being read"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_vanishes_while_it_is_checked(tmp_path, checkpoint, monkeypatch):
    def crc(file):
        shutil.rmtree(Path(checkpoint) / "00000005")
        return zlib.crc32(file.read_bytes())

    monkeypatch.setattr("agentspec.checkpoint._crc", crc)
    with pytest.raises(DamagedCheckpoint, match="/00000005 vanished while it was being read"):
        export(checkpoint, tmp_path / "out")


# Single arrays of a checkpoint ------------------------------------------------------------------


def test_one_layer_of_a_large_stack_is_stored_apart(tmp_path):
    stack = jax.random.normal(jax.random.key(0), (5, 1000, 2048)).astype(jnp.float32)
    checkpoint = write_run(tmp_path / "run", {"layers": {"0": {"up": stack}}})
    saved = open_params(checkpoint)
    assert saved.arrays["layers.0.up"] == jax.ShapeDtypeStruct((5, 1000, 2048), "float32")
    blocks = list(saved.blocks("layers.0.up", 3))
    np.testing.assert_array_equal(np.concatenate(blocks), stack[3])
    assert [len(block) for block in saved.blocks("layers.0.up")] == [2, 2, 1]
    import tensorstore

    folder = saved.path / "state" / "params"
    spec = {"driver": "ocdbt", "base": f"file://{folder}/"}
    names = tensorstore.KvStore.open(spec).result().list().result()
    assert sum(b"up/" in name and b".zarray" not in name for name in names) == 5


@pytest.mark.parametrize("lost", ["manifest.ocdbt", "d/*", "*"])
def test_what_vanishes_midway_is_not_read_as_zeros(tmp_path, lost):
    stack = jnp.ones((5, 1000, 2048), jnp.float32)
    saved = open_params(write_run(tmp_path / "run", {"up": stack}))
    blocks = saved.blocks("up")
    np.testing.assert_array_equal(next(blocks), stack[:2])
    for path in (Path(saved.path) / "state" / "params").rglob(lost):
        if path.is_file():
            path.unlink()
    with pytest.raises(DamagedCheckpoint, match="/00000005 vanished while it was being read"):
        list(blocks)
