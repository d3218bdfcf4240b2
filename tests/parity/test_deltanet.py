"""Our Gated DeltaNet layer against transformers' Qwen3.5: outputs, gradients, cached decoding.

Shapes are tiny and random; torch's own chunked and token-by-token code are both compared with.
"""

from __future__ import annotations

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch: pip install -e .[parity]")
transformers = pytest.importorskip("transformers")

from flax import nnx  # noqa: E402
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf_code  # noqa: E402

from agentspec.model.attention import Layout  # noqa: E402
from agentspec.model.config import LinearShape, ModelConfig  # noqa: E402
from agentspec.model.deltanet import DeltaNet, init_delta_cache  # noqa: E402

D, G, H, X, Y, W = 20, 2, 6, 8, 12, 4
ROWS, TOKENS = 2, 150  # three chunks of 64, the last one partly filled
CONFIG = ModelConfig(
    vocab_size=11,
    d_model=D,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    head_dim=8,
    d_ff=16,
    rope_theta=1e4,
    family="qwen3_5",
    layer_types=("linear",),
    linear=LinearShape(G, H, X, Y, W),
)
CUTS = [G * X, 2 * G * X]  # where q ends and k ends in the fused projection


@pytest.fixture(scope="module")
def hf_layer():
    """A random float32 layer; the norm's weight is far from one and decays are slow and fast."""
    config = transformers.Qwen3_5TextConfig(
        vocab_size=11,
        hidden_size=D,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=G,
        linear_num_value_heads=H,
        linear_key_head_dim=X,
        linear_value_head_dim=Y,
        linear_conv_kernel_dim=W,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    torch.manual_seed(0)
    layer = hf_code.Qwen3_5GatedDeltaNet(config, 0).to(torch.float32)
    with torch.no_grad():
        layer.norm.weight.add_(0.5 * torch.randn(Y))
        layer.dt_bias.copy_(torch.randn(H))
        layer.A_log.copy_(torch.log(torch.tensor([0.001, 0.01, 0.1, 0.5, 2.0, 16.0])))
    return layer


def to_ours(hf):
    """HF's tensors by name (a state dict, or its gradients) as our parameter tree."""
    hf = {name: value.detach().numpy().copy() for name, value in hf.items()}
    q, k, v = np.split(hf["in_proj_qkv.weight"], CUTS)
    conv_q, conv_k, conv_v = np.split(hf["conv1d.weight"][:, 0], CUTS)
    return {
        "q": q.reshape(G, X, D),
        "k": k.reshape(G, X, D),
        "v": v.reshape(H, Y, D),
        "z": hf["in_proj_z.weight"].reshape(H, Y, D),
        "b": hf["in_proj_b.weight"],
        "a": hf["in_proj_a.weight"],
        "conv_q": conv_q.reshape(G, X, W),
        "conv_k": conv_k.reshape(G, X, W),
        "conv_v": conv_v.reshape(H, Y, W),
        "dt_bias": hf["dt_bias"],
        "A_log": hf["A_log"],
        "norm": {"weight": hf["norm.weight"]},
        "out": hf["out_proj.weight"].reshape(D, H, Y),
    }


def module(params, config=CONFIG):
    graph, state = nnx.split(nnx.eval_shape(lambda: DeltaNet(config, nnx.Rngs(0))))
    shapes = jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(state))
    assert shapes == jax.tree.map(np.shape, params)
    return nnx.merge(graph, jax.tree.map(jnp.asarray, params))


def inputs(tokens=TOKENS):
    return np.random.default_rng(1).normal(size=(ROWS, tokens, D)).astype(np.float32)


def plain(x):
    return Layout(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))


def close(ours, theirs, name=""):
    scale = max(1.0, float(np.abs(theirs).max()))
    np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=1e-5, err_msg=str(name))


@pytest.fixture(scope="module", params=["chunked", "recurrent"])
def reference(request, hf_layer):
    """(outputs, gradients of the weights, gradient of the input), by either of torch's codes."""
    saved = hf_code.torch_chunk_gated_delta_rule
    x = torch.tensor(inputs(), requires_grad=True)
    slope = np.random.default_rng(2).normal(size=(ROWS, TOKENS, D)).astype(np.float32)
    hf_layer.zero_grad()
    try:
        if request.param == "recurrent":
            hf_code.torch_chunk_gated_delta_rule = hf_code.torch_recurrent_gated_delta_rule
        out = hf_layer(x)
    finally:
        hf_code.torch_chunk_gated_delta_rule = saved
    (out * torch.tensor(slope)).sum().backward()
    slopes = {name: weight.grad for name, weight in hf_layer.named_parameters()}
    return out.detach().numpy(), to_ours(slopes), x.grad.numpy(), slope


@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_outputs_and_gradients(hf_layer, reference, chunk):
    out, weight_slopes, x_slope, slope = reference

    def loss(params, x):
        y = module(params, dataclasses.replace(CONFIG, chunk=chunk))(x, plain(x))
        return (y * slope).sum(), y

    params = to_ours(hf_layer.state_dict())
    (_, ours), (ours_weights, ours_x) = jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    )(params, inputs())
    close(ours, out)
    close(ours_x, x_slope)
    jax.tree.map_with_path(
        lambda path, a, b: close(a, b, jax.tree_util.keystr(path)), ours_weights, weight_slopes
    )


def test_decoding_matches_transformers_cache(hf_layer):
    """Prefill 70, then one token at a time, both with their own caches."""
    x, n_prefill = inputs(80), 70
    config = hf_code.Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"])
    hf_cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        theirs = [hf_layer(torch.tensor(x[:, :n_prefill]), cache=hf_cache)]
        for t in range(n_prefill, 80):
            theirs.append(hf_layer(torch.tensor(x[:, t : t + 1]), cache=hf_cache))
    append = jax.jit(lambda params, *args: module(params).cached(*args))
    params = to_ours(hf_layer.state_dict())
    cache = init_delta_cache(CONFIG, ROWS)
    ours = []
    for start, stop in [(0, n_prefill), *((t, t + 1) for t in range(n_prefill, 80))]:
        starts, valid = jnp.full(ROWS, start), jnp.full(ROWS, stop - start)
        out, cache = append(params, x[:, start:stop], cache, starts, valid)
        ours.append(out)
    close(np.concatenate(ours, axis=1), torch.cat(theirs, axis=1).numpy())
    close(cache.state_RHXY, hf_cache.get_recurrent_state(0, state_idx=0).numpy())


def test_bfloat16_is_as_exact_as_transformers(hf_layer):
    """Mean error against float32: torch rounds the convolution's results, we do not."""
    x = inputs(70)
    with torch.no_grad():
        exact = hf_layer(torch.tensor(x)).numpy()
        rounded = copy.deepcopy(hf_layer).to(torch.bfloat16)(torch.tensor(x).to(torch.bfloat16))
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="float32")
    ours = jax.jit(lambda params, x: module(params, config)(x, plain(x)))(
        to_ours(hf_layer.state_dict()), jnp.asarray(x, jnp.bfloat16)
    )
    assert ours.dtype == jnp.bfloat16
    their_error = np.abs(rounded.float().numpy() - exact).mean()
    our_error = np.abs(np.asarray(ours, np.float32) - exact).mean()
    print(f"mean error in bfloat16: ours {our_error:.2e}, transformers' {their_error:.2e}")
    assert our_error <= their_error


def test_gated_norm_takes_its_weight_plain(hf_layer):
    """Qwen3.5's other norms store an offset from one; this one does not."""
    ours = module(to_ours(hf_layer.state_dict())).norm
    rng = np.random.default_rng(3)
    x, gate = rng.normal(size=(2, 5, Y)).astype(np.float32)
    theirs = hf_layer.norm(torch.tensor(x), torch.tensor(gate)).detach().numpy()
    close(ours(jnp.asarray(x), jnp.asarray(gate)), theirs)
    weight = hf_layer.norm.weight.detach().numpy()
    by_hand = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
    close(theirs, by_hand * gate / (1 + np.exp(-gate)))
