"""A copy-on-write table store: a shared base of rows and the rows that one episode changed.

A row is a JSON object under the key ``table/id``. Rows are replaced, never changed in place, so a
fork costs a copy of the changed rows' references. The version is a digest of the base's revision
and the rows that differ from it by canonical value (33 equals 33.0, not "33" and not true), so
writing the old value back gives the old version back.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

from agentspec.rewards.calls import canonical_call
from agentspec.types import ToolCall

Row = dict[str, Any]


def canonical_text(row: Row) -> str:
    """Text that is equal exactly for rows of equal data, by the same rule as for calls."""
    return canonical_call(ToolCall("row", row))


class Database:
    """The rows of one episode."""

    def __init__(self, base: Mapping[str, Row], revision: str = "") -> None:
        """``base`` is shared and never written; ``revision`` names its content.

        Without a revision it is computed, which reads the whole base.
        """
        self._base = base
        self._changed: dict[str, Row] = {}
        self.revision = revision or digest_rows(base)

    def __contains__(self, key: str) -> bool:
        """Whether the row exists."""
        return key in self._changed or key in self._base

    def get(self, key: str) -> Row:
        """A copy of a row, the caller's own. Raises KeyError for an unknown key."""
        return copy.deepcopy(self._changed[key] if key in self._changed else self._base[key])

    def put(self, key: str, row: Row) -> None:
        """Replaces a row; a row back at its base value counts as unchanged."""
        if key in self._base and canonical_text(row) == canonical_text(self._base[key]):
            self._changed.pop(key, None)
        else:
            self._changed[key] = copy.deepcopy(row)

    def fork(self) -> Database:
        """An independent store at the same state, in time and memory of the changed rows."""
        twin = Database(self._base, self.revision)
        twin._changed = dict(self._changed)
        return twin

    @property
    def changed(self) -> tuple[str, ...]:
        """Keys of the rows that differ from the base, sorted."""
        return tuple(sorted(self._changed))

    @property
    def version(self) -> str:
        """Digest of the base revision and the changed rows."""
        text = self.revision + canonical_text(self._changed)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_rows(rows: Mapping[str, Row]) -> str:
    """Digest of rows by canonical value."""
    return hashlib.sha256(canonical_text(dict(rows)).encode()).hexdigest()[:16]
