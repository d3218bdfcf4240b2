"""Gated DeltaNet on packed tree rows and with a cache, against one plain sequence at a time.

The oracle is the same layer on rows that hold one sequence each, which the parity tests compare
with transformers, and the rule token by token in NumPy float64.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.model import delta_rule, deltanet
from agentspec.model.attention import Layout
from agentspec.model.config import LinearShape, ModelConfig
from agentspec.model.deltanet import DeltaNet, init_delta_cache

D, CHUNK = 12, 8
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
    linear=LinearShape(key_heads=2, value_heads=4, key_dim=6, value_dim=5, conv_kernel=4),
    chunk=CHUNK,
)
NO_CUT = 2**30
# Static shapes of the tree tests: one compilation serves all examples.
TOKENS, BRANCHES, BRANCH_TOKENS, PATHS = 64, 8, 20, 24


def split(config=CONFIG):
    layer = DeltaNet(config, nnx.Rngs(0))
    layer.A_log[...] = jnp.log(jnp.array([0.01, 0.1, 0.5, 4.0]))
    layer.norm.weight[...] += 0.3 * jnp.arange(5)
    layer.out[...] *= 2
    graph, state = nnx.split(layer)
    return graph, nnx.to_pure_dict(state)


GRAPH, PARAMS = split()


def run(params, x, layout):
    return nnx.merge(GRAPH, params)(x, layout)


@jax.jit
def append(params, x, cache, start, valid):
    return nnx.merge(GRAPH, params).cached(x, cache, start, valid)


def vectors(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# A tree is (trunk length, ((cut, branch length), ...)); a row is a list of trees.


def lay_out(trees, gap=0):
    """(Layout of one row, the row indices of each path), a path being a trunk or one branch's."""
    row = {name: [] for name in ("position", "segment", "branch", "cut")}
    spans, paths = [], []

    def put(positions, segment, branch, cut):
        first = len(row["position"])
        row["position"] += positions
        for name, value in (("segment", segment), ("branch", branch), ("cut", cut)):
            row[name] += [value] * len(positions)
        return list(range(first, first + len(positions)))

    put([0] * gap, 0, 0, NO_CUT)
    for segment, (trunk_tokens, branches) in enumerate(trees, 1):
        trunk = put(list(range(trunk_tokens)), segment, 0, NO_CUT)
        paths.append((trunk, 0))
        for branch, (cut, tokens) in enumerate(branches, 1):
            spans.append(put(list(range(cut, cut + tokens)), segment, branch, cut))
            paths.append((trunk[:cut] + spans[-1], cut))
    put([0] * (TOKENS - len(row["position"])), 0, 0, NO_CUT)
    index = np.full((1, BRANCHES, BRANCH_TOKENS), -1, np.int32)
    for n, span in enumerate(spans):
        index[0, n, : len(span)] = span
    arrays = [jnp.asarray(values, jnp.int32)[None] for values in row.values()]
    return Layout(*arrays, jnp.asarray(index)), paths


def _tree(params_and_x, layout, slope):
    params, x = params_and_x
    y = run(params, x, layout)
    return (y * slope).sum(), y


def _paths(params_and_x, index, new, slope):
    """The same loss with each path in a row of its own; a token counts in the path that owns it."""
    params, x = params_and_x
    rows = x[0][index]
    layout = Layout(jnp.broadcast_to(jnp.arange(TOKENS), index.shape))
    y = run(params, rows, layout)
    owner = jnp.where(new, index, TOKENS)
    row = jnp.zeros((TOKENS + 1, D)).at[owner].set(y)[None, :TOKENS]
    return (row * slope).sum(), row


tree = jax.jit(jax.value_and_grad(_tree, has_aux=True))
paths_apart = jax.jit(jax.value_and_grad(_paths, has_aux=True))


def check_tree(trees, gap=0):
    layout, paths = lay_out(trees, gap)
    index = np.zeros((PATHS, TOKENS), np.int32)
    new = np.zeros((PATHS, TOKENS), bool)
    for p, (path, own_from) in enumerate(paths):
        index[p, : len(path)] = path
        new[p, own_from : len(path)] = True
    real = np.asarray(layout.segment_ids_BT[0] > 0)
    slope = vectors(1, TOKENS, D, seed=5) * real[None, :, None]
    both = PARAMS, vectors(1, TOKENS, D, seed=6)
    (_, ours), ours_slopes = tree(both, layout, slope)
    (_, apart), apart_slopes = paths_apart(both, index, new, slope)
    np.testing.assert_allclose(ours[0, real], apart[0, real], rtol=0, atol=1e-5)
    assert np.isfinite(ours).all()

    def close(path, a, b):
        scale = max(1.0, float(jnp.abs(b).max()))
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=1e-5, err_msg=name)

    jax.tree.map_with_path(close, ours_slopes, apart_slopes)


@pytest.mark.parametrize(
    ("trees", "gap"),
    [
        ([(20, ((16, 5),))], 0),  # the cut on a chunk's border
        ([(20, ((1, 5), (20, 3)))], 0),  # the first and the last possible cut
        ([(20, ((11, 1), (7, 1)))], 0),  # branches of one token
        ([(20, ((11, 4), (11, 9), (11, 1)))], 0),  # a shared cut
        ([(5, ((3, 2),)), (9, ((1, 20), (9, 2), (4, 3))), (13, ((12, 1),))], 0),  # several trees
        ([(2, ((2, 3), (1, 3))), (1, ((1, 1),))], 3),  # trees that start within a chunk, short
        ([(8, ((8, 8),)), (8, ((8, 8), (3, 8)))], 0),  # everything on borders
        ([(30, ()), (5, ())], 0),  # no branches
    ],
)
def test_tree_row_equals_separate_rows(trees, gap):
    check_tree(trees, gap)


@st.composite
def tree_rows(draw):
    room, n_branches, trees = TOKENS, BRANCHES, []
    for _ in range(draw(st.integers(1, 4))):
        if room < 1:
            break
        trunk = draw(st.integers(1, min(room, 30)))
        room -= trunk
        branches = []
        for _ in range(draw(st.integers(0, 4))):
            if room < 1 or n_branches < 1:
                break
            tokens = draw(st.integers(1, min(room, BRANCH_TOKENS)))
            branches.append((draw(st.integers(1, trunk)), tokens))
            room, n_branches = room - tokens, n_branches - 1
        trees.append((trunk, tuple(branches)))
    return trees


@settings(max_examples=40, deadline=None, derandomize=True)
@given(tree_rows())
def test_any_tree_row_equals_separate_rows(trees):
    check_tree(trees)


def test_nothing_passes_a_segment_border_or_into_the_trunk():
    """The gradient of one group's outputs to every other token is exactly zero."""
    layout, _ = lay_out([(11, ((4, 5), (11, 3))), (21, ((9, 6), (9, 7)))])
    segment, branch = np.asarray(layout.segment_ids_BT[0]), np.asarray(layout.branch_ids_BT[0])
    position, cut = np.asarray(layout.positions_BT[0]), np.asarray(layout.cuts_BT[0])
    both, slope = (PARAMS, vectors(1, TOKENS, D)), vectors(1, TOKENS, D, seed=1)
    for group in {(s, b) for s, b in zip(segment, branch, strict=True) if s}:
        mine = (segment == group[0]) & (branch == group[1])
        last = position[mine].max()
        seen = (segment == group[0]) & (position <= last)
        seen &= (branch == group[1]) | ((branch == 0) & (position < cut[mine][0]))
        _, (_, x_slope) = tree(both, layout, slope * mine[None, :, None])
        touched = np.abs(x_slope[0]).max(axis=-1)
        assert (touched[~seen] == 0).all(), group
        assert (touched[seen] > 0).all(), group


def test_other_segments_do_not_change_a_bit():
    layout, _ = lay_out([(11, ((4, 5),)), (21, ((9, 6),))])
    x = vectors(1, TOKENS, D)
    second = np.asarray(layout.segment_ids_BT[0] == 2)
    changed = np.where(second[None, :, None], x, 1000 * x[:, ::-1])
    (_, before), _ = tree((PARAMS, x), layout, x)
    (_, after), _ = tree((PARAMS, changed), layout, x)
    np.testing.assert_array_equal(before[0, second], after[0, second])


def test_branches_need_their_indices():
    layout, _ = lay_out([(11, ((4, 5),))])
    with pytest.raises(ValueError, match="branch_ids_BT without branches_BNJ"):
        run(PARAMS, vectors(1, TOKENS, D), layout._replace(branches_BNJ=None))


def test_heads_apart_give_the_same(monkeypatch):
    """Long rows take some key heads at a time: here one of two, with its two value heads."""
    layout, _ = lay_out([(11, ((4, 5), (9, 3))), (21, ((9, 6),))])
    both, slope = (PARAMS, vectors(1, TOKENS, D)), vectors(1, TOKENS, D, seed=1)
    (_, whole), whole_slopes = tree(both, layout, slope)
    monkeypatch.setattr(deltanet, "LONG_TOKENS", TOKENS - 1)
    monkeypatch.setattr(deltanet, "KEY_HEADS", 1)
    cut, parts_cut = deltanet._cut_heads, []

    def counting(heads, n):
        parts_cut.append(n)
        return cut(heads, n)

    monkeypatch.setattr(deltanet, "_cut_heads", counting)
    apart = jax.jit(lambda *args: jax.value_and_grad(_tree, has_aux=True)(*args))
    (_, parts), parts_slopes = apart(both, layout, slope)
    assert parts_cut == [2]
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-5)
    for a, b in zip(jax.tree.leaves(parts_slopes), jax.tree.leaves(whole_slopes), strict=True):
        scale = max(1.0, float(np.abs(b).max()))
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=1e-5)


def test_no_room_for_branches_means_none():
    x, zeros = vectors(R, 21, D), jnp.zeros((R, 21), jnp.int32)
    layout = Layout(zeros + jnp.arange(21), None, zeros, zeros + NO_CUT, zeros[:, None, :0])
    # two programs: equal to the last bit on some CPUs only
    np.testing.assert_allclose(jax.jit(run)(PARAMS, x, layout), full(x), rtol=0, atol=1e-5)


def test_missing_sizes_are_named():
    config = dataclasses.replace(CONFIG, linear=None, layer_types=())
    with pytest.raises(ValueError, match=r"model\.linear"):
        DeltaNet(config, nnx.Rngs(0))


# The cached tests have three rows and steps of 1 or WIDE tokens: two compilations serve them all.
R, WIDE = 3, 24


@jax.jit
def full(x):
    return run(PARAMS, x, Layout(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])))


def feed(x, cache, start, valid):
    """Appends the first tokens of x, with unused tokens behind them; the results of the used."""
    width, used = (1 if x.shape[1] == 1 else WIDE), x.shape[1]
    fed = np.full((R, width, D), 7.0, np.float32)
    fed[:, :used] = x
    start, valid = (jnp.broadcast_to(jnp.asarray(n, jnp.int32), R) for n in (start, valid))
    out, cache = append(PARAMS, fed, cache, start, valid)
    assert np.isfinite(out).all()
    return out[:, :used], cache


@pytest.mark.parametrize(
    "pieces", [[1] * 21, [21], [8, 8, 5], [3, 1, 1, 9, 2, 5], [20, 1]], ids=str
)
def test_cached_in_pieces_equals_full(pieces):
    x = vectors(R, 21, D)
    cache, start, outs = init_delta_cache(CONFIG, R), 0, []
    for size in pieces:
        out, cache = feed(x[:, start : start + size], cache, start, size)
        outs.append(out)
        start += size
    np.testing.assert_allclose(np.concatenate(outs, axis=1), full(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [1, 5])
def test_rows_without_valid_tokens_keep_their_cache_to_the_bit(width):
    x = vectors(R, 20 + width, D)
    _, cache = feed(x[:, :20], init_delta_cache(CONFIG, R), 0, 20)
    out, after = feed(x[:, 20:], cache, [20, 20, 0], [0, width, 0])
    for old, new in zip(cache, after, strict=True):
        np.testing.assert_array_equal(old[jnp.array([0, 2])], new[jnp.array([0, 2])])
        assert (np.asarray(old[1]) != np.asarray(new[1])).any()
    np.testing.assert_allclose(out[1], full(x)[1, 20:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", [1, 5])
def test_start_zero_forgets_the_row(width):
    """A row handed to a new sequence gives bit for bit what a fresh cache gives."""
    x, fresh = vectors(R, 20 + width, D), init_delta_cache(CONFIG, R)
    _, stale = feed(50 * x[:, :20], fresh, 0, 20)
    again, anew = (feed(x[:, 20:], cache, 0, width) for cache in (stale, fresh))
    jax.tree.map(np.testing.assert_array_equal, again, anew)


def rule_by_hand(q, k, v, decay, beta):
    """The recurrence of one head in float64, as the module docstring writes it."""
    state, outs = np.zeros((q.shape[1], v.shape[1])), []
    for t in range(len(q)):
        state = np.exp(decay[t]) * state
        state = state + np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        outs.append(state.T @ q[t])
    return np.array(outs), state


rule = jax.jit(delta_rule.chunked, static_argnums=1)


@pytest.mark.parametrize("kind", ["plain", "alike", "sudden"])
@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_rule_equals_the_recurrence(kind, chunk):
    """Also where keys are nearly the same (the chunk's matrix is badly conditioned), and where a
    slow decay follows one that empties the state.
    """
    T, X, Y = 64, 6, 4
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(T, size)) for size in (X, X, Y))
    decay, beta = -rng.exponential(0.3, size=T), rng.uniform(size=T)
    if kind == "alike":
        k = 1 + 0.01 * k
        decay, beta = 0 * decay, 0.99 + 0 * beta
    if kind == "sudden":
        decay[::7] = -300.0
        decay[1::7] = -1e-3
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    wanted, wanted_state = rule_by_hand(q, k, v, decay, beta)
    arrays = (jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, v, decay, beta))
    out, state, _ = rule(delta_rule.Tokens(*arrays), chunk)
    np.testing.assert_allclose(out[0, :, 0], wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state[0, 0], wanted_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(dtype):
    """Weights stay float32, results come in the compute dtype, the state is float32 always."""
    config = dataclasses.replace(CONFIG, dtype=dtype, param_dtype="float32")
    layer = DeltaNet(config, nnx.Rngs(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer))} == {jnp.dtype("float32")}
    x, layout = jnp.asarray(vectors(1, 10, D), dtype), Layout(jnp.arange(10)[None])
    assert jax.eval_shape(lambda x: layer(x, layout), x).dtype == x.dtype
    after = jax.eval_shape(layer.cached, x, init_delta_cache(config, 1), *2 * [jnp.zeros(1, int)])
    assert (after[0].dtype, after[1].conv_RWC.dtype) == (x.dtype, x.dtype)
    assert after[1].state_RHXY.dtype == jnp.float32
