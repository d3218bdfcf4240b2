"""Configs and weight files: what is read, what is refused by name, damaged files."""

from __future__ import annotations

import dataclasses
import json

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentspec.mesh import make_mesh
from agentspec.model.config import LinearShape, Llama3Rope, ModelConfig
from agentspec.model.hf_config import config_from_hf, config_to_hf
from agentspec.model.transformer import LanguageModel
from agentspec.model.weights import load_model, make_loaded, save_hf

QWEN3 = ModelConfig(
    vocab_size=20,
    d_model=8,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=6,
    d_ff=12,
    rope_theta=1e6,
    eos_ids=(3, 4),
    bos_id=1,
)
LLAMA = dataclasses.replace(QWEN3, family="llama", n_kv_heads=2, tie_embeddings=False)
# the published config.json of Qwen3-0.6B, 4.x form, as it stands on the hub
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def make_model(config: ModelConfig = QWEN3, seed: int = 0):
    model = LanguageModel(config)
    return make_loaded(model, model.init(jax.random.key(seed)))


@pytest.fixture
def saved(tmp_path):
    save_hf(make_model(), tmp_path / "m")
    return tmp_path / "m"


# Configs ----------------------------------------------------------------------------------------


def test_b53_qwen3_06b_shapes():
    config = config_from_hf(QWEN3_06B)
    assert (config.head_dim, config.qk_norm, config.dtype) == (128, True, "bfloat16")
    shapes = LanguageModel(config).shapes["layers"]["0"]["attention"]
    assert shapes["q"].shape == (16, 128, 1024)  # q_proj (2048, 1024), not (1024, 1024)
    assert shapes["k"].shape == (8, 128, 1024)
    assert shapes["q_norm"]["weight"].shape == shapes["k_norm"]["weight"].shape == (128,)
    four_b = QWEN3_06B | {"hidden_size": 2560, "num_attention_heads": 32}
    assert LanguageModel(config_from_hf(four_b)).shapes["layers"]["0"]["attention"]["q"].shape == (
        32,
        128,
        2560,
    )


def test_b57_rope_theta_is_read_in_both_forms_and_never_guessed():
    assert config_from_hf(QWEN3_06B).rope_theta == 1e6
    bare = {key: value for key, value in QWEN3_06B.items() if key != "rope_theta"}
    new = bare | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert config_from_hf(new).rope_theta == 5e5
    for broken in (bare, bare | {"rope_parameters": {"rope_type": "default"}}):
        with pytest.raises(ValueError, match="x.json: rope_theta is missing"):
            config_from_hf(broken, "x.json")


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
def test_b56_llama3_scaling_is_read(type_key):
    scaling = {
        type_key: "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf = config_to_hf(LLAMA) | {"rope_parameters": None, "rope_scaling": scaling}
    config = config_from_hf(hf)
    assert config.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    assert config_from_hf(config_to_hf(config)) == config
    with pytest.raises(ValueError, match=r"'llama3' lacks \['factor'\]"):
        config_from_hf(hf | {"rope_scaling": scaling | {"factor": None}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported, allowed: llama, qwen3"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, allowed: 'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "unknown features.*quantization_config"),
        ({"logit_scale": 0.5}, "unknown features.*logit_scale=0.5"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"hidden_size": None, "vocab_size": None}, "missing vocab_size, hidden_size"),
        ({"head_dim": None}, "missing head_dim"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_key_value_heads": 3}, "n_heads=16 is not a multiple of model.n_kv_heads=3"),
    ],
)
def test_unsupported_features_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(QWEN3_06B | change)


def test_a_window_that_is_set_but_not_used_is_fine():
    hf = QWEN3_06B | {"sliding_window": 4096, "use_sliding_window": False}
    assert config_from_hf(hf) == config_from_hf(QWEN3_06B)


@pytest.mark.parametrize("config", [QWEN3, LLAMA, dataclasses.replace(QWEN3, eos_ids=())])
def test_config_round_trip(config):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


# Hugging Face folders ---------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [10**9, 900])
@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_save_and_load_is_bit_equal(tmp_path, config, max_shard_bytes):
    loaded = make_model(config)
    save_hf(loaded, tmp_path, max_shard_bytes)
    again = load_model(tmp_path)
    assert again.config == config
    assert jax.tree.structure(again.params) == jax.tree.structure(loaded.params)
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_b62_index_names_what_is_in_the_files_and_loading_checks_it(tmp_path):
    save_hf(make_model(), tmp_path, max_shard_bytes=900)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found, total = {}, 0
    for file in sorted(tmp_path.glob("*.safetensors")):
        for name, array in load_file(file).items():
            found[name] = file.name
            total += array.nbytes
    assert len(set(found.values())) > 2
    assert index == {"metadata": {"total_size": total}, "weight_map": found}
    # drop one tensor from its shard, leave the index as it is
    victim = "model.layers.1.mlp.up_proj.weight"
    shard = tmp_path / found[victim]
    kept = {name: array for name, array in load_file(shard).items() if name != victim}
    save_file(kept, shard)
    with pytest.raises(ValueError, match=f"lists tensors that no file holds: {victim}"):
        load_model(tmp_path)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"names absent files: {shard.name}"):
        load_model(tmp_path)


def test_b54_untied_without_head_names_the_key(tmp_path):
    save_hf(make_model(LLAMA), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is false and lm_head.weight is missing"):
        load_model(tmp_path)


def test_missing_unexpected_and_misshapen_tensors_are_one_error(saved):
    file = saved / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.q_norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(12, np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((8, 12), np.float32)
    save_file(tensors, file)
    with pytest.raises(ValueError) as caught:
        load_model(saved)
    text = str(caught.value)
    assert "missing: model.layers.0.self_attn.q_norm.weight, model.norm.weight;" in text
    assert "unexpected: model.layers.0.self_attn.q_proj.bias;" in text
    assert "up_proj.weight has shape (8, 12), config says (12, 8)" in text


@pytest.mark.parametrize("keep", [0, 5, 300, -4])
def test_a_truncated_safetensors_file_is_named(saved, keep):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors is truncated or not a safetensors"):
        load_model(saved)


def test_what_is_not_there_is_named(saved, tmp_path):
    with pytest.raises(FileNotFoundError, match="no model at .*nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="expected a Hugging Face folder or a .gguf file"):
        load_model(saved / "config.json")
    with pytest.raises(ValueError, match="dtype='float16', allowed: float32, bfloat16"):
        load_model(saved, dtype="float16")
    with pytest.raises(FileExistsError, match="already holds model.safetensors"):
        save_hf(make_model(), saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        load_model(saved)
    (saved / "model.safetensors").unlink()
    edit = config_to_hf(QWEN3)
    (saved / "config.json").write_text(json.dumps(edit))
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_model(saved)


def test_dtype_and_mesh_arguments(saved):
    half = load_model(saved, dtype="bfloat16")
    assert half.config.dtype == "bfloat16"
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half.params)} == {"bfloat16"}
    plain, placed = load_model(saved), load_model(saved, mesh=make_mesh(4, 2, 1))
    up = placed.params["layers"]["0"]["mlp"]["up"]
    assert up.addressable_shards[0].data.shape == (12, 4)  # width over fsdp
    ids = np.arange(10).reshape(2, 5)
    np.testing.assert_allclose(
        placed.apply(placed.params, ids), plain.apply(plain.params, ids), atol=1e-5
    )
    with pytest.raises(ValueError, match=r"kv_heads' of size 1 is not divisible by .* of size 2"):
        load_model(saved, mesh=make_mesh(2, 2, 2))


def test_float16_files_widen_exactly(saved):
    file = saved / "model.safetensors"
    tensors = {name: array.astype(np.float16) for name, array in load_file(file).items()}
    save_file(tensors, file)
    loaded = load_model(saved)
    assert loaded.config.dtype == "float32"
    np.testing.assert_array_equal(
        loaded.params["embedding"], tensors["model.embed_tokens.weight"].astype(np.float32)
    )


# GGUF -------------------------------------------------------------------------------------------


def interleave_rows(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k, written by index."""
    rows = weight.shape[0] // n_heads
    order = [h * rows + half * rows // 2 + i for h in range(n_heads) for i in range(rows // 2)
             for half in (0, 1)]  # fmt: skip
    return weight[order]


def write_gguf(path, tensors, config: ModelConfig, architecture="llama", **fields):
    """A GGUF of our weights, by the gguf package's writer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32("llama.block_count", config.n_layers)
    writer.add_uint32("llama.embedding_length", config.d_model)
    writer.add_uint32("llama.feed_forward_length", config.d_ff)
    writer.add_uint32("llama.attention.head_count", config.n_heads)
    writer.add_uint32("llama.attention.head_count_kv", config.n_kv_heads)
    writer.add_uint32("llama.attention.key_length", config.head_dim)
    writer.add_uint32("llama.context_length", 64)
    writer.add_uint32("llama.vocab_size", config.vocab_size)
    writer.add_float32("llama.rope.freq_base", config.rope_theta)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.norm_eps)
    for name, value in fields.items():
        writer.add_string(name.replace("__", "."), value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(hf: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    out = {"token_embd.weight": hf["model.embed_tokens.weight"]}
    out["output_norm.weight"] = hf["model.norm.weight"]
    out["output.weight"] = hf["lm_head.weight"]
    for i in range(config.n_layers):
        for theirs, ours in names.items():
            array = hf[f"model.layers.{i}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                array = interleave_rows(
                    array, {"q": config.n_heads, "k": config.n_kv_heads}[ours[-1]]
                )
            out[f"blk.{i}.{ours}.weight"] = np.ascontiguousarray(array)
    return out


@pytest.fixture
def small_gguf(tmp_path):
    loaded = make_model(LLAMA)
    save_hf(loaded, tmp_path / "hf")
    tensors = gguf_tensors(load_file(tmp_path / "hf" / "model.safetensors"), LLAMA)
    write_gguf(tmp_path / "m.gguf", tensors, LLAMA)
    return loaded, tensors, tmp_path / "m.gguf"


def test_b52_gguf_rows_come_back_in_our_order(small_gguf):
    loaded, _, path = small_gguf
    again = load_model(path)
    assert again.config.head_dim == 6 and not again.config.tie_embeddings
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(loaded.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_gguf_of_another_architecture_is_refused(small_gguf, tmp_path):
    _, tensors, _ = small_gguf
    write_gguf(tmp_path / "q.gguf", tensors, LLAMA, architecture="qwen3")
    with pytest.raises(ValueError, match="q.gguf: GGUF architecture 'qwen3', allowed: 'llama'"):
        load_model(tmp_path / "q.gguf")


def test_gguf_with_rope_scaling_is_refused(small_gguf, tmp_path):
    _, tensors, _ = small_gguf
    write_gguf(tmp_path / "s.gguf", tensors, LLAMA, llama__rope__scaling__type="yarn")
    with pytest.raises(ValueError, match="rope scaling in a GGUF file .'yarn'. is not supported"):
        load_model(tmp_path / "s.gguf")


def test_gguf_lacking_a_tensor_lists_it(small_gguf, tmp_path):
    _, tensors, _ = small_gguf
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(12, np.float32)
    write_gguf(tmp_path / "l.gguf", tensors, LLAMA)
    with pytest.raises(
        ValueError,
        match="missing: model.layers.1.mlp.up_proj.weight; unexpected: blk.0.attn_q.bias",
    ):
        load_model(tmp_path / "l.gguf")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.3, 0.6, 0.99])
def test_a_truncated_gguf_file_is_named(small_gguf, share):
    _, _, path = small_gguf
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match="m.gguf is truncated or not a GGUF file"):
        load_model(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": "128"}, "x.json: head_dim must be a positive integer, got '128'"),
        ({"hidden_size": [1024]}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": 2.7}, "num_hidden_layers must be a positive integer, got 2.7"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, got 0"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a finite number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number above 0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": -2}, "eos_token_id must be a token id or a list of them, got -2"),
        ({"eos_token_id": [[1, 2]]}, "eos_token_id must be a token id"),
        ({"architectures": 5}, "architectures must be a list of names, got 5"),
        ({"layer_types": 5}, "layer_types must be a list of names, got 5"),
        ({"layer_types": [[1, 2]]}, "layer_types must be a list of names"),
        ({"layer_types": ["full_attention"]}, "x.json: layer_types names 1 layers, num_hidden_l"),
        ({"bos_token_id": "1"}, "bos_token_id must be a token id, got '1'"),
        ({"eos_token_id": [1, None]}, "eos_token_id must be a token id"),
        ({"max_position_embeddings": 10.0}, "max_position_embeddings must be a positive integer"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number above 0"),
        ({"rope_parameters": []}, "rope_parameters must be an object, got .."),
        ({"rope_parameters": "x"}, "rope_parameters must be an object, got 'x'"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": [1]}}, "rope_type .1. is not supp"),
        ({"model_type": []}, "model_type '..' is not supported"),
    ],
)
def test_values_of_a_wrong_kind_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(QWEN3_06B | change, "x.json")


@pytest.mark.parametrize(
    "old",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5},
    ],
)
def test_two_forms_of_rope_that_disagree_are_refused(old):
    new = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    with pytest.raises(ValueError, match="x.json: rope_parameters=.* disagree on "):
        config_from_hf(QWEN3_06B | new | old, "x.json")


def test_two_forms_of_rope_that_agree_are_read():
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 8192}
    both = {
        "rope_scaling": llama3 | {"type": "llama3"},
        "rope_parameters": llama3 | {"rope_theta": 1e6, "rope_type": "llama3"},
    }
    assert config_from_hf(QWEN3_06B | both).rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    with pytest.raises(ValueError, match="disagree on partial_rotary_factor"):
        config_from_hf(HYBRID_HF | {"partial_rotary_factor": 0.5})


HYBRID_HF = {
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_theta": 1e7,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def test_qwen3_5_is_read_from_its_config():
    config = config_from_hf(HYBRID_HF)
    assert config.kinds == ("linear", "linear", "linear", "full") and config.rotary_dim == 8
    assert config_from_hf(config_to_hf(config)) == config
    outer = {"model_type": "qwen3_5", "text_config": HYBRID_HF, "vision_config": {}}
    assert config_from_hf(outer | {"tie_word_embeddings": True}).tie_embeddings
    assert config_from_hf(outer) == config
    assert config_from_hf(HYBRID_HF | {"layer_types": []}) == config


def test_of_a_multimodal_config_the_outer_tie_flag_counts():
    for inside, outside in ((True, False), (False, True)):
        text = HYBRID_HF | {"tie_word_embeddings": inside}
        outer = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": outside}
        assert config_from_hf(outer).tie_embeddings is outside
    with pytest.raises(ValueError, match="architectures must be a list of names, got 5"):
        config_from_hf(outer | {"architectures": 5})


def test_sizes_of_linear_layers_must_be_positive():
    shape = LinearShape(key_heads=1, value_heads=2, key_dim=0, value_dim=4)
    with pytest.raises(ValueError, match="model.linear.key_dim must be a positive integer, got 0"):
        dataclasses.replace(QWEN3, family="qwen3_5", linear=shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_attention_interval": 0}, "full_attention_interval must be a positive integer"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim must be a positive integer, got 0"),
        ({"linear_num_value_heads": 3}, "linear.value_heads=3 is not a multiple of"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers=4"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types .* are not supported"),
        ({"num_experts": 8}, "unknown features, not supported: num_experts=8"),
    ]
    + [
        (
            {"rope_parameters": HYBRID_HF["rope_parameters"] | {"partial_rotary_factor": share}},
            "partial_rotary_factor",
        )
        for share in (0, 0.003, 0.1, 1.5, None)
    ],
)
def test_a_qwen3_5_that_cannot_be_computed_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(HYBRID_HF | change)


def test_the_index_says_where_a_tensor_lies(tmp_path):
    """A tensor in another file than the index names, or in two, or outside the folder."""
    model = LanguageModel(QWEN3)
    save_hf(make_loaded(model, model.init(jax.random.key(0))), tmp_path, 3_000)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = next(n for n, shard in index["weight_map"].items() if shard == shards[0])
    assert len(shards) > 1
    for wrong, message in (
        (shards[1], f"{shards[0]} holds {name}, which belongs to {shards[1]}"),
        (f"../{shards[0]}", "weight_map names '../model"),
        (7, "weight_map names 7"),
    ):
        file.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {name: wrong}}))
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path)
    file.write_text(json.dumps(index | {"weight_map": None}))
    with pytest.raises(ValueError, match="weight_map names None"):
        load_model(tmp_path)
