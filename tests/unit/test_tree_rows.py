"""Tree rows train like separate rows: loss and every gradient, for a dense and a hybrid model.

The separate rows are plain: each branch stands behind its own copy of the trunk, as one trunk, so
nothing of the tree is used there.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.model.config import LinearShape, ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.optim import Optimizer
from agentspec.settings import LossSettings
from agentspec.tokens.pack import pack
from agentspec.types import Branch, TreeRow
from agentspec.update import Update, make_update

ROW_TOKENS = 96
SIZES = dict(
    vocab_size=64, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48, rope_theta=1e4
)
CONFIGS = {
    "dense": ModelConfig(n_layers=2, **SIZES),
    "hybrid": ModelConfig(
        n_layers=4,
        family="qwen3_5",
        rotary_dim=4,
        layer_types=("linear", "full", "linear", "full"),
        linear=LinearShape(key_heads=2, value_heads=4, key_dim=32, value_dim=8),
        scan=True,
        chunk=16,
        **SIZES,
    ),
}


@functools.cache
def made(name: str) -> tuple[Update, dict]:
    model = LanguageModel(CONFIGS[name])
    update = make_update(model, Optimizer(), LossSettings(aggregate="token_mean"))
    params = jax.jit(model.init)(jax.random.key(1))
    # wide embeddings, and wide keys above: gradients then answer calmly to rounding
    return update, params | {"embedding": params["embedding"] * 16}


@st.composite
def trees(draw) -> list[TreeRow]:
    """One to three trees that fit two rows: branches at equal, different and extreme cuts."""
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(int(x) for x in rng.integers(1, 64, n))

    def logps(n: int) -> tuple[float, ...]:
        return tuple(float(x) for x in -rng.uniform(3, 5, n))

    rows = []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(2, 40))
        mask = (0, *(int(x) for x in rng.integers(0, 2, n - 2)), 1)
        branches = []
        for _ in range(draw(st.integers(0, 4))):
            cut = draw(st.sampled_from([1, n, n // 2, 16, 17])) if n > 1 else 1
            k = draw(st.integers(2, 12))
            advantage = float(rng.normal())
            branches.append(Branch(min(cut, n), ids(k), (0,) + (1,) * (k - 1), logps(k), advantage))
        rows.append(TreeRow(ids(n), mask, logps(n), float(rng.normal()), tuple(branches)))
    return rows


def separate(rows: list[TreeRow]) -> list[TreeRow]:
    out = []
    for row in rows:
        out.append(TreeRow(row.ids, row.mask, row.logps, row.advantage))
        for b in row.branches:
            nothing = (0,) * b.cut
            before = row.ids[: b.cut], nothing, (0.0,) * b.cut
            out.append(
                TreeRow(before[0] + b.ids, before[1] + b.mask, before[2] + b.logps, b.advantage)
            )
    return out


def loss_and_grads(update: Update, params: dict, rows: list[TreeRow]):
    batches = pack(rows, ROW_TOKENS, 1, branch_table=True)
    denominator = update.denominator(batches)
    total, grads = 0.0, None
    for batch in batches:
        loss, new, _ = update.grads(params, batch, denominator)
        total += float(loss)
        grads = new if grads is None else jax.tree.map(np.add, grads, new)
    return total, grads


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=trees())
def test_trees_equal_separate_rows(name, rows):
    update, params = made(name)
    loss, grads = loss_and_grads(update, params, rows)
    plain_loss, plain_grads = loss_and_grads(update, params, separate(rows))
    assert loss == pytest.approx(plain_loss, abs=1e-5)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    for (path, got), wanted in zip(leaves, jax.tree.leaves(plain_grads), strict=True):
        np.testing.assert_allclose(
            got, wanted, rtol=0, atol=1e-5, err_msg=jax.tree_util.keystr(path)
        )


def test_a_hybrid_model_says_what_it_needs():
    update, params = made("hybrid")
    row = TreeRow((1, 2, 3), (0, 1, 1), (0.0,) * 3, 1.0, (Branch(1, (4, 5), (0, 1), (0.0,) * 2),))
    (batch,) = pack([row], ROW_TOKENS, 1)
    with pytest.raises(ValueError, match="branches_BNJ"):
        update.grads(params, batch)


def test_the_table_of_branches_names_their_places():
    """Two trees in a row: trunk of 3, branches of 2 and 1; trunk of 2, branch of 2."""
    one = TreeRow(
        (1, 2, 3),
        (0, 1, 1),
        (0.0,) * 3,
        1.0,
        (Branch(2, (4, 5), (0, 1), (0.0,) * 2), Branch(1, (6,), (0,), (0.0,))),
    )
    two = TreeRow((7, 8), (0, 1), (0.0,) * 2, 1.0, (Branch(2, (9, 9), (0, 1), (0.0,) * 2),))
    (batch,) = pack([one, two], 12, 1, branch_table=True)
    assert batch.branches_BNJ.shape == (1, 4, 32)  # 3 branches, rounded up
    found = [[int(i) for i in row if i >= 0] for row in batch.branches_BNJ[0]]
    assert found == [[3, 4], [5], [8, 9], []]
    assert batch.ids_BT[0, [3, 4, 5, 8, 9]].tolist() == [4, 5, 6, 9, 9]
    (plain,) = pack([two], 12, 1)
    assert plain.branches_BNJ is None and "branches_BNJ" not in plain.arrays()
