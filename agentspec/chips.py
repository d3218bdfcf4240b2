"""TPU chips and the slices that they are lent in: the one table of hardware figures.

In: a slice's name such as ``v5e:8x8``. Out: how many chips it has and what each can do. Figures are
those of Google Cloud's documentation (each chip names its page, as read in November 2026); peak
FLOP/s are dense bfloat16. ``usable_bytes`` is what the compiler (libtpu 0.0.42.1) says that a
program may take of a chip's memory, the rest being the runtime's.
"""

from __future__ import annotations

import dataclasses
import math

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of chip. ``slices`` are the documented shapes, smallest first; a host's programs see
    ``chips_per_host`` of a slice's chips (fewer in smaller slices).
    """

    name: str
    hbm_bytes: int
    usable_bytes: int
    peak_flops_per_s: float
    hbm_bytes_per_s: float
    chips_per_host: int
    slices: tuple[str, ...]
    page: str


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SOLID = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            hbm_bytes=32 * GIB,
            usable_bytes=int(30.75 * GIB),
            peak_flops_per_s=275e12,
            hbm_bytes_per_s=1200e9,
            chips_per_host=4,
            slices=_SOLID,
            page="https://cloud.google.com/tpu/docs/v4",
        ),
        Chip(
            name="v5e",
            hbm_bytes=16 * GIB,
            usable_bytes=int(15.75 * GIB),
            peak_flops_per_s=197e12,
            hbm_bytes_per_s=819e9,
            chips_per_host=4,
            slices=_FLAT,
            page="https://cloud.google.com/tpu/docs/v5e",
        ),
        Chip(
            name="v5p",
            hbm_bytes=95 * GIB,
            usable_bytes=int(95.73 * GIB),
            peak_flops_per_s=459e12,
            hbm_bytes_per_s=2765e9,
            chips_per_host=4,
            slices=_SOLID,
            page="https://cloud.google.com/tpu/docs/v5p",
        ),
        Chip(
            name="v6e",
            hbm_bytes=32 * GIB,
            usable_bytes=int(31.24 * GIB),
            peak_flops_per_s=918e12,
            hbm_bytes_per_s=1640e9,
            chips_per_host=4,
            slices=_FLAT,
            page="https://cloud.google.com/tpu/docs/v6e",
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips of one kind in one shape."""

    chip: Chip
    shape: str

    @property
    def name(self) -> str:
        """As given on the command line: ``v5e:8x8``."""
        return f"{self.chip.name}:{self.shape}"

    @property
    def n_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(map(int, self.shape.split("x")))

    @property
    def host_chips(self) -> int:
        """Chips that the programs of one host see."""
        return min(self.n_chips, self.chip.chips_per_host)

    def host(self) -> Slice:
        """The slice that the chips of one host would be by themselves."""
        slices = [Slice(self.chip, shape) for shape in self.chip.slices]
        return next(other for other in slices if other.n_chips == self.host_chips)

    def larger(self) -> list[Slice]:
        """The documented slices of this chip with more chips, the next one first."""
        slices = [Slice(self.chip, shape) for shape in self.chip.slices]
        return [other for other in slices if other.n_chips > self.n_chips]


def slice_named(name: str) -> Slice:
    """The slice of that name; ValueError names what there is."""
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise ValueError(f"{name!r}: no chip {kind!r}; known: {', '.join(CHIPS)} (as in v5e:8x8)")
    if shape not in CHIPS[kind].slices:
        known = ", ".join(CHIPS[kind].slices)
        raise ValueError(f"{name!r}: no {kind} slice of shape {shape!r}; known: {known}")
    return Slice(CHIPS[kind], shape)
