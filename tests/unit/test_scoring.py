"""Rewards, advantages and branches of small episodes, all numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from fakes import SPECS, make_chat

from agentspec import scoring
from agentspec.settings import Settings
from agentspec.tokens.pack import pack
from agentspec.types import Candidate, Score, ToolCall, Trajectory, Turn

SUFFIX = (90, 91)
RED, BLUE = ToolCall("get", {"key": "red"}), ToolCall("get", {"key": "blue"})


def make_job(**sections: dict):
    """A job with these settings and a chat of two suffix tokens, which is all that scoring sees."""
    settings = Settings()
    for section, values in sections.items():
        part = dataclasses.replace(getattr(settings, section), **values)
        settings = dataclasses.replace(settings, **{section: part})
    specs = {spec.name: spec for spec in SPECS}
    chat = SimpleNamespace(suffix_ids=lambda: list(SUFFIX))
    return SimpleNamespace(
        settings=settings, chat=chat, worlds={"shop": None}, specs=lambda world: specs
    )


def episode(ids, turns=(), reward=0.0, mask=None) -> Trajectory:
    mask = mask or [0] * len(ids)
    return Trajectory(
        task_id="t",
        world="shop",
        ids=list(ids),
        mask=mask,
        logps=[-0.5 * m for m in mask],
        turns=list(turns),
        score=Score(reward, reward),
        final_state="",
        finish="answered",
        entropies=[0.25 * m for m in mask],
    )


def turn(start, *calls, candidates=()) -> Turn:
    return Turn(start, start + 1, "stop", calls=calls, candidates=tuple(candidates))


def guess(token, call=None, *problems) -> Candidate:
    """A prediction of two tokens, the first of which tells it from others."""
    return Candidate((token, 99), (-0.1 * token, -0.2), call, problems)


def advantages(rows) -> dict[int, float]:
    """Advantage by a branch's first predicted token."""
    return {b.ids[len(SUFFIX)]: b.advantage for row in rows for b in row.branches}


# --- the agent ---


def calling(reward, *calls):
    return episode([1, 2, 3], [turn(1, call) for call in calls], reward, mask=[0, 1, 1])


def test_agent_rewards_are_fined_for_exact_repeats():
    """R = 1, 0.9, 0, 0: mean 0.475, squares 0.9075, std sqrt(0.9075 / 3) = 0.55."""
    group = [
        calling(1.0, RED, BLUE),
        calling(1.0, RED, BLUE, RED),  # one repeat
        calling(0.0, RED),
        calling(0.0),
    ]
    rows, numbers = scoring.agent_rows(make_job(), [group])
    wanted = [0.525 / 0.55, 0.425 / 0.55, -0.475 / 0.55, -0.475 / 0.55]
    assert [row.advantage for row in rows] == pytest.approx(wanted, abs=1e-5)
    assert numbers["reward"] == pytest.approx(0.475) and numbers["dropped_groups_frac"] == 0
    assert rows[0].ids == (1, 2, 3) and rows[0].mask == (0, 1, 1)
    assert rows[0].logps == (0.0, -0.5, -0.5) and rows[0].branches == ()


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_the_repeat_penalty_is_a_key(penalty):
    """One of two: R = 1 and 1 - 2 * penalty; advantages of two that differ are +-1/sqrt(2)."""
    group = [calling(1.0, RED), calling(1.0, RED, RED, RED)]
    rows, numbers = scoring.agent_rows(make_job(reward={"repeat_penalty": penalty}), [group])
    assert numbers["reward"] == pytest.approx(1 - penalty)
    wanted = [] if penalty == 0 else [0.70710678, -0.70710678]
    assert [row.advantage for row in rows] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("drop", "n_rows"), [(True, 2), (False, 4)])
def test_uniform_agent_groups_are_dropped_or_kept_without_advantage(drop, n_rows):
    same = [calling(1.0, RED), calling(1.0, RED)]
    mixed = [calling(1.0, RED), calling(0.0, RED)]
    job = make_job(loss={"drop_uniform_groups": drop})
    rows, numbers = scoring.agent_rows(job, [same, mixed])
    assert len(rows) == n_rows and numbers["dropped_groups_frac"] == 0.5
    assert [row.advantage for row in rows[:-2]] == [0.0] * (n_rows - 2)
    assert rows[-2].advantage == -rows[-1].advantage == pytest.approx(0.70710678, abs=1e-5)
    assert numbers["reward"] == 0.75 and numbers["success"] == 0.75


def test_members_of_an_agent_group_share_their_prompt():
    """Prompt 7 8 9: a trunk of 7 8, since the 9 predicts each member's first token."""
    group = [
        episode([7, 8, 9, 1, 2], [turn(3, RED)], 1.0, [0, 0, 0, 1, 1]),
        episode([7, 8, 9, 3], [turn(3, RED)], 0.0, [0, 0, 0, 1]),
    ]
    (row,), _ = scoring.agent_rows(make_job(), [group])
    assert row.ids == (7, 8) and row.mask == (0, 0)
    assert [b.cut for b in row.branches] == [2, 2]
    assert [b.ids for b in row.branches] == [(9, 1, 2), (9, 3)]
    assert [b.mask for b in row.branches] == [(0, 1, 1), (0, 1)]
    assert [b.logps for b in row.branches] == [(0.0, -0.5, -0.5), (0.0, -0.5)]
    wanted = [0.70710678, -0.70710678]
    assert [b.advantage for b in row.branches] == pytest.approx(wanted, abs=1e-5)
    (batch,) = pack([row], 8, 1)
    assert batch.targets_BT[0][batch.mask_BT[0] == 1].tolist() == [1, 2, 3]

    silent = episode([7, 8, 9], [turn(2)], 0.5)  # sampled nothing: trains nothing
    (again,), _ = scoring.agent_rows(make_job(), [[*group, silent]])
    assert [b.ids for b in again.branches] == [b.ids for b in row.branches]
    assert scoring.agent_rows(make_job(loss={"drop_uniform_groups": False}), [[silent]])[0] == []

    job = make_job(pack={"row_tokens": 6})  # two trees, the prompt in each
    rows, _ = scoring.agent_rows(job, [group])
    assert [row.ids for row in rows] == [(7, 8)] * 2
    assert [len(row.branches) for row in rows] == [1, 1]


def test_numbers_of_a_batch_of_episodes():
    broken = dataclasses.replace(turn(2), problems=("cut",))
    a = episode([1, 2, 3, 4], [turn(1, RED, candidates=[guess(5, RED)]), broken], 1.0, [0, 1, 1, 0])
    b = episode([1, 2], [turn(1, BLUE, candidates=[guess(6, None, "bad")])], 0.0, [0, 1])
    unasked = episode([1, 2], [turn(1, BLUE)], 1.0, [0, 1])
    numbers = scoring.episode_numbers(make_job(), [a, b, unasked])
    assert numbers == pytest.approx(
        {
            "success": 2 / 3,
            "hit_at_1": 1 / 2,  # RED was predicted, BLUE was not, the third was not asked
            "parse_failure_frac": 1 / 2,
            "malformed_frac": 1 / 4,
            "turns": 4 / 3,
            "episode_tokens": 8 / 3,
            "entropy": 0.25,
        }
    )


# --- the speculator ---


def three(target, *, ids=(10, 11, 12), first=1):
    """A prefix of two tokens with three predictions: red, blue, none; the call was ``target``."""
    found = [guess(first, RED), guess(first + 1, BLUE), guess(first + 2)]
    return episode(ids, [turn(2, *([target] if target else []), candidates=found)])


def test_equal_prefixes_share_a_group_rewarded_by_all_their_targets():
    """Targets red, red, blue: rewards 2/3, 1/3, 0; mean 1/3, std 1/3, advantages 1, 0, -1."""
    group = [three(RED), three(RED, first=4), three(BLUE, first=7, ids=(10, 11, 50, 51))]
    rows, numbers = scoring.speculator_rows(make_job(), group)
    assert advantages(rows) == pytest.approx({1: 1.0, 2: 0.0, 3: -1.0}, abs=1e-5)
    (row,) = rows
    assert row.ids == (10, 11) and row.mask == (0, 0)
    branch = row.branches[0]
    assert (branch.cut, branch.ids, branch.mask) == (2, (90, 91, 1, 99), (0, 0, 1, 1))
    assert branch.logps == (0.0, 0.0, -0.1, -0.2)
    assert numbers["speculator_reward"] == pytest.approx(1 / 3)
    assert (numbers["prefixes"], numbers["no_call_prefixes"]) == (1, 0)


def test_unmerged_each_prefix_has_its_own_target():
    """Rewards 1, 0, 0 and 0, 1, 0: mean 1/3, std sqrt(1/3); 2/3 and -1/3 of that."""
    job = make_job(speculator={"merge_equal_prefixes": False})
    rows, numbers = scoring.speculator_rows(job, [three(RED), three(BLUE, first=4)])
    high, low = 2 / 3**0.5, -1 / 3**0.5
    wanted = {1: high, 2: low, 3: low, 4: low, 5: high, 6: low}
    assert advantages(rows) == pytest.approx(wanted, abs=1e-5)
    assert len(rows) == 2 and numbers["prefixes"] == 2


def test_prefixes_that_differ_in_one_token_are_not_merged():
    rows, numbers = scoring.speculator_rows(
        make_job(), [three(RED), three(BLUE, first=4, ids=(10, 12, 12))]
    )
    assert numbers["prefixes"] == 2 and len(advantages(rows)) == 6


@pytest.mark.parametrize(("drop", "n"), [(True, 0), (False, 2)])
def test_uniform_speculator_groups(drop, n):
    job = make_job(loss={"drop_uniform_groups": drop})
    both = episode([1, 2, 3], [turn(2, RED, candidates=[guess(1, RED), guess(2, RED)])])
    rows, numbers = scoring.speculator_rows(job, [both])
    assert advantages(rows) == dict.fromkeys(range(1, n + 1), 0.0)
    assert len(rows) == (1 if n else 0)
    assert numbers["dropped_groups_frac"] == 1.0 and numbers["speculator_reward"] == 1.0


def test_argument_keys_decide_what_an_invented_argument_costs():
    """Target {key: red}; {key: red, more: 1} scores 1 over the target's keys, 1/2 over both."""
    more = ToolCall("get", {"key": "red", "more": 1})
    both = episode([1, 2, 3], [turn(2, RED, candidates=[guess(1, more), guess(2, BLUE)])])
    for keys, mean in (("target", 0.5), ("union", 0.25)):
        _, numbers = scoring.speculator_rows(make_job(reward={"argument_keys": keys}), [both])
        assert numbers["speculator_reward"] == pytest.approx(mean)


def test_turns_without_a_call_are_left_out_and_counted():
    rows, numbers = scoring.speculator_rows(make_job(), [three(None), three(RED, ids=(1, 2, 3))])
    assert (numbers["prefixes"], numbers["no_call_prefixes"]) == (1, 1)
    assert [row.ids for row in rows] == [(1, 2)]


def test_nothing_to_train_is_no_error():
    rows, numbers = scoring.speculator_rows(make_job(), [three(None)])
    assert rows == []
    assert (numbers["prefixes"], numbers["dropped_groups_frac"]) == (0, 1.0)


def test_abstaining_is_right_where_no_call_was_made():
    """red 0, none 1, unreadable 0: mean 1/3, std sqrt(1/3)."""
    found = [guess(1, RED), guess(2), guess(3, None, "unreadable")]
    job = make_job(reward={"no_call_turns": "reward"})
    rows, numbers = scoring.speculator_rows(job, [episode([1, 2, 3], [turn(2, candidates=found)])])
    high, low = 2 / 3**0.5, -1 / 3**0.5
    assert advantages(rows) == pytest.approx({1: low, 2: high, 3: low}, abs=1e-5)
    assert (numbers["prefixes"], numbers["no_call_prefixes"]) == (1, 0)


@pytest.mark.parametrize(("mode", "mean"), [("reward", (1 + 0.25) / 3), ("skip", 1 / 3)])
def test_abstaining_where_a_call_was_made(mode, mean):
    """red 1, none 0.25 (with ``skip`` 0, as the paper), unreadable 0."""
    found = [guess(1, RED), guess(2), guess(3, None, "unreadable")]
    job = make_job(reward={"no_call_turns": mode, "abstain_on_call": 0.25})
    one = episode([1, 2, 3], [turn(2, RED, candidates=found)])
    _, numbers = scoring.speculator_rows(job, [one])
    assert numbers["speculator_reward"] == pytest.approx(mean)


def test_a_merged_group_with_and_without_calls():
    """Targets red and none: red (1 + 0) / 2, blue 0, abstaining (0.25 + 1) / 2."""
    group = [three(RED), three(None, first=4)]
    job = make_job(reward={"no_call_turns": "reward", "abstain_on_call": 0.25})
    rows, numbers = scoring.speculator_rows(job, group)
    assert numbers["speculator_reward"] == pytest.approx((0.5 + 0 + 0.625) / 3)
    found = advantages(rows)
    assert found[3] > found[1] > 0 > found[2]
    _, numbers = scoring.speculator_rows(make_job(), group)  # the paper: red 1, the others 0
    assert numbers["speculator_reward"] == pytest.approx(1 / 3)


def test_branches_spread_over_rows_of_the_allowed_length():
    """Branches of 4 tokens at cuts 4 and 8, rows of 12: 4+4+4 | 4+4 | 8+4 | 8+4 | 8+4."""
    at_4 = [guess(1, RED), guess(2, BLUE), guess(3)]
    at_8 = [guess(4, RED), guess(5, BLUE), guess(6)]
    one = episode(range(20, 40), [turn(4, RED, candidates=at_4), turn(8, RED, candidates=at_8)])
    rows, _ = scoring.speculator_rows(make_job(pack={"row_tokens": 12}), [one])
    assert [(len(row.ids), len(row.branches)) for row in rows] == [
        (4, 2), (4, 1), (8, 1), (8, 1), (8, 1)
    ]  # fmt: skip
    assert [row.n_tokens for row in rows] == [12, 8, 12, 12, 12]
    assert sorted(advantages(rows)) == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row.ids == tuple(range(20, 20 + len(row.ids))) and not any(row.mask)
        assert all(branch.cut <= len(row.ids) for branch in row.branches)
    assert sum(b.mask_BT.sum() for b in pack(rows, 12, 2)) == 12  # two tokens of each branch


def test_a_wide_enough_row_holds_all_branches_on_one_trunk():
    at_4, at_8 = [guess(1, RED), guess(2)], [guess(4, RED), guess(5)]
    one = episode(range(20, 40), [turn(4, RED, candidates=at_4), turn(8, RED, candidates=at_8)])
    (row,) = scoring.speculator_rows(make_job(), [one])[0]
    assert row.ids == tuple(range(20, 28))  # up to the last cut
    assert [branch.cut for branch in row.branches] == [4, 4, 8, 8]


# --- imitation ---


def imitation_job(row_tokens):
    job, chat = make_job(pack={"row_tokens": row_tokens}), make_chat()
    job.chat = SimpleNamespace(
        suffix_ids=lambda: list(SUFFIX), assistant_text=chat.assistant_text, turn_ids=chat.turn_ids
    )
    return job


def test_imitation_adds_a_branch_with_the_first_call_of_each_calling_turn():
    chat = make_chat()
    told = tuple(chat.turn_ids(chat.assistant_text("", "", [RED])))
    mask = [0, 0, 1, 1, 0, 1]
    one = episode(range(6), [turn(2, RED, BLUE), turn(5)], mask=mask)
    (row,) = scoring.imitation_rows(imitation_job(512), [one], branches=True)
    assert (row.ids, row.mask, row.advantage) == (tuple(range(6)), tuple(mask), 1.0)
    (branch,) = row.branches  # the second turn made no call
    assert branch.ids == SUFFIX + told and branch.mask == (0, 0) + (1,) * len(told)
    assert branch.cut == 2 and branch.advantage == 1.0
    (plain,) = scoring.imitation_rows(imitation_job(512), [one], branches=False)
    assert plain.branches == () and plain.mask == tuple(mask)


def test_imitation_trains_each_trunk_token_once_when_branches_need_more_rows():
    one = episode(range(6), [turn(2, RED), turn(4, BLUE)], mask=[0, 0, 1, 1, 1, 1])
    length = len(
        scoring.imitation_rows(imitation_job(512), [one], branches=True)[0].branches[0].ids
    )
    rows = scoring.imitation_rows(imitation_job(6 + length), [one], branches=True)
    assert [(len(row.ids), len(row.branches)) for row in rows] == [(6, 1), (4, 1)]
    assert [sum(row.mask) for row in rows] == [4, 0]
