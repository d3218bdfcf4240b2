"""The splash kernel, interpreted on CPU, against a dense softmax in float64 written from the rule.

Reference: query i sees key j iff both are in one tree, j is no later in the row, and j is in i's
own branch or is a trunk token at a position before i's cut. Its gradient is the softmax's formula.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentspec.mesh import make_mesh
from agentspec.model import splash
from agentspec.model.attention import Layout

NO_CUT = 2**30
Tree = tuple[int, list[tuple[int, int]]]  # trunk tokens, and (cut, tokens) of each branch


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(splash, "BLOCK_TOKENS", 128)  # several blocks in a short row


@dataclasses.dataclass
class Token:
    tree: int
    branch: int
    position: int
    cut: int


def lay_out(trees: list[Tree], length: int) -> list[Token]:
    tokens = []
    for tree, (trunk, branches) in enumerate(trees, 1):
        tokens += [Token(tree, 0, p, NO_CUT) for p in range(trunk)]
        for branch, (cut, size) in enumerate(branches, 1):
            tokens += [Token(tree, branch, cut + n, cut) for n in range(size)]
    assert len(tokens) <= length
    return tokens + [Token(0, 0, 0, 0)] * (length - len(tokens))


def layout_of(rows: list[list[Token]], branches_BNJ=None) -> Layout:
    def field(name: str):
        return jnp.asarray([[getattr(token, name) for token in row] for row in rows], jnp.int32)

    return Layout(field("position"), field("tree"), field("branch"), field("cut"), branches_BNJ)


def visible(row: list[Token]) -> np.ndarray:
    seen = np.zeros((len(row), len(row)), bool)
    for i, q in enumerate(row):
        for j, k in enumerate(row[: i + 1]):
            own = k.branch == q.branch and k.position <= q.position
            trunk = k.branch == 0 and k.position < q.cut
            seen[i, j] = q.tree == k.tree and (own or trunk)
    return seen


def dense(q, k, v, slope, seen):
    """Attention of one row in float64, and the gradients of (out * slope).sum() in q, k, v."""
    q, k, v, slope = (np.asarray(x, np.float64) for x in (q, k, v, slope))
    (H, _, E), K = q.shape, k.shape[0]
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for h in range(H):
        g = h // (H // K)
        scores = np.where(seen, q[h] @ k[g].T / np.sqrt(E), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[h] = weights @ v[g]
        d_weights = slope[h] @ v[g].T
        d_scores = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True))
        dq[h] = d_scores @ k[g] / np.sqrt(E)
        dk[g] += d_scores.T @ q[h] / np.sqrt(E)
        dv[g] += weights.T @ slope[h]
    return out, dq, dk, dv


def inputs(B, H, K, T, E, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(B, H, T, E), (B, K, T, E), (B, K, T, E), (B, H, T, E)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@jax.jit
def run(q, k, v, slope, layout):
    attend = functools.partial(splash.splash_attend, layout=layout, interpret=True)
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(slope)


def check(rows: list[list[Token]], arrays, results, atol=1e-5):
    """Real tokens equal the dense softmax; padding is finite, and its gradients are 0."""
    for b, row in enumerate(rows):
        real = np.array([token.tree > 0 for token in row])
        expected = dense(*(x[b] for x in arrays), visible(row))
        for name, got, want in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
            got = np.asarray(got[b])
            np.testing.assert_allclose(
                got[:, real], want[:, real], atol=atol, rtol=0, err_msg=f"{name} of row {b}"
            )
            assert np.isfinite(got).all()
            assert name == "out" or not got[:, ~real].any()


def only_real(slope, rows):
    real = np.array([[token.tree > 0 for token in row] for row in rows])
    return slope * real[:, None, :, None]


def test_two_rows_of_grouped_heads():
    rows = [lay_out([(20, [(5, 10), (20, 10)])], 40), lay_out([(7, [(1, 3)]), (10, [])], 40)]
    q, k, v, slope = inputs(2, 4, 2, 40, 128)
    slope = only_real(slope, rows)
    check(rows, (q, k, v, slope), run(q, k, v, slope, layout_of(rows)))


def test_segments():
    row = lay_out([(100, []), (1, []), (120, [])], 250)
    q, k, v, slope = inputs(1, 2, 1, 250, 256)
    slope = only_real(slope, [row])
    layout = layout_of([row])._replace(branch_ids_BT=None, cuts_BT=None)
    check([row], (q, k, v, slope), run(q, k, v, slope, layout))


def test_one_sequence():
    row = lay_out([(130, [])], 130)
    q, k, v, slope = inputs(1, 1, 1, 130, 64)
    check([row], (q, k, v, slope), run(q, k, v, slope, Layout(jnp.arange(130)[None])))


def test_a_bound_on_branch_lengths_changes_nothing():
    """Numbers are packed by the bound, the longest branch here: 6 tokens, 3 bits. Also no cuts."""
    row = lay_out([(9, [(9, 6), (9, 5)]), (3, [(3, 6), (3, 1)])], 40)
    q, k, v, slope = inputs(1, 1, 1, 40, 128)
    slope = only_real(slope, [row])
    layout = layout_of([row], jnp.zeros((1, 4, 6), jnp.int32))._replace(cuts_BT=None)
    check([row], (q, k, v, slope), run(q, k, v, slope, layout))


T = 300  # three blocks of 128, the last one padded


@st.composite
def rows_of_trees(draw, length: int = T):
    trees: list[Tree] = []
    left = length
    while left > 0 and draw(st.booleans() if trees else st.just(True)):
        trunk = draw(st.integers(1, left))
        left -= trunk
        branches = []
        while left > 0 and draw(st.booleans()):
            size = draw(st.integers(1, left))
            left -= size
            branches.append((draw(st.integers(1, trunk)), size))
        trees.append((trunk, branches))
    return lay_out(trees, length)


@settings(max_examples=8, deadline=None)
@example(
    # Branches at the same cut, at cut 1 and at the trunk's end; one tree without; padding.
    lay_out([(60, [(1, 10), (30, 20), (30, 5), (60, 40)]), (50, [(50, 30)]), (20, [])], T),
    0,
)
@example(lay_out([(160, [(70, 60), (140, 80)])], T), 1)  # both across block borders
@given(rows_of_trees(), st.integers(0, 2**16))
def test_any_row_of_trees(row, seed):
    q, k, v, slope = inputs(1, 2, 1, len(row), 128, seed)
    slope = only_real(slope, [row])
    check([row], (q, k, v, slope), run(q, k, v, slope, layout_of([row])))


def test_blocks_that_nobody_sees_are_skipped():
    """A key that is read, even with weight 0, would spread its NaN."""
    row = lay_out([(128, []), (90, [(50, 82)])], T)
    q, k, v, slope = inputs(1, 2, 1, T, 128)
    k, v = k.at[:, :, :128].set(jnp.nan), v.at[:, :, :128].set(jnp.nan)
    for result in run(q, k, v, slope.at[:, :, :128].set(0), layout_of([row])):
        assert jnp.isfinite(result[:, :, 128:]).all()


def test_under_scan():
    """Two layers, each taking the output of the one before as its queries."""
    row = lay_out([(20, [(5, 10), (20, 10)])], 40)
    q, k, v, slope = inputs(1, 1, 1, 40, 128)
    layout = layout_of([row])

    @jax.jit
    def two_layers(q):
        def layer(x, _):
            return splash.splash_attend(x, k, v, layout, interpret=True), None

        return jax.lax.scan(layer, q, None, length=2)[0]

    out, pull = jax.vjp(two_layers, q)
    middle, *_ = dense(q[0], k[0], v[0], slope[0], visible(row))
    want, middle_slope, *_ = dense(middle, k[0], v[0], slope[0], visible(row))
    _, want_slope, *_ = dense(q[0], k[0], v[0], middle_slope, visible(row))
    np.testing.assert_allclose(out[0], want, atol=1e-5, rtol=0)
    np.testing.assert_allclose(pull(slope)[0][0], want_slope, atol=1e-5, rtol=0)


def test_bfloat16():
    row = lay_out([(20, [(5, 10), (20, 10)])], 40)
    q, k, v, _ = (x.astype(jnp.bfloat16) for x in inputs(1, 2, 1, 40, 128))
    out = splash.splash_attend(q, k, v, layout_of([row]), interpret=True)
    exact = dense(q[0], k[0], v[0], q[0], visible(row))[0]
    assert out.dtype == jnp.bfloat16
    # bfloat16 keeps 8 bits: scores below 4 move by 4 * 2^-8, and the weights by as large a part.
    np.testing.assert_allclose(np.asarray(out[0], np.float32), exact, atol=4 * 2**-8, rtol=2**-8)


def test_sharded_over_rows_and_heads():
    mesh = make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
    rows = [lay_out([(20, [(5, 10), (20, 10)])], 48), lay_out([(7, [(1, 3)]), (10, [])], 48)]
    q, k, v, slope = inputs(2, 4, 2, 48, 128)
    slope = only_real(slope, rows)

    @jax.jit
    def sharded(q, k, v, slope, layout):
        out, pull = jax.vjp(
            lambda q, k, v: splash.splash_attend_sharded(q, k, v, layout, mesh, interpret=True),
            q, k, v,
        )  # fmt: skip
        return out, *pull(slope)

    check(rows, (q, k, v, slope), sharded(q, k, v, slope, layout_of(rows)))


def test_errors_name_what_was_got():
    q, k, _, _ = inputs(1, 3, 2, 8, 128)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 key heads"):
        splash.splash_attend(q, k, k, Layout(jnp.arange(8)[None]))
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with pytest.raises(ValueError, match="1 rows are not divisible by 4 devices"):
        splash.splash_attend_sharded(q, k, k, Layout(jnp.arange(8)[None]), mesh)
    q, i = jnp.zeros((1, 1, 2**17, 1)), jnp.zeros((1, 2**17), jnp.int32)
    with pytest.raises(ValueError, match="131072 tokens with branches of up to 131072"):
        jax.eval_shape(splash.splash_attend, q, q, q, Layout(i, i, i, i))
    short = Layout(i, i, i, i, jnp.zeros((1, 2, 1024), jnp.int32))
    assert jax.eval_shape(splash.splash_attend, q, q, q, short).shape == q.shape


def test_says_when_jax_has_another_kernel(monkeypatch):
    monkeypatch.delattr(splash.kernel, "_splash_attention_bwd_dq")
    spec = importlib.util.spec_from_file_location("splash_again", splash.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "splash_again", module)
    with pytest.raises(ImportError, match="no _splash_attention_bwd_dq: install jax>=0.10.2"):
        spec.loader.exec_module(module)
