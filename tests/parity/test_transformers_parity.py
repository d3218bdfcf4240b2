"""Our decoder against transformers' Llama, Qwen3 and Qwen3.5: tiny random models, no download.

torch and transformers are a second, independent implementation of the same architectures. Each
case runs with the layers' weights apart and, for some, stacked (``scan``).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch: pip install -e .[test]")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file  # noqa: E402

from agentspec.model import attention  # noqa: E402
from agentspec.model.hf_config import config_from_hf  # noqa: E402
from agentspec.model.hf_names import hf_tensors, leaf_names  # noqa: E402
from agentspec.model.layers import Full, rotary  # noqa: E402
from agentspec.model.weights import load_model, save_hf  # noqa: E402

LLAMA3 = {
    "rope_theta": 10000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_theta": 10000.0, "rope_type": "default"}
MROPE = PLAIN | {
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 1],
    "mrope_interleaved": True,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
CASES = {
    "qwen3-tied-gqa-head-apart": dict(kind="qwen3", tied=True, heads=4, kv=2, head_dim=24),
    "qwen3-untied-mha": dict(kind="qwen3", tied=False, heads=4, kv=4, head_dim=16),
    "qwen3-scanned": dict(kind="qwen3", tied=True, heads=4, kv=2, head_dim=16, scan=True),
    "llama-tied-gqa": dict(kind="llama", tied=True, heads=6, kv=2, head_dim=8),
    "llama-untied-mha-scaled": dict(
        kind="llama", tied=False, heads=2, kv=2, head_dim=16, rope=LLAMA3
    ),
    "qwen3_5-tied-gqa": dict(
        kind="qwen3_5", tied=True, heads=4, kv=2, head_dim=24, rope=MROPE, layers=4
    ),
    "qwen3_5-untied-mha-scanned": dict(
        kind="qwen3_5", tied=False, heads=2, kv=2, head_dim=32, rope=MROPE, layers=8, scan=True
    ),
}
CLASSES = {"qwen3": "Qwen3", "llama": "Llama", "qwen3_5": "Qwen3_5"}


def hf_model(kind, tied, heads, kv, head_dim, rope=PLAIN, layers=3, scan=False):
    """A random float32 model whose norms are not all alike; ``scan`` is for our side only."""
    config_class = f"{CLASSES[kind]}{'Text' if kind == 'qwen3_5' else ''}Config"
    config = getattr(transformers, config_class)(
        vocab_size=61,
        hidden_size=48 if kind == "llama" else 32,
        intermediate_size=56,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        rope_parameters=dict(rope),
        max_position_embeddings=512,
        initializer_range=0.1 if kind == "qwen3_5" else 0.15,
        bos_token_id=1,
        eos_token_id=2,
        **(LINEAR if kind == "qwen3_5" else {}),
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{CLASSES[kind]}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "dt_bias" in parameter_name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request, tmp_path_factory):
    """(transformers' model, its folder, ours loaded from that folder)."""
    case = CASES[request.param]
    model = hf_model(**case)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder, load_model(folder, scan=case.get("scan", False))


def random_ids(rows: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 61, (rows, tokens))


def test_layers_and_logits_match(pair):
    model, _, loaded = pair
    ids = random_ids(2, 140)  # two query tiles, three chunks, past Llama 3's original length
    with torch.no_grad():
        out = model(torch.tensor(ids), output_hidden_states=True)
    ends = loaded.model.ends(loaded.params)
    layout = attention.Layout(jnp.broadcast_to(jnp.arange(140), (2, 140)))
    full = Full(
        rotary(loaded.config, layout.positions_BT), attention.attender(layout, "xla", None), layout
    )
    np.testing.assert_array_equal(np.asarray(ends.embed(ids)), out.hidden_states[0].numpy())
    for number, layer in enumerate(loaded.model.layers(loaded.params)):
        # each layer from transformers' own input, so that errors do not add up
        x = layer(jnp.asarray(out.hidden_states[number].numpy()), full)
        if number == loaded.config.n_layers - 1:  # transformers gives the last one normed
            x = ends.norm(x)
        wanted = out.hidden_states[number + 1].numpy()
        np.testing.assert_allclose(np.asarray(x), wanted, atol=1e-5, rtol=1e-5)
    logits = np.asarray(loaded.apply(loaded.params, ids))
    assert logits.dtype == np.float32
    assert np.abs(out.logits.numpy()).max() > 0.5  # the comparison is not of zeros
    np.testing.assert_allclose(logits, out.logits.numpy(), atol=1e-4, rtol=0)


def test_gradients_of_every_weight_match(pair):
    model, _, loaded = pair
    ids = random_ids(2, 70)
    model = copy.deepcopy(model).double()  # what float32 gradients of either side should be
    logits = model(torch.tensor(ids)).logits[:, :-1]
    torch.nn.functional.cross_entropy(
        logits.reshape(-1, 61), torch.tensor(ids[:, 1:].reshape(-1))
    ).backward()

    def loss(params):
        logp = jax.nn.log_softmax(loaded.model.apply(params, ids)[:, :-1])
        return -jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1).mean()

    ours = leaf_names(jax.jit(jax.grad(loss))(loaded.params))
    theirs = {name: p.grad.numpy() for name, p in model.named_parameters()}
    tensors = hf_tensors(loaded.config, {name: leaf.shape for name, leaf in ours.items()})
    assert {tensor.name for tensor in tensors} == theirs.keys()
    for tensor in tensors:
        rows = [
            np.asarray(ours[p.leaf] if p.entry is None else ours[p.leaf][p.entry]).reshape(
                p.hf_shape
            )
            for p in tensor.pieces
        ]
        got, wanted = np.concatenate(rows), theirs[tensor.name]
        assert np.abs(wanted).max() > 0, tensor.name
        np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=0, err_msg=tensor.name)


def test_64_greedy_tokens_with_cache_match(pair):
    """Prompts of different lengths in one batch; theirs one by one, ours through one cache."""
    model, _, loaded = pair
    prompts = [random_ids(1, n)[0] for n in (5, 37)]
    wanted = []
    for prompt in prompts:
        given, cache, tokens = torch.tensor(prompt[None]), None, []
        for _ in range(64):
            with torch.no_grad():
                out = model(given, cache=cache, use_cache=True)
            given, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            tokens.append(int(given))
        wanted.append(tokens)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    ids = np.zeros((2, 40), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    step = jax.jit(loaded.model.apply_cached)
    logits = jax.jit(loaded.model.unembed)
    cache = loaded.model.init_cache(2, 128)
    hidden, cache = step(loaded.params, cache, ids, np.zeros(2, np.int32), lengths)
    last = logits(loaded.params, hidden[np.arange(2), lengths - 1])
    got = []
    for n in range(64):
        new = np.asarray(last.argmax(-1), np.int32)
        got.append(new)
        one = np.ones(2, np.int32)
        hidden, cache = step(loaded.params, cache, new[:, None], lengths + n, one)
        last = logits(loaded.params, hidden[:, 0])
    np.testing.assert_array_equal(np.array(got).T, np.array(wanted))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_hf_to_ours_to_hf_is_bit_equal_and_loads_strictly(pair, tmp_path, max_shard_bytes):
    model, folder, loaded = pair
    save_hf(loaded, tmp_path / "out", max_shard_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes < 10**9)
    theirs, ours = load_file(folder / "model.safetensors"), {}
    for file in files:
        ours |= load_file(file)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    again, info = type(model).from_pretrained(
        tmp_path / "out", output_loading_info=True, local_files_only=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    ids = torch.tensor(random_ids(1, 40))
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, model(ids).logits)
    assert again.config.eos_token_id == 2 and again.config.bos_token_id == 1


def test_export_is_read_by_the_old_config_form_too(pair, tmp_path):
    """The 4.x keys (rope_theta, rope_scaling) in our export say the same as the 5.x ones."""
    _, _, loaded = pair
    save_hf(loaded, tmp_path / "out")
    hf = json.loads((tmp_path / "out" / "config.json").read_text())
    again = load_model(tmp_path / "out", scan=loaded.config.scan).config
    assert again == loaded.config
    if loaded.config.family == "qwen3_5":
        return  # transformers 4 has no such model
    assert config_from_hf(hf) == config_from_hf(hf | {"rope_parameters": None})


def test_b53_head_dim_is_set_apart(tmp_path: Path):
    """Qwen3's q_proj is [heads * head_dim, width], 96 x 32 here, and its q/k norms have 24."""
    hf_model(**CASES["qwen3-tied-gqa-head-apart"]).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    attention_params = loaded.params["layers"]["0"]["attention"]
    assert attention_params["q"].shape == (4, 24, 32)
    assert attention_params["k"].shape == (2, 24, 32)
    assert attention_params["q_norm"]["weight"].shape == (24,)


def test_bfloat16_file_keeps_its_bits(tmp_path: Path):
    model = hf_model(**CASES["qwen3-untied-mha"]).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in")
    loaded = load_model(tmp_path / "in")
    assert loaded.config.dtype == "bfloat16"
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(loaded.params))
    save_hf(loaded, tmp_path / "out")
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("out", "in"))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].tobytes() == theirs[name].tobytes(), name
    logits = loaded.apply(loaded.params, random_ids(1, 20))
    assert logits.dtype == jnp.float32
    wide = load_model(tmp_path / "in", dtype="float32")
    reference = wide.apply(wide.params, random_ids(1, 20))
    assert float(jnp.abs(logits - reference).mean()) < 0.05  # bfloat16's own rounding


@pytest.mark.parametrize("head_in_file", [True, False])
def test_b54_tied_head_in_the_file_or_not(tmp_path: Path, head_in_file: bool):
    from safetensors.numpy import save_file

    model = hf_model(**CASES["llama-tied-gqa"])
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    if head_in_file:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        save_file(tensors, file)
    loaded = load_model(tmp_path)
    assert "head" not in loaded.params
    ids = random_ids(1, 9)
    with torch.no_grad():
        wanted = model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(loaded.apply(loaded.params, ids), wanted, atol=1e-4, rtol=0)
    if head_in_file:
        tensors["lm_head.weight"][3, 3] += 1
        save_file(tensors, file)
        with pytest.raises(ValueError, match="lm_head.weight differs"):
            load_model(tmp_path)
