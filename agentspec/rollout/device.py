"""Runs a scheduler's plans on the device: host records to arrays of fixed shape and back.

In: a ``Plan``. Out: what was sampled. Holds the cache, the weights and the counts of device calls.
One thread at a time.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from agentspec.model.paged import Families
from agentspec.rollout.decode import DecodeRows, Sampled, SpanRows, programs
from agentspec.rollout.tracks import Plan, Row, Span
from agentspec.types import Mode

MAX_STOP_IDS = 8  # width of the stop table, part of the decode call's shape
READ_TOKENS = 512  # tokens of a block of spans
FAMILY_ROWS = 8  # rows that read shared pages as one block
COPY_PAGES = 16  # pages that one call copies
_STATES = ("state", "base", "prefix")  # that a track may have saved


class Device:
    """The cache and the programs of one engine."""

    def __init__(
        self,
        model: Any,
        params: Any,
        *,
        rows: dict[Mode, int],
        width: int,
        pages: int,
        page_tokens: int,
        states: int,
        chunk: int,
        tokens_per_call: int,
    ) -> None:
        """Allocates the cache; ``width`` is the longest sequence in pages."""
        self.params = params
        self.programs = programs(model, tokens_per_call)
        self.counts: collections.Counter[str] = collections.Counter()
        self._rows, self._width, self._chunk = rows, width, chunk
        self._pages, self._states, self._spans = pages, states, span_rows(chunk)
        self._cache = model.init_pages(pages, page_tokens, states)

    def execute(self, plan: Plan) -> Sampled | None:
        """Runs a plan on the device; returns host arrays, or None where nothing was sampled."""
        run: dict[str, Callable[[Mode, Any], None]]
        run = {"read": self._read, "copy": self._copy, "save": self._save, "load": self._load}
        for what, asked in plan.work:
            run[what](plan.mode, asked)
        if not plan.rows:
            return None
        mode = plan.mode
        families = None if mode == "agent" else self._families(plan.rows)
        self._cache, sampled = self.programs.decode(
            self.params, self._cache, self._decode_rows(mode, plan.rows), families
        )
        sampled = jax.device_get(sampled)
        self.counts[f"decode_calls/{mode}"] += 1
        self.counts[f"decode_steps/{mode}"] += int(sampled.counts_R.max())
        self.counts[f"sampled_tokens/{mode}"] += int(sampled.counts_R.sum())
        return sampled

    def _decode_rows(self, mode: Mode, planned: list[Row]) -> DecodeRows:
        n, limit = self._rows[mode], self.programs.tokens_per_call
        rows = DecodeRows(
            ids_R=np.zeros(n, np.int32),
            positions_R=np.zeros(n, np.int32),
            budget_R=np.zeros(n, np.int32),
            least_R=np.zeros(n, np.int32),
            seeds_R=np.zeros(n, np.uint32),
            temperature_R=np.ones(n, np.float32),
            top_p_R=np.ones(n, np.float32),
            top_k_R=np.zeros(n, np.int32),
            stop_RK=np.full((n, MAX_STOP_IDS), -1, np.int32),
            forced_RN=np.full((n, limit), -1, np.int32),
            table_RJ=np.full((n, self._width), self._pages, np.int32),
            source_R=np.full(n, self._states, np.int32),
            target_R=np.full(n, self._states, np.int32),
        )
        for r, row in enumerate(planned):
            request = row.request
            track, params, done = request.track, request.params, len(request.ids)
            rows.ids_R[r] = (request.ids or track.ids)[-1]
            rows.positions_R[r] = len(track.ids) + done - 1
            rows.budget_R[r] = request.budget - done
            rows.least_R[r] = params.min_tokens - done
            rows.seeds_R[r] = track.seed
            rows.temperature_R[r] = params.temperature
            rows.top_p_R[r], rows.top_k_R[r] = params.top_p, params.top_k
            rows.stop_RK[r, : len(params.stop_ids)] = params.stop_ids
            forced = params.forced[done : done + limit]
            rows.forced_RN[r, : len(forced)] = forced
            rows.table_RJ[r, : len(row.pages)] = row.pages[: self._width]
            rows.source_R[r], rows.target_R[r] = row.source, row.target
        return rows

    def _families(self, planned: list[Row]) -> Families:
        """Rows with the same shared pages, ``FAMILY_ROWS`` at a time."""
        n = self._rows["speculator"]
        families = Families(
            members_FC=np.full((n, FAMILY_ROWS), n, np.int32),
            pages_F=np.zeros(n, np.int32),
            shared_R=np.zeros(n, np.int32),
            place_R=np.full(n, n * FAMILY_ROWS, np.int32),
        )
        last: dict[tuple[int, ...], tuple[int, int]] = {}  # family, members so far
        n_families = 0
        for r, row in enumerate(planned):
            if not row.family:
                continue
            f, members = last.get(row.family, (0, FAMILY_ROWS))
            if members == FAMILY_ROWS:
                f, members, n_families = n_families, 0, n_families + 1
            last[row.family] = (f, members + 1)
            families.members_FC[f, members] = r
            families.pages_F[f] = families.shared_R[r] = len(row.family)
            families.place_R[r] = f * FAMILY_ROWS + members
        return families

    def _read(self, mode: Mode, segments: list[list[Span]]) -> None:
        """Reads segments: spans of all of them together, or one of each where a state is kept."""
        if self._states:
            longest = max(len(spans) for spans in segments)
            turns = [[s[i] for s in segments if i < len(s)] for i in range(longest)]
        else:
            turns = [[span for spans in segments for span in spans]]
        for spans in turns:
            for i in range(0, len(spans), self._spans):
                self._read_block(spans[i : i + self._spans])
        self.counts[f"prefilled_tokens/{mode}"] += sum(len(x.ids) for s in segments for x in s)

    def _read_block(self, spans: list[Span]) -> None:
        n, states = self._spans, self._states
        rows = SpanRows(
            ids_SC=np.zeros((n, self._chunk), np.int32),
            table_SJ=np.full((n, self._width), self._pages, np.int32),
            start_S=np.zeros(n, np.int32),
            valid_S=np.zeros(n, np.int32),
            source_S=np.full(n, states, np.int32),
            target_S=np.full(n, states, np.int32),
        )
        for i, span in enumerate(spans):
            rows.ids_SC[i, : len(span.ids)] = span.ids
            rows.table_SJ[i, : len(span.pages)] = span.pages[: self._width]
            rows.start_S[i], rows.valid_S[i] = span.start, len(span.ids)
            rows.source_S[i], rows.target_S[i] = span.source, span.target
        self._cache = self.programs.read(self.params, self._cache, rows)
        self.counts["prefill_calls"] += 1

    def _copy(self, mode: Mode, pairs: list[tuple[int, int]]) -> None:
        for i in range(0, len(pairs), COPY_PAGES):
            part = pairs[i : i + COPY_PAGES]
            source = np.zeros(COPY_PAGES, np.int32)
            target = np.full(COPY_PAGES, self._pages, np.int32)
            source[: len(part)], target[: len(part)] = zip(*part, strict=True)
            self._cache = self.programs.copy(self._cache, source, target)

    def _save(self, mode: Mode, asked: tuple[tuple[int, ...], dict[str, int], dict]) -> None:
        pages, slots, box = asked
        names = _STATES if self._states else ()
        every = {name: np.int32(slots.get(name, 0)) for name in names}
        saved = self.programs.save(self._cache, self._table(pages), every)
        box["saved"] = jax.device_get(saved)

    def _load(self, mode: Mode, asked: tuple[tuple[int, ...], dict[str, int], dict]) -> None:
        pages, slots, box = asked
        names = _STATES if self._states else ()
        every = {name: np.int32(slots.get(name, self._states)) for name in names}
        self._cache = self.programs.load(self._cache, self._table(pages), every, box["saved"])

    def _table(self, pages: tuple[int, ...]) -> np.ndarray:
        table = np.full(self._width + 1, self._pages, np.int32)
        table[: len(pages)] = pages
        return table


def default_pages(rows: int, speculator_rows: int, width: int) -> int:
    """As many as all agent rows at the full length of ``width`` take, and four a speculator row."""
    return max(rows * (width + 1) + 4 * speculator_rows, 2 * width) + 4


def span_rows(chunk: int) -> int:
    """Spans of ``chunk`` ids in a block."""
    return max(1, READ_TOKENS // chunk)


def n_states(rows: int, speculator_rows: int) -> int:
    """Slots of recurrent state: of each row its own, the one before, its prompt's, one to spare."""
    return 4 * (rows + speculator_rows) + 16
