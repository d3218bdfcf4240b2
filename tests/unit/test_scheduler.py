"""The scheduler alone: plans are carried out on rows that are plain lists of ids."""

from __future__ import annotations

import random

import pytest

from agentspec.rollout.scheduler import Plan, Request, Scheduler, Track
from agentspec.types import SamplingParams


class Rows:
    """A device made of lists: what each row of each pool holds."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.held = {
            (mode, r): [] for mode, pool in scheduler.pools.items() for r in range(pool.n_rows)
        }

    def execute(self, plan: Plan) -> None:
        for wave in plan.waves:
            for copy in wave.copies:  # the engine runs them one after another
                source = self.held[copy.source.mode, copy.source_row]
                self.held[copy.target.mode, copy.target_row] = list(source)
            for prefill in wave.prefills:
                row = self.held[prefill.pool.mode, prefill.row]
                assert len(row) >= prefill.start
                row[prefill.start :] = prefill.ids
        for request, r in zip(plan.requests, plan.decode_rows, strict=True):
            ids = (request.track.ids + request.ids)[:-1]
            row = self.held[plan.pool.mode, r]
            assert row[: len(ids)] == ids, "the row does not hold the sequence's ids"
            row[len(ids) :] = (request.track.ids + request.ids)[-1:]  # decode feeds the last id

    def feed(self, plan: Plan, request: Request, r: int, new: list[int]) -> None:
        """The decode call went on: all new ids but the last were fed too."""
        self.held[plan.pool.mode, r] += new[:-1]


def check_books(scheduler: Scheduler) -> None:
    for pool in scheduler.pools.values():
        taken = [track.row for track in pool.seated]
        assert sorted(taken + pool.free) == list(range(pool.n_rows))
        for track in pool.seated:
            assert not track.closed or track.waiting, "a closed track nobody waits for has a row"
            assert track.parent is None
            assert track.cached <= max(len(track.ids) - 1, 0)
            for child in track.waiting:
                assert child.parent is track and child.row is None
                assert pool.mode == "agent" or child.pool.mode == "speculator"


@pytest.mark.parametrize("seed", range(60))
def test_rows_always_hold_what_the_plan_says(seed):
    rng = random.Random(seed)
    scheduler = Scheduler(rows=rng.choice([1, 3, 5]), speculator_rows=rng.choice([2, 3, 6]))
    rows, fresh_id = Rows(scheduler), iter(range(1, 10**9))
    tracks: list[Track] = []
    served = 0

    def step(mode: str) -> bool:
        nonlocal served
        plan = scheduler.plan(scheduler.pools[mode])
        check_books(scheduler)
        if plan is None:
            return False
        rows.execute(plan)
        for request, r in zip(plan.requests, plan.decode_rows, strict=True):
            if request not in plan.pool.active:
                continue
            new = [next(fresh_id) for _ in range(rng.randint(1, 3))]
            rows.feed(plan, request, r, new)
            request.ids += new
            if len(request.ids) >= request.budget:
                finish(request)
                served += 1
        return True

    def finish(request: Request) -> None:
        track = request.track
        scheduler.withdraw(request)
        track.request = None
        track.ids += request.ids
        track.cached, track.fresh = len(track.ids) - 1, 0

    for _ in range(400):
        act = rng.random()
        live = [track for track in tracks if not track.closed]
        idle = [track for track in live if track.request is None]
        if act < 0.1 or not live:
            pool = scheduler.pools[rng.choice(["agent", "agent", "speculator"])]
            tracks.append(Track(pool, [next(fresh_id) for _ in range(rng.randint(1, 6))], 0))
        elif act < 0.3:
            parent = rng.choice(live)
            modes = ["speculator"] if parent.pool.mode == "speculator" else ["agent", "speculator"]
            tracks.append(scheduler.fork(parent, scheduler.pools[rng.choice(modes)], 0))
        elif act < 0.4 and idle:
            rng.choice(idle).ids += [next(fresh_id) for _ in range(rng.randint(1, 4))]
        elif act < 0.55 and idle:
            track = rng.choice(idle)
            track.request = Request(track, SamplingParams(), rng.randint(1, 6), None)
            track.pool.queue.append(track.request)
        elif act < 0.6 and idle:
            track = rng.choice(idle)
            scheduler.rewind(track, rng.randint(1, len(track.ids)))
        elif act < 0.63:
            cancelled = rng.choice(live).request
            if cancelled is not None:
                scheduler.withdraw(cancelled)
                cancelled.track.request = None
        elif act < 0.72:
            scheduler.close(rng.choice(live))
        else:
            step(rng.choice(["agent", "speculator"]))
        check_books(scheduler)
    while any([step("agent"), step("speculator")]):
        pass
    # A request may be left only because open, idle agent tracks hold every agent row it needs;
    # closing those lets everything finish.
    for track in tracks:
        if track.request is None and not track.closed:
            scheduler.close(track)
    while any([step("agent"), step("speculator")]):
        for track in tracks:
            if track.request is None and not track.closed:
                scheduler.close(track)
    assert served > 20
    assert [len(pool.queue) + len(pool.active) for pool in scheduler.pools.values()] == [0, 0]
    for track in tracks:
        scheduler.close(track)
    check_books(scheduler)
    assert not scheduler.seated()
