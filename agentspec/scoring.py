"""From episodes to training rows: rewards, group advantages, branches (lines 4 and 5).

In: trajectories from ``collect``. Out: ``TreeRow`` lists for ``tokens.pack`` and the numbers to
log. Paper: R_ag = success - lambda * repeats; R_sp = R_name * R_args; advantages within a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from agentspec.job import Job
from agentspec.losses.advantages import group_advantages
from agentspec.rewards.calls import call_reward, repeat_count
from agentspec.speculation.candidates import hit_report
from agentspec.types import Branch, ToolCall, ToolSpec, Trajectory, TreeRow, Turn

Numbers = dict[str, float]


def agent_rows(job: Job, groups: Sequence[Sequence[Trajectory]]) -> tuple[list[TreeRow], Numbers]:
    """Rows of an agent update: each group's shared prompt as a trunk, its members as branches.

    A member's tokens are weighted by its group advantage.
    """
    penalty = job.settings.reward.repeat_penalty
    rewards_NG = np.array(
        [
            [t.score.reward - penalty * repeat_count(t.calls, job.specs(t.world)) for t in group]
            for group in groups
        ]
    )
    advantages_NG = np.asarray(group_advantages(rewards_NG))
    rows = [
        row
        for group, advantages in zip(groups, advantages_NG, strict=True)
        if not (job.settings.loss.drop_uniform_groups and not advantages.any())
        for row in _group_rows(group, advantages, job.settings.pack.row_tokens)
    ]
    flat = [t for group in groups for t in group]
    numbers = episode_numbers(job, flat) | {
        "reward": float(rewards_NG.mean()),
        "dropped_groups_frac": float(np.mean(~advantages_NG.any(axis=1))),
    }
    return rows, numbers


def speculator_rows(job: Job, trajectories: Sequence[Trajectory]) -> tuple[list[TreeRow], Numbers]:
    """Rows of a speculator update: a trunk and its groups of predictions as branches.

    Identical prefixes form one group whose reward is the mean over their targets
    [``speculator.merge_equal_prefixes``].
    """
    s = job.settings
    targets: dict[tuple[int, ...], list[ToolCall | None]] = {}
    for t, u, turn in _asked(trajectories):
        if turn.calls or s.reward.no_call_turns == "reward":
            key = tuple(t.ids[: turn.start])
            if not s.speculator.merge_equal_prefixes:
                key += (-1, id(t), u)
            targets.setdefault(key, []).append(turn.calls[0] if turn.calls else None)
    suffix = tuple(job.chat.suffix_ids())
    all_rewards, dropped, rows = [], [], []
    done: set[tuple[int, ...]] = set()
    skipped = 0
    for t in trajectories:
        branches: list[Branch] = []
        for u, turn in enumerate(t.turns):
            key = tuple(t.ids[: turn.start])
            if not s.speculator.merge_equal_prefixes:
                key += (-1, id(t), u)
            candidates = [c for c in turn.candidates if c.ids]  # the others were never sampled
            if not candidates or key in done:
                continue
            if key not in targets:
                skipped += 1
                continue
            done.add(key)
            specs = job.specs(t.world)
            rewards_G = np.array(
                [
                    np.mean([_reward(job, c.call, bool(c.problems), target, specs)
                             for target in targets[key]])
                    for c in candidates
                ]
            )  # fmt: skip
            advantages_G = np.asarray(group_advantages(rewards_G[None]))[0]
            all_rewards.append(rewards_G.mean())
            dropped.append(not advantages_G.any())
            if dropped[-1] and s.loss.drop_uniform_groups:
                continue
            branches += [
                Branch(
                    cut=turn.start,
                    ids=suffix + c.ids,
                    mask=(0,) * len(suffix) + (1,) * len(c.ids),
                    logps=(0.0,) * len(suffix) + c.logps,
                    advantage=float(a),
                )
                for c, a in zip(candidates, advantages_G, strict=True)
            ]
        served = TreeRow(tuple(t.ids), (0,) * len(t.ids), (0.0,) * len(t.ids))
        rows += _attach(served, branches, s.pack.row_tokens)
    numbers = episode_numbers(job, trajectories) | {
        "speculator_reward": float(np.mean(all_rewards)) if all_rewards else 0.0,
        "dropped_groups_frac": float(np.mean(dropped)) if dropped else 1.0,
        "prefixes": float(len(all_rewards)),
        "no_call_prefixes": float(skipped),
    }
    for name in ("hit_at_1", "parse_failure_frac"):  # of a sampled candidate, not of a greedy one
        numbers[f"sampled_{name}"] = numbers.pop(name)
    return rows, numbers


def imitation_rows(
    job: Job, trajectories: Sequence[Trajectory], *, branches: bool
) -> list[TreeRow]:
    """Rows of SFT: each trajectory, with a speculation branch at every tool-calling turn."""
    suffix = tuple(job.chat.suffix_ids())
    rows = []
    for t in trajectories:
        cuts = []
        for turn in t.turns if branches else []:
            if turn.calls:
                text = job.chat.assistant_text("", "", [turn.calls[0]])
                ids = tuple(job.chat.turn_ids(text))
                mask = (0,) * len(suffix) + (1,) * len(ids)
                cuts.append(
                    Branch(turn.start, suffix + ids, mask, (0.0,) * len(mask))
                )
        trunk = TreeRow(tuple(t.ids), tuple(t.mask), (0.0,) * len(t.ids))
        rows += _attach(trunk, cuts, job.settings.pack.row_tokens)
    return rows


def episode_numbers(job: Job, trajectories: Sequence[Trajectory]) -> Numbers:
    """What is logged of any batch of episodes; shares are 0 to 1, entropy in nats a token.

    Hit@1 and parse failures are over turns that carry candidates (all, or those drawn by seed).
    """
    turns = [turn for t in trajectories for turn in t.turns]
    sampled = [e for t in trajectories for e, m in zip(t.entropies, t.mask, strict=False) if m]
    specs = {name: spec for world in job.worlds for name, spec in job.specs(world).items()}
    asked = [
        dataclasses.replace(t, turns=[turn for turn in t.turns if turn.candidates])
        for t in trajectories
    ]
    report = hit_report(asked, specs)
    return {
        "success": float(np.mean([t.score.success for t in trajectories])),
        "hit_at_1": report["hit_at_1"],
        "parse_failure_frac": report["parse_failure"],
        "malformed_frac": float(np.mean([bool(turn.problems) for turn in turns])),
        "turns": len(turns) / len(trajectories),
        "episode_tokens": float(np.mean([len(t.ids) for t in trajectories])),
        "entropy": float(np.mean(sampled)) if sampled else 0.0,
    }


def _asked(trajectories: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, int, Turn]]:
    for t in trajectories:
        for u, turn in enumerate(t.turns):
            if turn.candidates:
                yield t, u, turn


def _reward(
    job: Job,
    call: ToolCall | None,
    broken: bool,
    target: ToolCall | None,
    specs: Mapping[str, ToolSpec],
) -> float:
    r = job.settings.reward
    if target is None:  # the turn made no call: abstaining is right
        return 1.0 if call is None and not broken else 0.0
    if call is None:
        abstained = not broken and r.no_call_turns == "reward"
        return r.abstain_on_call if abstained else 0.0
    return call_reward(call, target, argument_keys=r.argument_keys, spec=specs.get(target.name))


def _group_rows(
    group: Sequence[Trajectory], advantages_G: np.ndarray, row_tokens: int
) -> list[TreeRow]:
    """The group's members on the prompt they share; without one, each in a row of its own.

    A member that sampled nothing is left out. The prompt's last token stands in every branch, since
    it predicts the member's first.
    """
    members = [(t, float(a)) for t, a in zip(group, advantages_G, strict=True) if any(t.mask)]
    if not members:
        return []
    first, _ = members[0]
    shared = min(t.mask.index(1) for t, _ in members)
    while any(t.ids[:shared] != first.ids[:shared] for t, _ in members):
        shared -= 1
    cut = shared - 1
    if cut < 1:
        return [TreeRow(tuple(t.ids), tuple(t.mask), tuple(t.logps), a) for t, a in members]
    branches = [
        Branch(cut, tuple(t.ids[cut:]), tuple(t.mask[cut:]), tuple(t.logps[cut:]), a)
        for t, a in members
    ]
    prompt = TreeRow(tuple(first.ids[:cut]), (0,) * cut, (0.0,) * cut)
    return _attach(prompt, branches, row_tokens)


def _attach(trunk: TreeRow, branches: Sequence[Branch], row_tokens: int) -> list[TreeRow]:
    """The trunk with its branches; those that do not fit hang on further trunks of their own.

    A trunk whose mask is all zero only serves its branches and ends at the last cut. ``branches``
    are in the order of their cuts.
    """
    whole = any(trunk.mask)
    trees: list[list[Branch]] = [[]]
    for branch in branches:
        head = len(trunk.ids) if whole and len(trees) == 1 else branch.cut
        used = head + len(branch.ids) + sum(len(b.ids) for b in trees[-1])
        if used > row_tokens:
            trees.append([])
        trees[-1].append(branch)
    rows = []
    for i, tree in enumerate(trees):
        if whole and i == 0:
            rows.append(dataclasses.replace(trunk, branches=tuple(tree)))
        elif tree:
            cut = tree[-1].cut
            ids = trunk.ids[:cut]
            rows.append(TreeRow(ids, (0,) * cut, (0.0,) * cut, 1.0, tuple(tree)))
    return rows
