"""The endless task stream: epochs, random access, resume, hosts; and draws by stable hashes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import grain
import pytest

from agentspec.tasks.hashing import ordered, pick, stable_hash, uniform
from agentspec.tasks.stream import TaskStream
from agentspec.types import Task

TASKS = [Task(f"t{i}", "w", {"i": i}) for i in range(10)]


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_each_epoch_has_every_task_once_and_its_own_order():
    stream = TaskStream(TASKS, seed=3)
    epochs = [tuple(ids(stream.batch(10 * e, 10))) for e in range(4)]
    assert all(sorted(epoch) == sorted(ids(TASKS)) for epoch in epochs)
    assert len(set(epochs)) == 4
    assert stream.epoch_size == 10


@pytest.mark.parametrize("resume_at", [0, 1, 9, 10, 13, 37])
def test_resume_at_any_index_equals_uninterrupted(resume_at):
    whole = TaskStream(TASKS, seed=1).batch(0, 60)
    assert TaskStream(TASKS, seed=1).batch(resume_at, 60 - resume_at) == whole[resume_at:]


def test_batch_size_does_not_matter():
    stream = TaskStream(TASKS, seed=1)
    by_threes = [task for start in range(0, 30, 3) for task in stream.batch(start, 3)]
    assert by_threes == stream.batch(0, 30)


def test_seeds_give_other_orders():
    assert TaskStream(TASKS, 0).batch(0, 10) != TaskStream(TASKS, 1).batch(0, 10)


def test_b89_no_index_beyond_the_last_task():
    counts = Counter(ids(TaskStream(TASKS[:3], 0).batch(0, 300)))
    assert counts == {"t0": 100, "t1": 100, "t2": 100}


def test_b103_grain_restores_a_window_shuffle():
    """The pinned grain has the fix; an older one continues with another window's order."""

    def iterator():
        dataset = grain.MapDataset.source(list(range(10)))
        return iter(dataset.to_iter_dataset().seed(42).pipe(_window_shuffle))

    for taken in (0, 3):
        first = iterator()
        for _ in range(taken):
            next(first)
        state = first.get_state()
        rest = list(first)
        second = iterator()
        second.set_state(state)
        assert list(second) == rest
        assert len(rest) == 10 - taken


def _window_shuffle(dataset):
    return grain.experimental.WindowShuffleIterDataset(dataset, window_size=5, seed=42)


def test_b105_another_number_of_hosts_repeats_and_loses_nothing():
    stream = TaskStream(TASKS, seed=5)
    four = [task for host in range(4) for task in stream.share(0, 8, host, 4)]
    two = [task for host in range(2) for task in stream.share(8, 8, host, 2)]
    assert sorted(ids(four)) == sorted(ids(stream.batch(0, 8)))
    assert sorted(ids(two)) == sorted(ids(stream.batch(8, 8)))
    assert ids(stream.share(0, 4, 1, 2)) == [stream[1].id, stream[3].id]


def test_b105_uneven_hosts_are_refused_with_both_numbers():
    stream = TaskStream(TASKS, seed=5)
    with pytest.raises(ValueError, match="7 tasks a step do not divide among 2 hosts"):
        stream.share(0, 7, 0, 2)
    with pytest.raises(ValueError, match="host is 2; allowed are 0 to 1"):
        stream.share(0, 8, 2, 2)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="no tasks"):
        TaskStream([], 0)
    with pytest.raises(ValueError, match="'t1' occurs more than once"):
        TaskStream([*TASKS, TASKS[1]], 0)
    with pytest.raises(ValueError, match="seed is -1"):
        TaskStream(TASKS, -1)
    with pytest.raises(IndexError, match="index is -1"):
        TaskStream(TASKS, 0)[-1]


def test_stable_hash_is_equal_in_another_process():
    code = (
        "from agentspec.tasks.hashing import stable_hash; print(stable_hash(1, 'a', ('b', None)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == stable_hash(1, "a", ("b", None))


def test_draws_follow_their_weights():
    n = 4000
    counts = Counter(pick([(3.0, "a"), (1.0, "b"), (0.0, "c")], "draw", i) for i in range(n))
    assert counts["c"] == 0
    assert abs(counts["a"] / n - 0.75) < 0.03  # standard deviation 0.007
    values = [uniform("u", i) for i in range(n)]
    assert 0 <= min(values) and max(values) < 1
    assert abs(sum(values) / n - 0.5) < 0.03
    assert sorted(ordered(range(20), "o")) == list(range(20)) != ordered(range(20), "o")
    with pytest.raises(ValueError, match="total weight 0"):
        pick([(0.0, "a")], "draw")
