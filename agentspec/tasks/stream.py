"""An endless, shuffled stream of tasks with random access (Algorithm 1, line 3).

In: a finite list of tasks and a seed. Out: the task at any global index, so the stream's whole
state is one integer and a resumed run sees what an uninterrupted one would have seen, on any
number of hosts. Built on ``grain.MapDataset``; no iterator is ever saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import grain

from agentspec.types import Task

T = TypeVar("T")


class TaskStream(Generic[T]):
    """Tasks (or training rows) shuffled anew in each epoch, repeated for ever, by global index."""

    def __init__(self, tasks: Sequence[T], seed: int) -> None:
        """Raises ValueError for no tasks, for a repeated task id, or for a negative seed."""
        if not tasks:
            raise ValueError("TaskStream: got no tasks; at least one is needed")
        ids = [task.id for task in tasks if isinstance(task, Task)]
        if len(set(ids)) < len(ids):
            twice = next(task_id for task_id in ids if ids.count(task_id) > 1)
            raise ValueError(f"TaskStream: task id {twice!r} occurs more than once")
        if seed < 0:
            raise ValueError(f"TaskStream: seed is {seed}; allowed are 0 and above")
        self.epoch_size = len(tasks)
        self._dataset = grain.MapDataset.source(list(tasks)).seed(seed).shuffle().repeat()

    def __getitem__(self, index: int) -> T:
        """The task at a global index. Raises IndexError below 0: the stream has no end."""
        if index < 0:
            raise IndexError(f"TaskStream: index is {index}; allowed are 0 and above")
        return cast(T, self._dataset[index])

    def batch(self, start: int, n: int) -> list[T]:
        """The ``n`` tasks at global indices ``start`` .. ``start + n - 1``."""
        return [self[index] for index in range(start, start + n)]

    def share(self, start: int, n: int, host: int, hosts: int) -> list[T]:
        """One host's part of ``batch(start, n)``: every ``hosts``-th task from the ``host``-th on.

        The parts of all hosts together are the batch, so a run may resume with another number of
        hosts. Raises ValueError where ``n`` does not divide or the host number is out of range.
        """
        if not 0 <= host < hosts:
            raise ValueError(f"TaskStream: host is {host}; allowed are 0 to {hosts - 1}")
        if n % hosts:
            raise ValueError(f"TaskStream: {n} tasks a step do not divide among {hosts} hosts")
        return [self[index] for index in range(start + host, start + n, hosts)]
