"""Decisions by stable hashes: the embedded worlds, their tasks and their experts draw from here.

Unlike Python's ``hash`` the values do not change between processes, and unlike a generator's they
do not depend on how many draws were made before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def stable_hash(*parts: object) -> int:
    """A 64-bit integer from the parts' ``repr``; equal in every process and on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def uniform(*parts: object) -> float:
    """A number in [0, 1) decided by the parts."""
    return (stable_hash(*parts) >> 11) / float(1 << 53)


def pick(options: Sequence[tuple[float, T]], *parts: object) -> T:
    """One of the weighted options ``(weight, value)``, decided by the parts.

    Raises ValueError where no option has a positive weight.
    """
    total = sum(weight for weight, _ in options)
    if total <= 0:
        raise ValueError(f"pick: got {len(options)} options of total weight {total}")
    point = uniform(*parts) * total
    for weight, value in options:
        point -= weight
        if point < 0:
            return value
    return next(value for weight, value in reversed(options) if weight > 0)


def ordered(items: Sequence[T], *parts: object) -> list[T]:
    """The items in an order decided by the parts and each item's ``repr``."""
    return sorted(items, key=lambda item: stable_hash(*parts, item))
