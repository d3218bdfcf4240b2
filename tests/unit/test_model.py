"""The decoder's own promises: who sees whom, cached equals full, rotary values, the mesh table."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from agentspec.mesh import LOGICAL_AXES, batch_sharding, make_mesh, param_shardings, partition
from agentspec.model import attention
from agentspec.model.cache import write
from agentspec.model.config import LinearShape, Llama3Rope, ModelConfig
from agentspec.model.deltanet import GatedNorm
from agentspec.model.gguf_file import half_split_rows
from agentspec.model.layers import RMSNorm, inverse_frequencies, rotary, rotate, silu
from agentspec.model.transformer import LanguageModel
from agentspec.model.weights import load_model, make_loaded, save_hf

CONFIG = ModelConfig(
    vocab_size=50,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=48,
    rope_theta=10000.0,
)
MODEL = LanguageModel(CONFIG)
FAR = 1 << 30
apply = jax.jit(MODEL.apply)
unembed = jax.jit(MODEL.unembed)
apply_cached = jax.jit(MODEL.apply_cached)


@pytest.fixture(scope="module")
def params():
    """Random weights, with embeddings large enough that logits differ clearly."""
    tree = MODEL.init(jax.random.key(0))
    return tree | {"embedding": tree["embedding"] * 20}


def random_ids(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, shape).astype(np.int32)


# Attention rule ---------------------------------------------------------------------------------


def seen_by_rule(positions, segments, branches, cuts) -> np.ndarray:
    """The rule of the module docstring, one pair at a time."""
    n = len(positions)
    seen = np.zeros((n, n), bool)
    for i in range(n):
        for j in range(i + 1):
            own = branches[j] == branches[i] and positions[j] <= positions[i]
            trunk = branches[j] == 0 and positions[j] < cuts[i]
            seen[i, j] = segments[j] == segments[i] and (own or trunk)
    return seen


def test_visible_tiles_follow_the_rule(monkeypatch):
    monkeypatch.setattr(attention, "TILE_TOKENS", 5)
    # trunk 0..3, branch 1 after 2 tokens, branch 2 after 4; a second segment; padding
    positions = [0, 1, 2, 3, 2, 3, 4, 4, 5, 0, 1, 1, 0, 0]
    segments = [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0]
    branches = [0, 0, 0, 0, 1, 1, 1, 2, 2, 0, 0, 1, 0, 0]
    cuts = [FAR] * 4 + [2] * 3 + [4] * 2 + [FAR, FAR, 1, FAR, FAR]
    layout = attention.Layout(*(jnp.array([row]) for row in (positions, segments, branches, cuts)))
    wanted = seen_by_rule(positions, segments, branches, cuts)
    assert wanted[6].tolist() == [True] * 2 + [False] * 2 + [True] * 3 + [False] * 7
    got = attention.visible_tiles(layout)
    assert [tile.shape for tile in got] == [(1, 5, 5), (1, 5, 10), (1, 4, 14)]
    for number, tile in enumerate(got):
        rows = wanted[5 * number : 5 * number + 5]
        np.testing.assert_array_equal(np.asarray(tile[0]), rows[:, : tile.shape[2]])
        assert not rows[:, tile.shape[2] :].any()


def test_attend_equals_a_loop_over_heads():
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, h, 6, 4)).astype(np.float32) for h in (6, 2, 2))
    seen = np.tril(np.ones((6, 6), bool))[None].repeat(2, 0)
    got = attention.attend(*map(jnp.asarray, (q, k, v, seen)))
    for b in range(2):
        for h in range(6):
            scores = q[b, h].astype(np.float64) @ k[b, h // 3].T / 2.0
            weights = np.exp(scores) * seen[b]
            weights /= weights.sum(-1, keepdims=True)
            np.testing.assert_allclose(got[b, h], weights @ v[b, h // 3], atol=1e-5)


def test_attend_gradients_equal_those_of_a_plain_softmax():
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(2, h, 6, 4)), jnp.float32) for h in (6, 2, 2))
    seen = jnp.asarray(rng.random((2, 6, 6)) < 0.5) | jnp.eye(6, dtype=bool)
    weights = jnp.asarray(rng.normal(size=(2, 6, 6, 4)), jnp.float32)

    def plain(q, k, v):
        scores = jnp.einsum("bhte,bhse->bhts", q, jnp.repeat(k, 3, 1)) / 2.0
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        return jax.nn.softmax(scores) @ jnp.repeat(v, 3, 1)

    def ours(q, k, v):
        return attention.attend(q, k, v, seen)

    np.testing.assert_allclose(ours(q, k, v), plain(q, k, v), atol=1e-6)
    got, wanted = (
        jax.jit(jax.value_and_grad(lambda *a, f=f: (f(*a) * weights).sum(), argnums=(0, 1, 2)))(
            q, k, v
        )
        for f in (ours, plain)
    )
    assert got[0] == pytest.approx(float(wanted[0]), abs=1e-4)
    for a, b in zip(got[1], wanted[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def pack_rows(rows, n_tokens):
    """Rows as one padded batch row: ids, positions, segments (the test's own packing)."""
    ids, positions, segments = (np.zeros((1, n_tokens), np.int32) for _ in range(3))
    at = 0
    for number, row in enumerate(rows):
        here = slice(at, at + len(row))
        ids[0, here], positions[0, here], segments[0, here] = row, range(len(row)), number + 1
        at += len(row)
    return ids, positions, segments


def test_packed_rows_equal_separate_rows_and_padding_does_not_leak(params, monkeypatch):
    monkeypatch.setattr(attention, "TILE_TOKENS", 8)
    apply = jax.jit(lambda *arrays: MODEL.apply(*arrays))  # traced with this tile size
    rows = [random_ids(7), random_ids(9, seed=1), random_ids(1, seed=2)]
    ids, positions, segments = pack_rows(rows, 20)
    packed = apply(params, ids, positions, segments)
    at = 0
    for row in rows:
        alone = apply(params, row[None])
        np.testing.assert_allclose(packed[0, at : at + len(row)], alone[0], atol=1e-4)
        at += len(row)
    other = ids.copy()
    other[segments == 0] = 49
    changed = apply(params, other, positions, segments)
    np.testing.assert_array_equal(changed[segments > 0], packed[segments > 0])
    assert np.isfinite(packed).all()


def tree_case():
    """One trunk of 9 with branches at 3, 3 and 9, packed behind another segment."""
    first, trunk = random_ids(4, seed=3), random_ids(9, seed=4)
    branches = [(3, random_ids(5, seed=5)), (3, random_ids(2, seed=6)), (9, random_ids(4, seed=7))]
    ids, positions, segments = [*first, *trunk], [*range(4), *range(9)], [1] * 4 + [2] * 9
    branch_ids, cuts = [0] * 13, [FAR] * 13
    for number, (cut, branch) in enumerate(branches):
        ids += [*branch]
        positions += range(cut, cut + len(branch))
        segments += [2] * len(branch)
        branch_ids += [number + 1] * len(branch)
        cuts += [cut] * len(branch)
    pad = 30 - len(ids)
    arrays = [ids + [0] * pad, positions + [0] * pad, segments + [0] * pad]
    arrays += [branch_ids + [0] * pad, cuts + [FAR] * pad]
    return trunk, branches, [np.array([a], np.int32) for a in arrays]


def test_branches_equal_separate_rows_in_logits_and_gradients(params, monkeypatch):
    monkeypatch.setattr(attention, "TILE_TOKENS", 16)
    trunk, branches, arrays = tree_case()
    weights = np.random.default_rng(8).normal(size=(30, 50)).astype(np.float32)

    def tree_loss(params):
        logits = MODEL.apply(params, *arrays)[0]
        return sum(
            (logits[at : at + len(branch)] * weights[at : at + len(branch)]).sum()
            for at, (_, branch) in zip((13, 18, 20), branches, strict=True)
        ), logits

    def rows_loss(params):
        total, logits = 0.0, []
        for at, (cut, branch) in zip((13, 18, 20), branches, strict=True):
            row = np.concatenate([trunk[:cut], branch])[None]
            out = MODEL.apply(params, row)[0, cut:]
            logits.append(out)
            total += (out * weights[at : at + len(branch)]).sum()
        return total, jnp.concatenate(logits)

    (_, packed), tree_grad = jax.jit(jax.value_and_grad(tree_loss, has_aux=True))(params)
    (_, separate), rows_grad = jax.jit(jax.value_and_grad(rows_loss, has_aux=True))(params)
    np.testing.assert_allclose(packed[13:24], separate, atol=1e-4)
    np.testing.assert_allclose(packed[4:13], apply(params, trunk[None])[0], atol=1e-4)
    for got, wanted in zip(jax.tree.leaves(tree_grad), jax.tree.leaves(rows_grad), strict=True):
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(got, wanted, atol=1e-5 * max(scale, 1.0))


def test_remat_gives_the_same_loss_and_gradients(params):
    again = LanguageModel(dataclasses.replace(CONFIG, remat="full"))
    ids = random_ids(2, 6)

    def loss(model, params):
        return (model.apply(params, ids) ** 2).mean()

    plain, remat = (jax.jit(jax.grad(lambda p, m=m: loss(m, p))) for m in (MODEL, again))
    assert "remat" in str(jax.make_jaxpr(lambda p: loss(again, p))(params))
    for a, b in zip(jax.tree.leaves(plain(params)), jax.tree.leaves(remat(params)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_branches_without_cuts_are_refused(params):
    with pytest.raises(ValueError, match="cuts_BT are given together"):
        MODEL.apply(params, random_ids(1, 3), branch_ids_BT=np.zeros((1, 3), np.int32))


def test_silu_and_its_slope_are_finite_everywhere():
    x = jnp.array([-1e4, -200.0, -1.0, 0.0, 1.0, 200.0])
    # 1 / (1 + e) = 0.26894; slope at 1: s + s(1 - s) = 0.73106 + 0.19661 = 0.92767
    wanted = [0.0, 0.0, -0.26894142, 0.0, 0.73105858, 200.0]
    slopes = [0.0, 0.0, 0.26894142 - 0.19661193, 0.5, 0.73105858 + 0.19661193, 1.0]
    np.testing.assert_allclose(silu(x), wanted, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(silu))(x), slopes, atol=1e-6)


# Cached decoding --------------------------------------------------------------------------------


def test_b69_ragged_chunks_then_single_steps_equal_full_forward(params):
    """Prompts of 6 and 3 in chunks of 4, then 3 steps at positions 6, 7, 8 and 3, 4, 5."""
    ids = random_ids(2, 9)
    full = apply(params, ids)
    cache, start = MODEL.init_cache(2, 16), np.zeros(2, np.int32)
    prompt, got = np.array([6, 3]), np.zeros((2, 9, 50), np.float32)

    def step(tokens, valid):
        nonlocal cache, start
        hidden, cache = apply_cached(params, cache, tokens, start, valid)
        logits = unembed(params, hidden)
        for row in range(2):
            got[row, start[row] : start[row] + valid[row]] = logits[row, : valid[row]]
        start = start + valid

    for at in (0, 4):
        chunk = np.full((2, 4), 49, np.int32)  # left-over places hold a real token's id
        valid = np.clip(prompt - at, 0, 4).astype(np.int32)
        for row in range(2):
            chunk[row, : valid[row]] = ids[row, at : at + valid[row]]
        step(chunk, valid)
    assert start.tolist() == [6, 3]
    for number in range(3):
        assert start.tolist() == [6 + number, 3 + number]
        tokens = np.stack([ids[row, start[row]] for row in range(2)])[:, None]
        step(tokens, np.ones(2, np.int32))
    for row, length in enumerate((9, 6)):
        np.testing.assert_allclose(got[row, :length], full[row, :length], atol=1e-4)


def test_b63_left_padded_rows_equal_unpadded_rows(params):
    """mask [[0,0,1,1,1],[1,1,1,1,1]] gives positions [[0,0,0,1,2],[0,1,2,3,4]]."""
    ids = random_ids(2, 5)
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    positions = np.array([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    padded = apply(params, ids, positions, mask)
    alone = apply(params, ids[:1, 2:])
    np.testing.assert_allclose(padded[0, 2:], alone[0], atol=1e-5)
    np.testing.assert_allclose(padded[1], apply(params, ids[1:])[0], atol=1e-5)


def test_b64_decode_goes_on_at_each_rows_own_position(params):
    """After prompts of 3 and 5, the next token stands at 3 and 5, not at 5 and 5."""
    ids = random_ids(2, 6)
    valid = np.array([3, 5], np.int32)
    _, cache = apply_cached(params, MODEL.init_cache(2, 8), ids[:, :5], np.zeros(2, int), valid)
    new = np.array([[ids[0, 3]], [ids[1, 5]]])
    hidden, _ = apply_cached(params, cache, new, valid, np.ones(2, int))
    logits = unembed(params, hidden)
    np.testing.assert_allclose(logits[0, 0], apply(params, ids[:1, :4])[0, 3], atol=1e-5)
    np.testing.assert_allclose(logits[1, 0], apply(params, ids[1:])[0, 5], atol=1e-5)
    wrong, _ = apply_cached(params, cache, new, np.array([5, 5]), np.ones(2, int))
    assert float(jnp.abs(unembed(params, wrong)[0] - logits[0]).max()) > 1e-2


def test_cache_drops_what_is_not_valid_or_out_of_range(params):
    ids = random_ids(3, 4)
    cache = MODEL.init_cache(3, 6)
    _, new = apply_cached(params, cache, ids, np.array([0, 4, 2]), np.array([2, 4, 0]))
    for layer in new:
        for array in layer:
            used = np.asarray(jnp.abs(array).sum((1, 3)) > 0)
            assert used.astype(int).tolist() == [
                [1, 1, 0, 0, 0, 0],  # two of four valid
                [0, 0, 0, 0, 1, 1],  # positions 6 and 7 are beyond the cache
                [0, 0, 0, 0, 0, 0],  # an idle row
            ]


def test_stale_slots_behind_a_rewound_row_do_not_show(params):
    ids = random_ids(1, 8)
    one = np.ones(1, np.int32)
    _, cache = apply_cached(params, MODEL.init_cache(1, 8), ids, 0 * one, 8 * one)
    hidden, _ = apply_cached(params, cache, ids[:, :1], 3 * one, one)
    wanted = apply(params, np.concatenate([ids[:, :3], ids[:, :1]], 1))[0, 3]
    np.testing.assert_allclose(unembed(params, hidden)[0, 0], wanted, atol=1e-4)


def test_rows_do_not_depend_on_their_neighbours(params):
    """Bit-equal within one compiled shape: the base of lossless speculation."""
    ids = random_ids(4, 5)
    start, valid = np.zeros(4, np.int32), np.array([5, 3, 0, 4], np.int32)
    hidden, _ = apply_cached(params, MODEL.init_cache(4, 8), ids, start, valid)
    other = ids.copy()
    other[1:] = random_ids(3, 5, seed=9)
    again, _ = apply_cached(params, MODEL.init_cache(4, 8), other, start, valid)
    np.testing.assert_array_equal(hidden[0], again[0])


def test_decode_loop_updates_the_cache_in_place():
    """No copy of a cache array inside the compiled while body: the reason for its layout."""
    model, rows, length = MODEL, 4, 96

    def loop(params, cache, ids):
        def body(state):
            at, ids, cache = state
            start = jnp.full((rows,), at)
            hidden, cache = model.apply_cached(
                params, cache, ids[:, None], start, jnp.ones((rows,), jnp.int32)
            )
            return at + 1, jnp.argmax(model.unembed(params, hidden[:, 0]), -1), cache

        return jax.lax.while_loop(lambda state: state[0] < length, body, (0, ids, cache))

    args = (MODEL.shapes, jax.eval_shape(lambda: model.init_cache(rows, length)))
    text = (
        jax.jit(loop, donate_argnums=1)
        .lower(*args, jax.ShapeDtypeStruct((rows,), jnp.int32))
        .compile()
        .as_text()
    )
    array = f"f32[{rows},2,{length},8]"
    copies = [line for line in text.splitlines() if f"= {array}" in line and " copy(" in line]
    assert "scatter" in text and not copies


def test_write_puts_tokens_heads_first():
    cache = MODEL.init_cache(1, 4)[0]
    new = jnp.arange(2 * 2 * 8, dtype=jnp.float32).reshape(1, 2, 2, 8)
    out = write(cache, new, -new, jnp.array([[3, 1]]))
    np.testing.assert_array_equal(out.k_RKSE[0, 1, 3], new[0, 1, 0])
    np.testing.assert_array_equal(out.v_RKSE[0, 0, 1], -new[0, 0, 1])


# Rotary positions -------------------------------------------------------------------------------


def score(q, k, q_position: int, k_position: int) -> float:
    config = dataclasses.replace(CONFIG, n_heads=1, n_kv_heads=1, head_dim=8)
    turned = [
        rotate(jnp.asarray(x, jnp.float32).reshape(1, 1, 1, 8), rotary(config, jnp.array([[p]])))
        for x, p in ((q, q_position), (k, k_position))
    ]
    return float((turned[0] * turned[1]).sum())


Q, K = np.arange(1.0, 9.0), np.arange(7.0, -1.0, -1.0)  # q . k is 84


def interleaved_score(q, k, q_position: int, k_position: int) -> float:
    """llama.cpp's rotation, pairs (2i, 2i+1), in complex numbers."""
    angles = 10000.0 ** (-np.arange(4) / 4)
    turned = [
        (x[0::2] + 1j * x[1::2]) * np.exp(1j * position * angles)
        for x, position in ((q, q_position), (k, k_position))
    ]
    return float((turned[0] * turned[1].conj()).real.sum())


def test_b52_half_split_rotation_has_the_known_score():
    assert score(Q, K, 0, 0) == pytest.approx(84.0, abs=1e-4)  # right in any layout
    assert score(Q, K, 5, 2) == pytest.approx(24.1099, abs=1e-4)
    assert interleaved_score(Q, K, 5, 2) == pytest.approx(41.0363, abs=1e-4)
    # the same weights in llama.cpp's order, under llama.cpp's rotation and put back under ours
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    assert interleaved_score(Q[order], K[order], 5, 2) == pytest.approx(24.1099, abs=1e-4)
    back = [half_split_rows(x[order][:, None], n_heads=1)[:, 0] for x in (Q, K)]
    np.testing.assert_array_equal(back, [Q, K])


def test_b52_rows_are_put_back_within_each_head():
    rows = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    two_heads = np.concatenate([rows, rows + 8])[:, None]
    np.testing.assert_array_equal(half_split_rows(two_heads, n_heads=2)[:, 0], np.arange(16))


def test_b64_shifting_all_positions_is_harmless_and_one_side_is_not():
    assert score(Q, K, 105, 102) == pytest.approx(24.1099, abs=1e-3)
    assert score(Q, K, 105, 2) == pytest.approx(-31.44, abs=1e-2)


def test_b56_llama3_scaling_ratios():
    plain = dataclasses.replace(CONFIG, head_dim=128, rope_theta=5e5)
    scaled = dataclasses.replace(plain, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 8192))
    ratio = inverse_frequencies(scaled) / inverse_frequencies(plain)
    np.testing.assert_allclose(ratio[:29], 1.0, rtol=1e-12)
    assert ratio[32] == pytest.approx(0.3711, abs=1e-4)
    np.testing.assert_allclose(ratio[35:], 0.125, rtol=1e-12)


def test_b57_inverse_frequency_follows_theta():
    config = dataclasses.replace(CONFIG, head_dim=128, rope_theta=1e6)
    assert inverse_frequencies(config)[32] == pytest.approx(0.001)


# Mesh -------------------------------------------------------------------------------------------


def test_sharded_forward_equals_one_device(params):
    mesh = make_mesh(2, 2, 2)
    placed = jax.device_put(params, param_shardings(MODEL.logical_axes, MODEL.shapes, mesh))
    # q is [4 heads, 8, 32 wide]: heads cut in two, width cut in two
    q = placed["layers"]["0"]["attention"]["q"]
    assert q.addressable_shards[0].data.shape == (2, 8, 16)
    ids = jax.device_put(random_ids(4, 6), batch_sharding(mesh, 4))
    got = jax.jit(MODEL.apply)(placed, ids)
    np.testing.assert_allclose(got, apply(params, random_ids(4, 6)), atol=1e-4)


def test_every_parameter_declares_axes_of_the_table():
    leaves = jax.tree.leaves(MODEL.logical_axes, is_leaf=lambda node: isinstance(node, tuple))
    shapes = jax.tree.leaves(MODEL.shapes)
    assert len(leaves) == len(shapes) == 2 + 2 * 11
    for axes, shape in zip(leaves, shapes, strict=True):
        assert len(axes) == len(shape.shape) and set(axes) <= LOGICAL_AXES.keys()


def test_mesh_refuses_what_does_not_divide():
    mesh = make_mesh(1, 2, 4)
    config = dataclasses.replace(CONFIG, vocab_size=52)
    model = LanguageModel(config)
    with pytest.raises(ValueError, match=r"attention\.k.*kv_heads.*size 2 .*'tensor' of size 4"):
        param_shardings(model.logical_axes, model.shapes, mesh)
    with pytest.raises(ValueError, match=r"3 rows .* = 2 devices"):
        batch_sharding(mesh, 3)
    with pytest.raises(ValueError, match=r"needs 6 devices, got 8"):
        make_mesh(1, 2, 3)


def test_mesh_refuses_an_axis_used_twice_or_unknown():
    mesh = make_mesh(1, 2, 4)
    with pytest.raises(ValueError, match=r"w: axes .* use mesh axis 'tensor' twice"):
        partition(("heads", "ffn"), (4, 8), mesh, "w")
    with pytest.raises(ValueError, match=r"w: unknown logical axis 'rows'"):
        partition(("rows",), (4,), mesh, "w")


def test_params_are_a_plain_nested_dict_of_arrays(params):
    assert type(params) is dict and type(params["layers"]["1"]["mlp"]) is dict
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), MODEL.shapes)
    again = MODEL.init(jax.random.key(0))["layers"]["0"]["mlp"]["up"]
    np.testing.assert_array_equal(again, params["layers"]["0"]["mlp"]["up"])
    other = MODEL.init(jax.random.key(1))["layers"]["0"]["mlp"]["up"]
    assert float(jnp.abs(other - again).max()) > 0.01


# Qwen3.5's norms --------------------------------------------------------------------------------

HYBRID = dataclasses.replace(
    CONFIG,
    family="qwen3_5",
    layer_types=("linear", "full"),
    linear=LinearShape(key_heads=1, value_heads=2, key_dim=8, value_dim=2),
)


def test_b59_norms_store_an_offset_from_one_but_the_gated_norm_does_not():
    """x = [3, 4]: rms sqrt(12.5), x / rms = [0.8485, 1.1314]; times (1 + w) = [1, 1.1]."""
    x, w = jnp.array([3.0, 4.0]), jnp.array([0.0, 0.1])
    norm = RMSNorm(dataclasses.replace(HYBRID, norm_eps=1e-12), nnx.Rngs(0), 2)
    norm.weight[...] = w
    np.testing.assert_allclose(norm(x), [0.8485, 1.2445], atol=1e-4)
    plain = RMSNorm(dataclasses.replace(CONFIG, norm_eps=1e-12), nnx.Rngs(0), 2)
    plain.weight[...] = w
    np.testing.assert_allclose(plain(x), [0.0, 0.1131], atol=1e-4)
    gated = GatedNorm(dataclasses.replace(HYBRID, norm_eps=1e-12), nnx.Rngs(0))
    gated.weight[...] = w
    gate = jnp.array([1.0, 1.0])  # silu(1) = 0.7311
    np.testing.assert_allclose(gated(x, gate), 0.7311 * np.array([0.0, 0.1131]), atol=1e-4)


def test_b60_one_is_added_in_float32_and_the_stored_offset_comes_back(tmp_path):
    """0.001 in bfloat16 is 0.00099945; one plus that is 1 in bfloat16, 1.00099945 in float32."""
    small = jnp.full((32,), 0.001, jnp.bfloat16)
    norm = RMSNorm(dataclasses.replace(HYBRID, dtype="bfloat16"), nnx.Rngs(0), 32)
    norm.weight[...] = small
    wide = jnp.linspace(1.0, 2.0, 32)
    x = (wide / jnp.sqrt((wide**2).mean())).astype(jnp.float32)
    np.testing.assert_allclose(norm(x) / x, 1.00099945, atol=2e-6)

    model = LanguageModel(dataclasses.replace(HYBRID, dtype="bfloat16"))
    params = model.init(jax.random.key(0))
    params["layers"]["0"]["attention_norm"]["weight"] = small
    save_hf(make_loaded(model, params), tmp_path)
    again = load_model(tmp_path).params["layers"]["0"]["attention_norm"]["weight"]
    assert again.dtype == jnp.bfloat16 and again.tobytes() == small.tobytes()


# How it is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("config", [CONFIG, HYBRID], ids=["dense", "hybrid"])
def test_stacked_layers_and_remat_give_the_same_loss_and_gradients(config, remat):
    """``scan`` and ``remat`` change how, not what: the same weights, apart and stacked."""
    config = dataclasses.replace(config, n_layers=4, layer_types=config.layer_types * 2)
    apart = LanguageModel(config)
    stacked = LanguageModel(dataclasses.replace(config, scan=True, remat=remat))
    params = apart.init(jax.random.key(3))
    period = stacked.config.period
    assert period == len(set(config.kinds)) and set(stacked.shapes["layers"]) == set(
        map(str, range(period))
    )

    def stack(tree):
        layers = tree["layers"]
        groups = [[layers[str(i)] for i in range(j, 4, period)] for j in range(period)]
        return tree | {
            "layers": {
                str(j): jax.tree.map(lambda *a: jnp.stack(a), *group)
                for j, group in enumerate(groups)
            }
        }

    ids = random_ids(2, 40)

    def loss(model, params):
        return (model.apply(params, ids) ** 2).mean()

    value, grads = jax.jit(jax.value_and_grad(lambda p: loss(apart, p)))(params)
    again, stacked_grads = jax.jit(jax.value_and_grad(lambda p: loss(stacked, p)))(stack(params))
    assert float(again) == pytest.approx(float(value), abs=1e-5)
    for a, b in zip(
        jax.tree.leaves(stack(grads)), jax.tree.leaves(stacked_grads), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_scan_compiles_a_program_whose_size_does_not_depend_on_depth():
    def lines(n_layers: int) -> int:
        model = LanguageModel(dataclasses.replace(CONFIG, n_layers=n_layers, scan=True))
        run = jax.jit(jax.grad(lambda p: model.apply(p, random_ids(1, 8)).sum()))
        return len(run.lower(model.shapes).as_text().splitlines())

    assert lines(2) == lines(12)


def test_weights_are_stored_in_one_dtype_and_computed_with_in_another():
    config = dataclasses.replace(CONFIG, dtype="bfloat16", param_dtype="float32")
    model = LanguageModel(config)
    params = model.init(jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert model.hidden(params, random_ids(1, 4)).dtype == jnp.bfloat16
    grads = jax.grad(lambda p: model.apply(p, random_ids(1, 4)).sum())(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(model.init_cache(1, 4))} == {
        jnp.dtype("bfloat16")
    }


@pytest.mark.parametrize("n_tokens", [300, 700])
def test_long_rows_in_loops_and_larger_tiles_give_the_same(params, monkeypatch, n_tokens):
    """Rows beyond the limits go another way: tiles computed again, then a loop over tiles."""
    rng = np.random.default_rng(0)
    ids = random_ids(2, n_tokens)
    cut = n_tokens // 2
    positions = np.r_[np.arange(cut), np.arange(cut - 40, n_tokens - 40)][None].repeat(2, 0)
    branches = np.r_[np.zeros(cut, int), np.ones(n_tokens - cut, int)][None].repeat(2, 0)
    cuts = np.where(branches > 0, cut - 40, FAR)
    segments = np.ones_like(ids)
    segments[:, -20:] = 0
    weights = jnp.asarray(rng.normal(size=(2, n_tokens, 50)), jnp.float32)

    def loss(p):
        logits = MODEL.apply(p, ids, positions, segments, branches, cuts)
        return (jnp.where(segments[..., None] > 0, logits, 0) * weights).mean()

    results = []
    for kept, unrolled in ((4096, 4096), (64, 4096), (64, 64)):
        monkeypatch.setattr(attention, "KEPT_TOKENS", kept)
        monkeypatch.setattr(attention, "UNROLLED_TOKENS", unrolled)
        results.append(jax.jit(jax.value_and_grad(lambda p: loss(p)))(params))
    for value, grads in results[1:]:
        assert float(value) == pytest.approx(float(results[0][0]), abs=1e-6)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(results[0][1]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_attention_of_tpu_is_refused_elsewhere(params):
    model = LanguageModel(dataclasses.replace(CONFIG, attention="splash"))
    with pytest.raises(ValueError, match="model.attention=splash needs a TPU, the device is cpu"):
        model.apply(params, random_ids(1, 4))
