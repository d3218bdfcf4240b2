"""What a plan says: memory of each phase, cost of each program, and the nearest setting that fits.

In: ``plan_programs.Measured`` of the job's programs. Out: ``Report`` and its text; ``nearest``, the
search for a setting that fits. Nothing here compiles: the search is given a function that tries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from agentspec.chips import GIB, Chip
from agentspec.costs import Cost
from agentspec.plan_programs import Measured, Setting

REMAT = ("none", "dots", "full")  # from the least to the most recomputed
CHUNK_TOKENS = 1024  # of the head, where the whole row is too much


@dataclasses.dataclass(frozen=True)
class Phase:
    """A moment of the job: what lies on each chip beside the program that runs, and that program.

    ``program.argument_bytes`` cover the weights and states that the program is given; ``beside`` is
    everything else that stays where it is meanwhile, by name.
    """

    program: Measured
    beside: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """All of it together, on one chip."""
        return self.program.total_bytes + sum(self.beside.values())


@dataclasses.dataclass(frozen=True)
class Work:
    """A unit of work whose cost is worth a line, made of program runs on each chip."""

    name: str
    cost: Cost

    def seconds(self, chip: Chip) -> tuple[float, float]:
        """Least seconds for the arithmetic, and for the memory traffic, at the chip's peaks."""
        return self.cost.flops / chip.peak_flops_per_s, self.cost.bytes / chip.hbm_bytes_per_s


@dataclasses.dataclass(frozen=True)
class Report:
    """A whole plan; ``parts`` are bytes of each chip by name, as the shapes and shardings say."""

    title: str
    setting: Setting
    parts: dict[str, int]
    phases: tuple[Phase, ...]
    work: tuple[Work, ...]
    row_bytes: int  # of one sequence of engine.cache_tokens, on each chip that serves it
    host_ways: int  # chips that share a sequence

    @property
    def usable_bytes(self) -> int:
        """What a chip has for all this."""
        return self.setting.slice.chip.usable_bytes

    @property
    def fits(self) -> bool:
        """Whether every phase stays within a chip's memory."""
        return all(phase.peak_bytes <= self.usable_bytes for phase in self.phases)

    @property
    def sequences(self) -> int:
        """How many full sequences the caches could hold, all else as it is in each phase."""
        used = max(phase.peak_bytes for phase in self.phases) - self.parts["cache"]
        return max(0, (self.usable_bytes - used) // self.row_bytes) if self.row_bytes else 0


def text(report: Report) -> str:
    """The report as it is printed."""
    chip = report.setting.slice.chip
    out = [report.title, f"{chip.name}: {chip.page}", "", "On each chip, GiB"]
    out += [f"  {name:<44}{n / GIB:>9.3f}" for name, n in report.parts.items()]
    out += ["", f"{'Phase, GiB on each chip':<34}{'given':>8}{'results':>9}{'temporary':>11}"]
    out[-1] += f"{'beside':>8}{'peak':>9}   of {report.usable_bytes / GIB:.2f}"
    for phase in report.phases:
        p, beside = phase.program, sum(phase.beside.values())
        numbers = [p.argument_bytes, p.output_bytes - p.aliased_bytes, p.temporary_bytes, beside]
        if p.needs_bytes is not None:
            cells = f"{'too large to compile':>28}{beside / GIB:>8.2f}"
        else:
            cells = "".join(
                f"{n / GIB:>{w}.2f}" for n, w in zip(numbers, (8, 9, 11, 8), strict=True)
            )
        fits = "fits" if phase.peak_bytes <= report.usable_bytes else "DOES NOT FIT"
        out.append(f"  {p.name:<32}{cells}{phase.peak_bytes / GIB:>9.2f}   {fits}")
        if phase.beside:
            names = ", ".join(f"{name} {n / GIB:.2f}" for name, n in phase.beside.items())
            out.append(f"    beside it: {names}")
    seconds = sum({p.program.sizes: p.program.compile_s for p in report.phases}.values())
    out += [
        f"  Compiled in {seconds:.0f} s, sums of gradients aside.",
        "",
        f"{'Work of each chip':<46}{'TFLOP':>12}{'GB':>11}{'s, arithmetic':>15}{'s, memory':>11}",
    ]
    for work in report.work:
        least = work.seconds(chip)
        out.append(
            f"  {work.name:<44}{work.cost.flops / 1e12:>12.3f}{work.cost.bytes / 1e9:>11.2f}"
            f"{least[0]:>15.4f}{least[1]:>11.4f}"
        )
    out += [
        "  No run is faster than its arithmetic at the chip's peak "
        f"({chip.peak_flops_per_s / 1e12:.0f} TFLOP/s, bfloat16): a bound, not an estimate.",
        "  GB: all that instructions read and write as XLA counts it, on-chip buffers among it; at "
        f"{chip.hbm_bytes_per_s / 1e9:.0f} GB/s.",
        "  Attention kernels count by formula, as if each row were one sequence; "
        "what chips send each other is not counted.",
    ]
    unknown = sorted({k for work in report.work for k in work.cost.unknown_kernels})
    if unknown:
        out.append(f"  FLOPs of these kernels are not known and left out: {', '.join(unknown)}")
    out += [
        "",
        f"A sequence of engine.cache_tokens takes {report.row_bytes / GIB:.3f} GiB on each of "
        f"{report.host_ways} chips; beside all else there is room for {report.sequences} of them.",
    ]
    return "\n".join(out)


def candidates(first: Setting, tensor_limit: int) -> Iterator[Setting]:
    """Settings to try in place of ``first``, those that change least before the others.

    One change alone: more recomputation, the head in chunks, fewer rows, fewer cache rows. Then all
    of them at once; that on other meshes of the same slice; that on the next two larger slices.
    """
    rank = REMAT.index(first.remat)
    lean = dataclasses.replace(first, remat="full")
    if first.chunk_tokens == 0 or first.chunk_tokens > CHUNK_TOKENS:
        lean = dataclasses.replace(lean, chunk_tokens=CHUNK_TOKENS)
    data, fsdp, tensor = first.mesh
    hosts = first.slice.n_chips // first.slice.host_chips
    fewest = max(1, data * fsdp // hosts)
    if fewest < first.rows:
        lean = dataclasses.replace(lean, rows=fewest)
    half = (max(1, first.engine_rows[0] // 2), max(2, first.engine_rows[1] // 2))
    single = [dataclasses.replace(first, remat=remat) for remat in REMAT[rank + 1 :]]
    single.append(dataclasses.replace(first, chunk_tokens=lean.chunk_tokens))
    single.append(dataclasses.replace(first, rows=lean.rows))
    single.append(dataclasses.replace(first, engine_rows=half))
    together = [lean, dataclasses.replace(lean, engine_rows=half)]
    seen = {first}
    for setting in (
        *single,
        *together,
        *_on_slices(lean, tensor_limit),
        *_on_slices(together[1], tensor_limit),
    ):
        if setting not in seen:
            seen.add(setting)
            yield setting


def _on_slices(lean: Setting, tensor_limit: int) -> Iterator[Setting]:
    for wanted in (lean.slice, *lean.slice.larger()[:2]):
        hosts = wanted.n_chips // wanted.host_chips
        for tensor in (lean.mesh[2], 1, 2, 4, 8):
            if wanted.n_chips % tensor or tensor_limit % tensor or wanted.n_chips < tensor:
                continue
            mesh = (1, wanted.n_chips // tensor, tensor)
            rows = max(1, math.ceil(mesh[1] / hosts))
            yield dataclasses.replace(lean, slice=wanted, mesh=mesh, rows=rows)


def nearest(
    settings: Iterator[Setting],
    fits: Callable[[Setting], bool],
    state_bytes: Callable[[Setting], int | None],
    most: int,
) -> tuple[Setting | None, int]:
    """The first of ``settings`` that ``fits``, and how many were tried, at most ``most``.

    ``state_bytes`` is what lies on a chip in every update, None where the model cannot be laid out
    so; settings beyond a chip's memory by that alone are passed over without being tried.
    """
    tried = 0
    for setting in settings:
        always = state_bytes(setting)
        if always is None or always > setting.slice.chip.usable_bytes:
            continue
        if tried == most:
            break
        tried += 1
        if fits(setting):
            return setting, tried
    return None, tried


def described(setting: Setting, first: Setting) -> str:
    """The flags that lead from ``first`` to ``setting``."""
    pairs: list[tuple[str, Any, Any]] = [
        ("topology", setting.slice.name, first.slice.name),
        ("config.mesh.data", setting.mesh[0], first.mesh[0]),
        ("config.mesh.fsdp", setting.mesh[1], first.mesh[1]),
        ("config.mesh.tensor", setting.mesh[2], first.mesh[2]),
        ("config.pack.rows_per_batch", setting.rows, first.rows),
        ("config.model.remat", setting.remat, first.remat),
        ("config.loss.logits_chunk_tokens", setting.chunk_tokens, first.chunk_tokens),
        ("config.engine.rows", setting.engine_rows[0], first.engine_rows[0]),
        ("config.engine.speculator_rows", setting.engine_rows[1], first.engine_rows[1]),
    ]
    return " ".join(f"--{name}={new}" for name, new, old in pairs if new != old)
