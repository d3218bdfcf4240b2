"""Speculation never changes what happens: same tokens, log-probs, calls, observations, rewards.

A trained model plays 200 episodes of each world whose tools wait 0.3 s, on the simulated clock,
without and with speculation, each time sampled anew by an engine of its own.
"""

from __future__ import annotations

import pytest

from agentspec import collect, rng
from agentspec.envs import episode
from agentspec.envs.tools import ToolBox, ToolLatency
from agentspec.rollout.engine import Engine
from agentspec.speculation import runtime
from agentspec.speculation.candidates import hit_report
from agentspec.speculation.clock import LatencyModel
from agentspec.speculation.speculators.selfspec import SelfSpeculator
from agentspec.types import Trajectory

EPISODES = 200


def play(trained, world: str, speculate: bool) -> list[Trajectory]:
    job = trained.job
    engine = Engine(job.model, trained.params, rows=16, speculator_rows=32, cache_tokens=384)
    engine.latency = LatencyModel(token_s=0.02)
    speculator = SelfSpeculator(job.chat, job.speculator_sampling(0.0), n_candidates=2)
    jobs = []
    for n, task in enumerate(job.worlds[world].tasks("test")[:EPISODES]):
        w = job.worlds[world].new()
        box = ToolBox(w, latency=ToolLatency(default_s=0.3))
        seed = rng.stream(7, "lossless", n)
        args = (engine, w, task, job.chat, job.agent_sampling(1.0), job.limits, seed)
        if speculate:
            budget = runtime.Budget(calls_per_turn=2)
            jobs.append(
                runtime.run_episode(*args, toolbox=box, speculator=speculator, budget=budget)
            )
        else:
            jobs.append(episode.run_episode(*args, toolbox=box))
    return collect.run_all(jobs, 16)


@pytest.mark.slow
@pytest.mark.parametrize("world", ["lookup", "storefront"])
def test_speculation_on_and_off_give_the_same_episodes(trained, world: str) -> None:
    plain, speculated = play(trained, world, False), play(trained, world, True)
    assert len(plain) == len(speculated) == EPISODES
    for a, b in zip(plain, speculated, strict=True):
        assert a.ids == b.ids
        assert a.mask == b.mask
        assert a.logps == b.logps  # float32, bit for bit
        assert a.entropies == b.entropies
        assert a.calls == b.calls
        assert [t.observations for t in a.turns] == [t.observations for t in b.turns]
        assert a.score == b.score
        assert (a.final_state, a.finish) == (b.final_state, b.finish)
    # It would be easy to change nothing by doing nothing: calls were made and served ahead.
    specs = trained.job.specs(world)
    assert sum(len(t.calls) for t in plain) > EPISODES
    assert hit_report(speculated, specs)["hit_at_1"] > 0.1
    assert sum(hit for t in speculated for turn in t.turns for hit in turn.hits) > EPISODES / 20
    assert sum(turn.hidden_s for t in speculated for turn in t.turns) > 0
    assert sum(t.total_s for t in speculated) <= sum(t.total_s for t in plain)
    if world == "storefront":
        assert len({a.final_state for a in plain}) > 1, "no episode wrote anything"
