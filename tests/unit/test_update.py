"""The update on a tiny real model: accumulation, losses, temperatures, failure, sharding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from agentspec.losses.sft import logps_of
from agentspec.mesh import make_mesh
from agentspec.metrics import METRICS
from agentspec.model.config import ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.optim import Optimizer, update_count
from agentspec.settings import LossSettings
from agentspec.tokens.pack import pack
from agentspec.types import Branch, TreeRow
from agentspec.update import NonFiniteError, make_update

T = 16
# Adam's first step is the gradient's sign unless eps says otherwise, whatever is left of a zero
OPTIMIZER = Optimizer(lr=0.01, eps=1e-4)


@pytest.fixture(scope="module")
def model():
    return LanguageModel(ModelConfig(64, 16, 2, 4, 2, 4, 32, 10000.0))


@pytest.fixture(scope="module")
def logits_of(model):
    return jax.jit(model.apply)


@pytest.fixture(scope="module")
def start(model):
    return jax.tree.map(np.asarray, jax.jit(model.init)(jax.random.key(0)))


@pytest.fixture(scope="module")
def updates(model):
    """Updates by settings, each compiled once."""
    made = {}

    def get(kind="policy", **changes):
        loss = {k: v for k, v in changes.items() if k in LossSettings.__dataclass_fields__}
        rest = {k: v for k, v in changes.items() if k not in loss}
        key = (kind, str(sorted(changes)), str(loss), str(rest.get("temperature")))
        if key not in made:
            made[key] = make_update(model, OPTIMIZER, LossSettings(**loss), kind, **rest)
        return made[key]

    return get


def fresh(start):
    return OPTIMIZER.init(jax.tree.map(jnp.asarray, start))


def trees(seed=0, n=5):
    rng = np.random.default_rng(seed)

    def ids(k):
        return tuple(int(i) for i in rng.integers(1, 64, k))

    def logps(k):
        return tuple(float(x) for x in -rng.uniform(3, 5, k))

    rows = []
    for i in range(n):
        k = int(rng.integers(4, 8))
        mask = (0, *(int(m) for m in rng.integers(0, 2, k - 2)), 1)
        branches = ()
        if i % 2:
            branches = (Branch(2, ids(3), (0, 1, 1), logps(3), -0.7),)
        rows.append(TreeRow(ids(k), mask, logps(k), float(rng.normal()), branches))
    return rows


def singles(rows):
    """Every trunk and branch as a plain row of its own."""
    out = []
    for row in rows:
        out.append(dataclasses.replace(row, branches=()))
        for b in row.branches:
            zeros = (0,) * b.cut
            out.append(
                TreeRow(
                    row.ids[: b.cut] + b.ids, zeros + b.mask, (0.0,) * b.cut + b.logps, b.advantage
                )
            )
    return out


def close(a, b, atol=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


def loop(logits_of, params, rows, value_of, how="token_mean", temperature=1.0):
    """A loss computed row by row in NumPy float64 from the model's logits."""
    per_row = []
    for row in singles(rows):
        ids = np.zeros((1, T), int)
        ids[0, : len(row.ids)] = row.ids
        logits = np.asarray(logits_of(params, ids)[0], np.float64) / temperature
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        per_row.append(
            [
                value_of(logp[t - 1, row.ids[t]], row.logps[t], row.advantage)
                for t in range(1, len(row.ids))
                if row.mask[t]
            ]
        )
    if how == "sequence_mean":
        return np.mean([np.mean(r) for r in per_row if r])
    return np.mean([x for r in per_row for x in r])


def surrogate(logp, old, a):
    r = np.exp(logp - old)
    return -min(r * a, min(max(r, 0.8), 1.28) * a)


@pytest.mark.parametrize("how", ("token_mean", "sequence_mean"))
def test_policy_loss_of_packed_trees_like_the_loop_over_rows(logits_of, start, updates, how):
    update = updates(old_logp="sampler", aggregate=how)
    rows = trees()
    _, numbers = update(fresh(start), pack(rows, T, 2))
    want = loop(logits_of, start, rows, surrogate, how)
    assert numbers["loss"] == pytest.approx(want, abs=1e-5)
    gap = loop(logits_of, start, rows, lambda logp, old, a: abs(logp - old))
    assert numbers["logp_gap_mean"] == pytest.approx(gap, abs=1e-5)
    assert numbers["trained_tokens"] == sum(sum(r.mask) for r in singles(rows))
    assert set(numbers) <= set(METRICS)


def test_sft_is_the_mean_nll_of_trunks_and_branches(logits_of, start, updates):
    rows = trees(1)
    _, numbers = updates("sft")(fresh(start), pack(rows, T, 2))
    want = loop(logits_of, start, rows, lambda logp, old, a: -logp)
    assert numbers["loss"] == pytest.approx(want, abs=1e-5)


def test_b37_temperature_is_the_samplers_in_loss_and_gap(logits_of, start, updates):
    rows = trees(2)
    update = updates(old_logp="sampler", aggregate="token_mean")
    _, numbers = update(fresh(start), pack(rows, T, 2), temperature=0.5)
    want = loop(logits_of, start, rows, surrogate, temperature=0.5)
    assert numbers["loss"] == pytest.approx(want, abs=1e-5)
    # rows sampled by this very model at 0.5: the gap is 0 and the ratio 1
    exact = [_with_true_logps(logits_of, start, row, 0.5) for row in singles(rows)]
    _, numbers = update(fresh(start), pack(exact, T, 2), temperature=0.5)
    assert numbers["logp_gap_max"] < 1e-5
    assert numbers["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    _, numbers = update(fresh(start), pack(exact, T, 2), temperature=1.0)
    assert numbers["logp_gap_mean"] > 0.05


def _with_true_logps(logits_of, params, row, temperature):
    ids = np.zeros((1, T), int)
    ids[0, : len(row.ids)] = row.ids
    logits = logits_of(params, ids)
    logp, _ = logps_of(logits, np.roll(ids, -1), temperature)
    logps = [0.0, *(float(x) for x in logp[0, : len(row.ids) - 1])]
    return dataclasses.replace(row, logps=tuple(logps))


def test_micro_batches_of_any_split_give_the_same_step(start, updates):
    rows, update = trees(3, 6), updates()
    ends = []
    for rows_per_batch in (2, 8):
        batches = pack(rows, T, rows_per_batch)
        state, numbers = update(fresh(start), batches)
        ends.append((len(batches), state.params, numbers["loss"], numbers["grad_norm"]))
    assert [n for n, *_ in ends] == [2, 1]
    for _, params, loss, norm in ends[1:]:
        close(params, ends[0][1], 1e-5)
        assert (loss, norm) == pytest.approx(ends[0][2:], abs=1e-5)


def test_a_tree_has_the_gradient_of_its_separate_rows(start, updates):
    rows = trees(4, 3)
    (tree,) = pack(rows, T, 8)
    (plain,) = pack(singles(rows), T, 8)
    update = updates()
    _, a, _ = update.grads(start, tree)
    _, b, _ = update.grads(start, plain)
    close(a, b, 1e-6)


def test_chunked_logits_give_the_same_step(start, updates):
    batches = pack(trees(5), T, 2)
    a, na = updates()(fresh(start), batches)
    b, nb = updates(logits_chunk_tokens=5)(fresh(start), batches)
    assert na == pytest.approx(nb, abs=1e-5)
    close(a.params, b.params, 1e-5)


def test_with_the_trainers_own_old_logp_the_ratio_is_1(start, updates):
    _, numbers = updates()(fresh(start), pack(trees(6), T, 2))
    assert (numbers["ratio_mean"], numbers["ratio_max"], numbers["ratio_min"]) == (1, 1, 1)
    assert numbers["clip_low_frac"] == numbers["clip_high_frac"] == 0
    assert 0 < numbers["policy_entropy"] <= np.log(64) + 1e-5


def test_importance_weights_are_truncated(logits_of, start, updates):
    rows = trees(7)
    _, numbers = updates(importance_cap=1.1)(fresh(start), pack(rows, T, 2))
    weights = loop(logits_of, start, rows, lambda logp, old, a: min(np.exp(logp - old), 1.1))
    assert numbers["importance_mean"] == pytest.approx(weights, abs=1e-5)
    want = loop(logits_of, start, rows, lambda logp, old, a: -a * min(np.exp(logp - old), 1.1))
    assert numbers["loss"] == pytest.approx(want, abs=1e-5)


def test_kl_to_a_reference_that_survives_the_donation(model, start):
    params = jax.tree.map(jnp.asarray, start)
    update = make_update(model, OPTIMIZER, LossSettings(kl=0.1), reference_params=params)
    state = OPTIMIZER.init(params)
    batches = pack(trees(8), T, 2)
    state, first = update(state, batches)
    state, second = update(state, batches)
    assert first["kl"] == pytest.approx(0.0, abs=1e-7) and second["kl"] > 1e-5


def test_b40_a_tool_token_is_context_only(start, updates):
    # P P A A T T A: changing a T id leaves the terms of A A alone and takes none of its own
    ids, mask = (1, 2, 3, 4, 5, 6, 7), (0, 0, 1, 1, 0, 0, 1)
    row = TreeRow(ids, mask, (0.0,) * 7)
    other = dataclasses.replace(row, ids=(1, 2, 3, 4, 5, 60, 7))
    head = dataclasses.replace(row, mask=(0, 0, 1, 1, 0, 0, 0))
    update = updates("sft")

    def total(row):
        loss, _, metrics = update.grads(start, pack([row], T, 2)[0])
        return float(loss) * float(metrics["trained_tokens"]), float(metrics["trained_tokens"])

    (whole, n), (changed, m) = total(row), total(other)
    assert n == m == 3
    first_two, _ = total(head)
    first_two_changed, _ = total(dataclasses.replace(head, ids=other.ids))
    assert first_two == pytest.approx(first_two_changed, abs=1e-6)
    assert whole - first_two != pytest.approx(changed - first_two, abs=1e-4)  # as context it counts


def test_no_signal_moves_nothing_but_the_step(start, updates):
    update = updates()
    state, _ = update(fresh(start), pack(trees(9), T, 2))
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, numbers = update(state, [])
    close((state.params, state.opt_state), before, 0)
    assert (int(state.step), update_count(state)) == (2, 1)
    assert numbers == {"loss": 0, "grad_norm": 0, "trained_tokens": 0, "skipped": 1}


def test_a_loss_that_is_not_finite_stops_and_names_step_and_phase(start, updates):
    update = updates()
    state, _ = update(fresh(start), pack(trees(10), T, 2))
    broken = state.replace(params=jax.tree.map(lambda p: p * np.float32("nan"), state.params))
    with pytest.raises(NonFiniteError, match="step 1, phase speculator: loss nan"):
        update(broken, pack(trees(10), T, 2), phase="speculator")
    assert all(not p.is_deleted() for p in jax.tree.leaves(broken))  # nothing was donated
    inf = [dataclasses.replace(r, advantage=float("inf")) for r in singles(trees(10))]
    with pytest.raises(NonFiniteError, match="phase policy.*micro-batches"):
        update(state, pack(inf, T, 2))
    update(state, pack(trees(10), T, 2))  # and the state still works


def test_the_old_state_is_donated(start, updates):
    state = fresh(start)
    updates()(state, pack(trees(11), T, 2))
    assert all(p.is_deleted() for p in jax.tree.leaves(state.params))


def test_one_shape_is_compiled_once(start, updates):
    update, state, sizes = updates(), fresh(start), []
    for seed in range(3):
        state, _ = update(state, pack(trees(seed), T, 2), temperature=1.0 + seed / 10)
        sizes.append((update._grads._cache_size(), update._apply._cache_size()))
    assert sizes[0] == sizes[1] == sizes[2]


def test_sharded_over_8_devices_like_on_one(model, start, updates):
    mesh = make_mesh(data=2, fsdp=4)
    whole = NamedSharding(mesh, PartitionSpec())
    update = make_update(
        model, OPTIMIZER, LossSettings(), mesh=mesh
    )
    batches = pack(trees(12, 9), T, 8)
    state = OPTIMIZER.init(jax.device_put(start, whole))
    state, numbers = update(state, batches)
    alone, want = updates()(fresh(start), batches)
    assert numbers == pytest.approx(want, abs=1e-5)
    close(state.params, alone.params, 1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "rest", "message"),
    [
        ("ppo", {}, {}, "policy or sft, got 'ppo'"),
        ("policy", {"aggregate": "mean"}, {}, "'mean' is unknown"),
        ("policy", {"aggregate": "constant_length"}, {}, "needs max_tokens"),
        ("policy", {"kl": 0.1}, {}, "loss.kl is 0.1, which needs reference_params"),
        ("policy", {"old_logp": "sampler"}, {"importance_cap": 2.0}, "importance_cap needs"),
        ("policy", {"old_logp": "mine"}, {}, "trainer or sampler, got 'mine'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(model, kind, changes, rest, message):
    with pytest.raises(ValueError, match=message):
        make_update(model, Optimizer(), LossSettings(**changes), kind, **rest)
