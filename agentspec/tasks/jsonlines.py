"""Reads JSON lines, plain or gzip, with every fault named by file, line and key.

In: a path and a function that turns one row into a record. Out: the records, in file order.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_KINDS = {str: "a string", list: "a list", dict: "an object", float: "a number"}


class DataError(ValueError):
    """A line of a data file that cannot be used; the message starts with ``file:line``."""


def read_records(
    path: str | Path, parse: Callable[[dict[str, Any]], T], problems: list[str] | None = None
) -> list[T]:
    """One record per non-blank line of ``path`` (gzip when it ends in ``.gz``).

    ``parse`` raises ``DataError`` with a message that names the key; file and line are put before
    it. Without ``problems`` the first bad line raises. With it, a bad line adds one message there
    and every other line is still read.
    """
    records = []
    for number, line in _lines(Path(path)):
        try:
            records.append(parse(_row(line)))
        except DataError as error:
            message = f"{path}:{number}: {error}"
            if problems is None:
                raise DataError(message) from None
            problems.append(message)
    return records


def field(row: dict[str, Any], key: str, kind: type[T], where: str = "") -> T:
    """``row[key]``, which must be of ``kind``; a string must say something, a float may be an int.

    ``where`` names the place of ``row`` inside its line, such as ``steps[2].``.
    """
    name = f"key {where}{key!r}" if not where else f"key '{where}{key}'"
    if key not in row:
        raise DataError(f"{name} is missing; the line has {sorted(row)}")
    value: Any = row[key]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise DataError(f"{name} must be {_KINDS[kind]}, got {value!r:.80}")
    if isinstance(value, str) and not value.strip():
        raise DataError(f"{name} is empty")
    return value


def strings(row: dict[str, Any], key: str) -> tuple[str, ...]:
    """``row[key]``, a list of non-empty strings; an absent or null key gives ``()``."""
    if row.get(key) is None:
        return ()
    items = field(row, key, list)
    for i, item in enumerate(items):
        if not isinstance(item, str) or not item.strip():
            raise DataError(f"key '{key}[{i}]' must be a non-empty string, got {item!r:.80}")
    return tuple(items)


def _lines(path: Path) -> Iterator[tuple[int, bytes | Exception]]:
    """Numbered non-blank lines; a gzip stream that breaks off gives its error as the last one."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield number + 1, error


def _row(line: bytes | Exception) -> dict[str, Any]:
    if isinstance(line, Exception):
        raise DataError(f"the gzip stream is broken or cut short ({line})")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"not one whole JSON value ({error.msg} at column {error.colno}); is the line cut?"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"a line must be a JSON object, got {type(row).__name__}")
    return row
