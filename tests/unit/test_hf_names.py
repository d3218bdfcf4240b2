"""Hugging Face folders of every family, written here name by name, into our tree and back."""

from __future__ import annotations

import json
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentspec.mesh import make_mesh
from agentspec.model import safetensors_files
from agentspec.model.hf_names import Piece, hf_tensors
from agentspec.model.safetensors_files import Outgoing, Stored, read_folder, write_folder
from agentspec.model.weights import load_model, save_hf

V, D, F, L = 24, 8, 12, 4
H, K, E = 4, 2, 6  # query heads, kv heads, head size
G, X, HV, Y, W = 2, 4, 4, 6, 3  # DeltaNet: key heads and size, value heads and size, kernel
COMMON = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "head_dim": E,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "eos_token_id": 3,
}
CONFIGS = {
    "llama": COMMON | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": COMMON | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_5": COMMON
    | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": G,
        "linear_key_head_dim": X,
        "linear_num_value_heads": HV,
        "linear_value_head_dim": Y,
        "linear_conv_kernel_dim": W,
        "partial_rotary_factor": 0.34,
        "attn_output_gate": True,
    },
}


def tensor_shapes(kind: str, tied: bool) -> dict[str, tuple[int, ...]]:
    """The tensors that transformers' models of these sizes have."""
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    q_rows = 2 * H * E if kind == "qwen3_5" else H * E
    attention = {
        "self_attn.q_proj.weight": (q_rows, D),
        "self_attn.k_proj.weight": (K * E, D),
        "self_attn.v_proj.weight": (K * E, D),
        "self_attn.o_proj.weight": (D, H * E),
    }
    if kind != "llama":
        attention |= {"self_attn.q_norm.weight": (E,), "self_attn.k_norm.weight": (E,)}
    linear = {
        "linear_attn.in_proj_qkv.weight": (2 * G * X + HV * Y, D),
        "linear_attn.in_proj_z.weight": (HV * Y, D),
        "linear_attn.in_proj_b.weight": (HV, D),
        "linear_attn.in_proj_a.weight": (HV, D),
        "linear_attn.conv1d.weight": (2 * G * X + HV * Y, 1, W),
        "linear_attn.dt_bias": (HV,),
        "linear_attn.A_log": (HV,),
        "linear_attn.norm.weight": (Y,),
        "linear_attn.out_proj.weight": (D, HV * Y),
    }
    for n in range(L):
        mixer = linear if kind == "qwen3_5" and n % 2 == 0 else attention
        rest = {
            "input_layernorm.weight": (D,),
            "post_attention_layernorm.weight": (D,),
            "mlp.gate_proj.weight": (F, D),
            "mlp.up_proj.weight": (F, D),
            "mlp.down_proj.weight": (D, F),
        }
        shapes |= {f"model.layers.{n}.{name}": s for name, s in (mixer | rest).items()}
    return shapes


def random_tensors(shapes, dtype="float32"):
    rng = np.random.default_rng(0)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return {name: rng.normal(size=shape).astype(kind) for name, shape in shapes.items()}


def write_hf(folder, kind, tied=True, dtype="float32"):
    tensors = random_tensors(tensor_shapes(kind, tied), dtype)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = CONFIGS[kind] | {"tie_word_embeddings": tied, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def assert_same_tensors(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("scan", [False, True], ids=["layers", "scan"])
@pytest.mark.parametrize(
    ("tied", "dtype", "max_shard_bytes"),
    [(True, "float32", 10**9), (False, "bfloat16", 700)],
    ids=["tied-f32-one", "untied-bf16-sharded"],
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_there_and_back_is_bit_equal(tmp_path, kind, tied, dtype, max_shard_bytes, scan):
    tensors = write_hf(tmp_path / "a", kind, tied, dtype)
    loaded = load_model(tmp_path / "a", scan=scan)
    assert (loaded.config.dtype, loaded.config.scan) == (dtype, scan)
    save_hf(loaded, tmp_path / "b", max_shard_bytes)
    files = sorted((tmp_path / "b").glob("*.safetensors"))
    assert (len(files) > 3) == (max_shard_bytes == 700)
    assert_same_tensors({n: a for file in files for n, a in load_file(file).items()}, tensors)


def test_each_row_of_a_fused_tensor_goes_where_it_belongs(tmp_path):
    tensors = write_hf(tmp_path / "a", "qwen3_5")
    params = load_model(tmp_path / "a").params["layers"]
    stacked = load_model(tmp_path / "a", scan=True).params["layers"]
    assert sorted(stacked) == ["0", "1"]
    fused = tensors["model.layers.2.linear_attn.in_proj_qkv.weight"]
    conv = tensors["model.layers.2.linear_attn.conv1d.weight"]
    out = tensors["model.layers.2.linear_attn.out_proj.weight"]
    for delta, entry in ((params["2"]["deltanet"], ()), (stacked["0"]["deltanet"], (1,))):
        # key head 1, row 2 is the fused tensor's row 2 * 4 + 1 * 4 + 2; value head 3, row 5 is
        # row 2 * (2 * 4) + 3 * 6 + 5
        np.testing.assert_array_equal(delta["q"][(*entry, 1, 2)], fused[6])
        np.testing.assert_array_equal(delta["k"][(*entry, 1, 2)], fused[14])
        np.testing.assert_array_equal(delta["v"][(*entry, 3, 5)], fused[39])
        np.testing.assert_array_equal(delta["conv_k"][(*entry, 1, 2)], conv[14, 0])
        np.testing.assert_array_equal(delta["conv_v"][(*entry, 3, 5)], conv[39, 0])
        np.testing.assert_array_equal(delta["out"][(*entry, 7, 3, 5)], out[7, 23])
    query = tensors["model.layers.3.self_attn.q_proj.weight"]  # of each head: query, then gate
    np.testing.assert_array_equal(params["3"]["attention"]["q"][2, 7], query[2 * 12 + 7])
    np.testing.assert_array_equal(stacked["1"]["attention"]["q"][1, 2, 7], query[2 * 12 + 7])


@pytest.mark.parametrize("scan", [False, True], ids=["layers", "scan"])
def test_on_a_mesh_every_shard_is_read_once(tmp_path, monkeypatch, scan):
    tensors = write_hf(tmp_path / "a", "qwen3_5", tied=False)
    plain = load_model(tmp_path / "a", scan=scan)
    read_bytes = []
    read = Stored.read

    def counted(self, cut=(), dtype=None):
        part = read(self, cut, dtype)
        read_bytes.append(part.nbytes)
        return part

    monkeypatch.setattr(Stored, "read", counted)
    placed = load_model(tmp_path / "a", mesh=make_mesh(2, 2, 2), scan=scan)
    # every value is on two or more of the devices; none is read twice
    assert sum(read_bytes) == sum(array.nbytes for array in tensors.values())
    for a, b in zip(jax.tree.leaves(placed.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(a, b)
    up = placed.params["layers"]["1"]["mlp"]["up"]
    assert up.addressable_shards[0].data.shape == ((2,) if scan else ()) + (F // 2, D // 2)


def test_a_part_is_read_without_the_rest(tmp_path, monkeypatch):
    array = np.arange(60, dtype=np.float32).reshape(10, 6)
    save_file({"a": array, "b": np.zeros(1000, np.float32)}, tmp_path / "model.safetensors")
    stored = read_folder(tmp_path)["a"]
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: stored.offset + 7 * 24])  # as much as 7 rows
    for block_bytes in (24, 50, 10**6):
        monkeypatch.setattr(safetensors_files, "BLOCK_BYTES", block_bytes)
        part = stored.read([slice(2, 7), slice(1, 4)], ml_dtypes.bfloat16)
        assert part.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(part.astype(np.float32), array[2:7, 1:4])


def test_cutting_inside_a_head_is_refused():
    piece = Piece("layers.0.attention.k", None, (K, E, D))
    assert piece.cut([slice(1, 2), slice(0, E), slice(4, 8)]) == (slice(6, 12), slice(4, 8))
    with pytest.raises(ValueError, match=r"attention.k: dimension 1 \(head size\) cannot be cut"):
        piece.cut([slice(0, 2), slice(0, 3), slice(0, D)])


def test_a_parameter_without_a_name_is_an_error(tmp_path):
    write_hf(tmp_path / "a", "llama")
    loaded = load_model(tmp_path / "a")
    shapes = {"embedding": (V, D), "norm.weight": (D,), "layers.0.mlp.router": (2, D)}
    with pytest.raises(ValueError, match=r"no Hugging Face names .* layers.0.mlp.router"):
        hf_tensors(loaded.config, shapes)


# Multimodal folders -----------------------------------------------------------------------------

VISION = {"model.visual.blocks.0.attn.qkv.weight": (6, 2), "model.visual.patch_embed.bias": (5,)}
MTP = {"mtp.layers.0.mlp.up_proj.weight": (F, D)}


def write_multimodal(folder, extra=()):
    text = random_tensors(tensor_shapes("qwen3_5", tied=False), "bfloat16")
    named = {n.replace("model.", "model.language_model.", 1): a for n, a in text.items()}
    rest = random_tensors(VISION | MTP | dict(extra), "bfloat16")
    folder.mkdir()
    save_file(named | rest, folder / "model.safetensors")
    inner = CONFIGS["qwen3_5"] | {"tie_word_embeddings": False, "dtype": "bfloat16"}
    inner.pop("architectures")
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": inner,
        "vision_config": {"model_type": "qwen3_5", "depth": 1},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return text, rest


def test_of_a_multimodal_folder_the_text_model_is_read(tmp_path):
    text, rest = write_multimodal(tmp_path / "m")
    n_bytes = sum(2 * math.prod(shape) for shape in (VISION | MTP).values())
    with pytest.warns(UserWarning) as caught:
        loaded = load_model(tmp_path / "m")
    (warning,) = [w for w in caught if "left out" in str(w.message)]
    assert str(warning.message) == (
        f"{tmp_path / 'm'}: left out 3 tensors that are not of the text model (mtp, visual), "
        f"{n_bytes} bytes"
    )
    assert warning.filename == __file__
    save_hf(loaded, tmp_path / "b")
    assert_same_tensors(load_file(tmp_path / "b" / "model.safetensors"), text)


def test_other_names_in_a_multimodal_folder_are_unexpected(tmp_path):
    write_multimodal(tmp_path / "m", {"model.audio.weight": (2,)})
    with (
        pytest.warns(UserWarning, match="left out 3"),
        pytest.raises(ValueError, match="m: unexpected: model.audio.weight$"),
    ):
        load_model(tmp_path / "m")


# Dtypes and heads -------------------------------------------------------------------------------


def test_a_few_float32_vectors_do_not_widen_a_bfloat16_model(tmp_path):
    tensors = write_hf(tmp_path / "a", "qwen3_5", dtype="bfloat16")
    name = "model.layers.0.linear_attn.A_log"
    tensors[name] = np.float32([1.0, 1.00390625, -2.5, 0.1])
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    loaded = load_model(tmp_path / "a")
    assert loaded.config.dtype == "bfloat16"
    wide = load_model(tmp_path / "a", param_dtype="float32")
    assert (wide.config.dtype, wide.config.param_dtype) == ("bfloat16", "float32")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(wide.params)} == {"float32"}
    np.testing.assert_array_equal(wide.params["layers"]["0"]["deltanet"]["A_log"], tensors[name])


def test_only_how_to_compute_can_be_chosen(tmp_path):
    write_hf(tmp_path / "a", "llama")
    assert load_model(tmp_path / "a", remat="full").config.remat == "full"
    with pytest.raises(ValueError, match=r"load_model cannot set \['n_layers'\], allowed: param_d"):
        load_model(tmp_path / "a", n_layers=2)


def test_a_tied_model_may_hold_its_head_twice_but_not_another(tmp_path, monkeypatch):
    tensors = write_hf(tmp_path / "a", "qwen3", tied=True)
    file = tmp_path / "a" / "model.safetensors"
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": head}, file)
    assert "head" not in load_model(tmp_path / "a").params
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, file)
    with pytest.raises(ValueError, match="is true, but lm_head.weight differs from model.embed"):
        load_model(tmp_path / "a")


def test_mixed_dtypes_lie_aligned_in_a_file(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    half, whole = np.ones(3, ml_dtypes.bfloat16), np.arange(4, dtype=np.float32)
    tensors = [
        Outgoing(name, array.dtype, array.shape, lambda array=array: [array])
        for name, array in {"a": half, "b": whole, "c": np.float64(2.5).reshape(())}.items()
    ]
    write_folder(tmp_path, tensors)
    found = load_torch(tmp_path / "model.safetensors")
    assert found["a"].dtype == torch.bfloat16 and found["a"].tolist() == [1, 1, 1]
    assert found["b"].tolist() == [0, 1, 2, 3] and found["c"].item() == 2.5
    assert read_folder(tmp_path)["c"].read().item() == 2.5
