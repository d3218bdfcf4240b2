"""Stage 5 of the loop: tree rows in, static-shape batches out (host side, NumPy only).

In: `types.TreeRow`s in the order (task, member, turn). Out: `PackedBatch`es of shape [B, T], in
which several trees share a row. A tree's trunk is laid out first, its branches behind it; branch
positions restart at the cut (design, idea 3: a fork costs only its own tokens, in training too).
Masks come from lengths and spans, never from a pad or end id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentspec.types import Branch, TreeRow

NO_CUT = 2**30  # the cut of a trunk token: it sees every trunk token before it


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """One micro-batch; arrays are [B, T], int32 but for the float32 old_logp and advantage.

    ``targets_BT`` to ``advantage_BT`` are aligned to the *predicting* position: entry t is about
    the token that follows t in its own trunk or branch (``targets_BT[b, t]``); mask 0 where there
    is none.
    """

    ids_BT: NDArray[np.int32]
    positions_BT: NDArray[np.int32]
    segment_ids_BT: NDArray[np.int32]  # 0 is padding; trees count from 1 within a row
    branch_ids_BT: NDArray[np.int32]  # 0 is the trunk; branches count from 1 within a tree
    cuts_BT: NDArray[np.int32]  # a branch token sees trunk tokens at positions < cut
    targets_BT: NDArray[np.int32]
    mask_BT: NDArray[np.int32]
    old_logp_BT: NDArray[np.float32]  # nats, the sampler's
    advantage_BT: NDArray[np.float32]
    branches_BNJ: NDArray[np.int32] | None = None  # row indices of each branch's tokens, or -1

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        rows, tokens = self.ids_BT.shape
        return rows, tokens

    @property
    def sequence_ids_BT(self) -> NDArray[np.int32]:
        """int32 [B, T]: one number for each trunk or branch of a row, the unit of a sequence mean.

        A branch is a sequence of its own here, as it would be in a row of its own.
        """
        width = self.ids_BT.shape[1] + 1
        return np.asarray(self.segment_ids_BT * width + self.branch_ids_BT, np.int32)

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The arrays by field name, without copies."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: array for name, array in named.items() if array is not None}


def kept_tokens(row: TreeRow) -> int:
    """Number of tokens of the row's trunk and branches whose loss counts."""
    return sum(row.mask) + sum(sum(b.mask) for b in row.branches)


def check_row(row: TreeRow, name: str = "row") -> None:
    """Raises ValueError when the row cannot be trained on as it stands; says which part and why."""
    parts: list[tuple[str, TreeRow | Branch]] = [("trunk", row)]
    parts += [(f"branch {i}", b) for i, b in enumerate(row.branches)]
    for part, piece in parts:
        if not len(piece.ids) == len(piece.mask) == len(piece.logps):
            raise ValueError(
                f"{name}, {part}: {len(piece.ids)} ids, {len(piece.mask)} mask entries and "
                f"{len(piece.logps)} log-probs; all three must be equally many"
            )
        if not piece.ids:
            raise ValueError(f"{name}, {part}: has no tokens")
        if set(piece.mask) - {0, 1}:
            raise ValueError(f"{name}, {part}: mask entries must be 0 or 1, got {set(piece.mask)}")
        if piece.mask[0]:
            raise ValueError(
                f"{name}, {part}: mask 1 on the first token, which nothing in it predicts; "
                "prompt and suffix have mask 0 (was the mask built at all?)"
            )
    for i, branch in enumerate(row.branches):
        if not 1 <= branch.cut <= len(row.ids):
            raise ValueError(
                f"{name}, branch {i}: cut {branch.cut} must lie in 1..{len(row.ids)} (trunk length)"
            )
    if kept_tokens(row) == 0:
        raise ValueError(f"{name}: mask is 0 everywhere; leave such a row out before packing")


def pack(
    rows: Sequence[TreeRow], row_tokens: int, rows_per_batch: int, *, branch_table: bool = False
) -> list[PackedBatch]:
    """First-fit packing into batches of shape [rows_per_batch, row_tokens], in the given order.

    Each tree goes to the first row with room for it; the last batch is filled with empty rows.
    No rows give no batches. With ``branch_table`` the batches have ``branches_BNJ`` (models with
    linear layers need it), of one shape for all: branches a row rounded up to a power of two,
    tokens a branch to a multiple of 32, so that few shapes occur. Raises ValueError for a tree
    longer than ``row_tokens``, with both numbers, and for what `check_row` refuses.
    """
    if row_tokens < 1 or rows_per_batch < 1:
        raise ValueError(
            f"row_tokens and rows_per_batch must be at least 1, got {row_tokens}, {rows_per_batch}"
        )
    bins: list[list[TreeRow]] = []
    used: list[int] = []
    for i, row in enumerate(rows):
        check_row(row, f"row {i}")
        if row.n_tokens > row_tokens:
            raise ValueError(
                f"row {i} has {row.n_tokens} tokens (trunk {len(row.ids)}, {len(row.branches)} "
                f"branches), more than row_tokens = {row_tokens}"
            )
        place = next((b for b, n in enumerate(used) if n + row.n_tokens <= row_tokens), len(bins))
        if place == len(bins):
            bins.append([])
            used.append(0)
        bins[place].append(row)
        used[place] += row.n_tokens
    batches = []
    for first in range(0, len(bins), rows_per_batch):
        batch = _empty(rows_per_batch, row_tokens)
        for b, trees in enumerate(bins[first : first + rows_per_batch]):
            start = 0
            for segment, tree in enumerate(trees, start=1):
                start = _write(batch, b, start, segment, tree)
        batches.append(batch)
    return _with_branches(batches) if branch_table else batches


def _with_branches(batches: list[PackedBatch]) -> list[PackedBatch]:
    found = [
        [
            [np.flatnonzero(row == number) for number in np.unique(row[branches > 0])]
            for row, branches in zip(batch.sequence_ids_BT, batch.branch_ids_BT, strict=True)
        ]
        for batch in batches
    ]
    rows = [row for batch in found for row in batch]
    most = max((len(row) for row in rows), default=0)
    longest = max((len(branch) for row in rows for branch in row), default=0)
    shape = (1 << (most - 1).bit_length() if most else 0, -(-longest // 32) * 32)
    filled = []
    for batch, batch_rows in zip(batches, found, strict=True):
        table = np.full((batch.shape[0], *shape), -1, np.int32)
        for b, row in enumerate(batch_rows):
            for n, branch in enumerate(row):
                table[b, n, : len(branch)] = branch
        filled.append(dataclasses.replace(batch, branches_BNJ=table))
    return filled


def _empty(rows: int, tokens: int) -> PackedBatch:
    def ints(value: int = 0) -> NDArray[np.int32]:
        return np.full((rows, tokens), value, np.int32)

    def floats() -> NDArray[np.float32]:
        return np.zeros((rows, tokens), np.float32)

    return PackedBatch(
        ints(), ints(), ints(), ints(), ints(NO_CUT), ints(), ints(), floats(), floats()
    )


def _write(batch: PackedBatch, b: int, start: int, segment: int, tree: TreeRow) -> int:
    """Lays one tree out in row b from ``start``; returns the first free place behind it."""
    pieces: list[tuple[int, int, int, TreeRow | Branch]] = [(0, 0, NO_CUT, tree)]
    pieces += [(i, x.cut, x.cut, x) for i, x in enumerate(tree.branches, 1)]
    for branch, position, cut, piece in pieces:
        n = len(piece.ids)
        here, predicting = slice(start, start + n), slice(start, start + n - 1)
        batch.ids_BT[b, here] = piece.ids
        batch.positions_BT[b, here] = np.arange(position, position + n)
        batch.segment_ids_BT[b, here] = segment
        batch.branch_ids_BT[b, here] = branch
        batch.cuts_BT[b, here] = cut
        batch.targets_BT[b, predicting] = piece.ids[1:]
        batch.mask_BT[b, predicting] = piece.mask[1:]
        batch.old_logp_BT[b, predicting] = piece.logps[1:]
        batch.advantage_BT[b, predicting] = np.where(piece.mask[1:], piece.advantage, 0.0)
        start += n
    return start
