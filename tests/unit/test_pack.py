"""Packing: layout by hand, masks of the reported cases, and the tree against separate rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.losses.sft import logps_of
from agentspec.model.config import ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.tokens.pack import NO_CUT, kept_tokens, pack
from agentspec.types import Branch, TreeRow


def row(ids, mask, advantage=1.0, branches=()):
    return TreeRow(tuple(ids), tuple(mask), tuple(-0.1 * i for i in ids), advantage, branches)


def branch(cut, ids, mask, advantage=1.0):
    return Branch(cut, tuple(ids), tuple(mask), tuple(-0.1 * i for i in ids), advantage)


def test_a_tree_and_a_plain_row_laid_out_by_hand():
    tree = row([1, 2, 3], [0, 1, 1], 2.0, (branch(2, [7, 8], [0, 1], -1.0),))
    (batch,) = pack([tree, row([4, 5], [0, 1], 0.5)], row_tokens=8, rows_per_batch=2)
    assert batch.shape == (2, 8)
    #                                      trunk   |branch| second |pad
    assert batch.ids_BT[0].tolist() == [1, 2, 3, 7, 8, 4, 5, 0]
    assert batch.positions_BT[0].tolist() == [0, 1, 2, 2, 3, 0, 1, 0]
    assert batch.segment_ids_BT[0].tolist() == [1, 1, 1, 1, 1, 2, 2, 0]
    assert batch.branch_ids_BT[0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert batch.cuts_BT[0].tolist() == [NO_CUT] * 3 + [2, 2] + [NO_CUT] * 3
    # entry t is about the next token of its own trunk or branch
    assert batch.targets_BT[0].tolist() == [2, 3, 0, 8, 0, 5, 0, 0]
    assert batch.mask_BT[0].tolist() == [1, 1, 0, 1, 0, 1, 0, 0]
    np.testing.assert_allclose(batch.old_logp_BT[0], [-0.2, -0.3, 0, -0.8, 0, -0.5, 0, 0])
    np.testing.assert_allclose(batch.advantage_BT[0], [2, 2, 0, -1, 0, 0.5, 0, 0])
    assert not batch.segment_ids_BT[1].any() and not batch.mask_BT[1].any()
    assert {a.dtype for a in batch.arrays().values()} == {np.dtype("int32"), np.dtype("float32")}
    seq = batch.sequence_ids_BT[0]
    assert len({seq[0], seq[3], seq[5]}) == 3 and seq[0] == seq[2] and seq[3] == seq[4]


def test_first_fit_keeps_the_order_and_fills_early_rows():
    rows = [row([1] * n, [0] + [1] * (n - 1)) for n in (5, 4, 3, 4)]
    first, second = pack(rows, row_tokens=8, rows_per_batch=1)
    # 5 -> row 0; 4 -> row 1; 3 fits behind the 5; 4 behind the 4
    assert first.segment_ids_BT[0].tolist() == [1] * 5 + [2] * 3
    assert second.segment_ids_BT[0].tolist() == [1] * 4 + [2] * 4
    assert pack([], 8, 1) == []


def test_b18_mask_from_lengths_where_pad_is_the_end_token():
    ends = [row([5, 6, 0], [0, 1, 1]), row([7, 0], [0, 1])]  # the id 0 ends a turn, and pads
    (batch,) = pack(ends, row_tokens=3, rows_per_batch=2)
    assert batch.mask_BT.tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batch.targets_BT.tolist() == [[6, 0, 0], [0, 0, 0]]


def test_b25_a_turn_that_is_token_0_only():
    (batch,) = pack([row([5, 0, *range(1, 8)], [0, 1] + [0] * 7)], row_tokens=9, rows_per_batch=1)
    assert batch.mask_BT.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.targets_BT[0, 0] == 0


def test_b26_rows_whose_mask_is_all_0_or_all_1_are_refused():
    with pytest.raises(ValueError, match="row 1: mask is 0 everywhere"):
        pack([row([1, 2], [0, 1]), row([1, 2], [0, 0])], 8, 1)
    with pytest.raises(ValueError, match="row 0, trunk: mask 1 on the first token"):
        pack([row([1, 2], [1, 1])], 8, 1)
    served = row([1, 2], [0, 0], branches=(branch(1, [3, 4], [0, 1]),))
    assert kept_tokens(served) == 1 and len(pack([served], 8, 1)) == 1


def test_b40_only_sampled_tokens_are_trained():
    # roles P P A A T T A
    (batch,) = pack([row([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 0, 1])], 7, 1)
    assert int(batch.mask_BT.sum()) == 3
    assert batch.targets_BT[batch.mask_BT == 1].tolist() == [3, 4, 7]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row([1] * 9, [0] + [1] * 8), "9 tokens.*row_tokens = 8"),
        (TreeRow((1, 2), (0, 1), (0.0,)), "2 ids, 2 mask entries and 1 log-probs"),
        (row([1, 2], [0, 1], branches=(branch(3, [3, 4], [0, 1]),)), r"cut 3 must lie in 1\.\.2"),
        (row([1, 2], [0, 1], branches=(branch(1, [3], [1]),)), "branch 0: mask 1 on the first"),
        (row([1, 2], [0, 2]), "must be 0 or 1"),
        (row([], []), "has no tokens"),
    ],
)
def test_rows_that_cannot_be_packed_say_why(bad, message):
    with pytest.raises(ValueError, match=message):
        pack([bad], row_tokens=8, rows_per_batch=1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=20), st.integers(1, 4))
def test_every_token_is_packed_once_and_in_order(lengths, rows_per_batch):
    rows, start = [], 1
    for n in lengths:
        rows.append(row(range(start, start + n), [0] + [1] * (n - 1)))
        start += n
    batches = pack(rows, 12, rows_per_batch)
    found = {}
    for b, batch in enumerate(batches):
        assert batch.shape == (rows_per_batch, 12)
        for r in range(rows_per_batch):
            for s in range(1, batch.segment_ids_BT[r].max() + 1):
                ids = batch.ids_BT[r][batch.segment_ids_BT[r] == s].tolist()
                found[ids[0]] = (ids, (b, r))
    assert [found[x.ids[0]][0] for x in rows] == [list(x.ids) for x in rows]
    assert sum(int(b.mask_BT.sum()) for b in batches) == sum(kept_tokens(r) for r in rows)


def test_a_packed_tree_has_the_logps_of_its_separate_rows():
    model = LanguageModel(ModelConfig(64, 16, 2, 4, 2, 4, 32, 10000.0))
    params = jax.jit(model.init)(jax.random.key(0))
    trunk, suffix = [3, 9, 4, 11, 30, 8], [50, 51]
    cuts = {2: [20, 21, 22], 5: [40, 41]}
    tree = row(
        trunk,
        [0, 1, 1, 0, 1, 1],
        branches=tuple(branch(c, suffix + ids, [0, 0] + [1] * len(ids)) for c, ids in cuts.items()),
    )
    (batch,) = pack([row([7, 7, 7], [0, 1, 1]), tree], row_tokens=24, rows_per_batch=1)
    apply = jax.jit(model.apply)
    logits = apply(
        params,
        batch.ids_BT,
        batch.positions_BT,
        batch.segment_ids_BT,
        batch.branch_ids_BT,
        batch.cuts_BT,
    )
    packed = np.asarray(logps_of(logits, batch.targets_BT)[0])[batch.mask_BT == 1]

    logits_of = jax.jit(lambda ids: jax.nn.log_softmax(model.apply(params, ids)))

    def alone(ids, predicted):
        padded = np.zeros((1, 24), int)
        padded[0, : len(ids)] = ids  # causal: what follows changes nothing
        logp = np.asarray(logits_of(padded)[0])
        return [float(logp[i - 1, ids[i]]) for i in predicted]

    want = alone([7, 7, 7], [1, 2]) + alone(trunk, [1, 2, 4, 5])
    for cut, ids in cuts.items():
        whole = trunk[:cut] + suffix + ids
        want += alone(whole, range(cut + 2, len(whole)))
    np.testing.assert_allclose(packed, want, atol=1e-5)
