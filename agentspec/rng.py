"""Named streams of seeds, so that no two places of the program share randomness by accident.

A stream is named by the run's seed, a text and any indices: ``stream(0, "agent", step, task,
member)``. The number depends on those alone: not on the order of calls, the process, the Python
hash seed or the platform, so a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
import json


def stream(seed: int, name: str, *indices: int | str) -> int:
    """A seed in 0..2^31-1 (fits int32): the first 31 bits of SHA-256 of the JSON list of its name.

    Raises TypeError for an index that is neither int nor str (a float would depend on rounding).
    """
    for index in (seed, *indices):
        if isinstance(index, bool) or not isinstance(index, int | str):
            raise TypeError(f"stream {name!r}: index {index!r} must be an int or a str")
    text = json.dumps([seed, name, *indices], ensure_ascii=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
