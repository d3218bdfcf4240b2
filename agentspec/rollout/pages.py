"""Counted places of a cache: pages of keys and values, slots of recurrent state. Pure host logic.

In: requests to take, share and give back places. Out: their numbers. A place may be held by many;
it is free again when the last gives it back. At most one holder, its owner, may write into a shared
place, and only behind what the others see of it.
"""

from __future__ import annotations

from collections.abc import Iterable


class Places:
    """``n`` places, numbered 0..n-1; the lowest free number is taken first."""

    def __init__(self, n: int) -> None:
        """All free."""
        self.n = n
        self._free = list(range(n - 1, -1, -1))
        self._holders = [0] * n
        self._owner: list[object | None] = [None] * n

    @property
    def n_free(self) -> int:
        """How many places nobody holds."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """How many places somebody holds."""
        return self.n - len(self._free)

    @property
    def n_shared(self) -> int:
        """How many places more than one holds."""
        return sum(holders > 1 for holders in self._holders)

    def take(self, owner: object) -> int:
        """A free place, held and owned by ``owner``; IndexError when there is none."""
        place = self._free.pop()
        self._holders[place], self._owner[place] = 1, owner
        return place

    def share(self, places: Iterable[int]) -> None:
        """One more holder for each; ValueError for a place that nobody holds."""
        for place in places:
            if not self._holders[place]:
                raise ValueError(f"place {place} is free: it cannot be shared")
            self._holders[place] += 1

    def give_back(self, places: Iterable[int]) -> None:
        """One holder fewer for each; ValueError for a place that nobody holds."""
        for place in places:
            if not self._holders[place]:
                raise ValueError(f"place {place} is free: it cannot be given back")
            self._holders[place] -= 1
            if not self._holders[place]:
                self._owner[place] = None
                self._free.append(place)

    def disown(self, place: int, owner: object) -> None:
        """``owner`` goes back to before what it wrote there: sharers may see that part."""
        if self._owner[place] is owner and self._holders[place] > 1:
            self._owner[place] = None

    def may_write(self, place: int, who: object) -> bool:
        """Whether ``who``, a holder, may write behind what it has there."""
        return self._holders[place] == 1 or self._owner[place] is who
