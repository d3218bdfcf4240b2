"""What a compiled program costs on each device; loops count as often as they run.

In: a compiled JAX program. Out: a ``Cost``. XLA's own cost analysis takes the body of a loop once,
however often it runs, and knows nothing of Pallas kernels. Here the text of the compiled program is
read for its loops: a loop's body is analysed as a program of its own and taken as often as the loop
runs. So layers under a scan, a head that runs over chunks and a recurrence over chunks all count in
full, and what the compiler cut apart, recomputes or leaves on every device counts as compiled.

A loop whose number of runs depends on data (decoding until all rows have stopped) counts once and
is listed. Attention kernels count by formula (`kernel_flops`); other kernels are listed.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax

# The only way to XLA's analysis of one loop body; JAX is pinned, and tests/unit/test_plan watches.
from jax._src.lib import xla_client  # type: ignore[attr-defined]


def _nested(depth: int) -> str:
    return r"\{[^{}]*\}" if depth == 1 else rf"\{{(?:[^{{}}]|{_nested(depth - 1)})*\}}"


_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%(\S+) = (.*)$")
_WHILE = re.compile(r" while\(%([^)]+)\), condition=%([^\s,]+), body=%([^\s,]+)")
_KNOWN_RUNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NOTED_RUNS = re.compile(r"/\*runs=(\d+)\*/")
_ELEMENT = re.compile(r"get-tuple-element\(%[^)]+\), index=(\d+)")
_COMPARE = re.compile(r"ROOT %\S+ = pred\[\]\S* compare\(%(\S+), %(\S+)\), direction=LT")
_CONSTANT = re.compile(r"s32\[\]\S* constant\((-?\d+)\)")
_COPY = re.compile(r" (?:copy|bitcast)\(%(\S+)\)")
_CALLED = re.compile(
    r"(?:to_apply|calls|called_computation|true_computation|false_computation)=%(\S+)"
)
# what costs do not depend on, some of it over several lines: braces up to four deep
_NOTES = re.compile(r", (?:metadata|frontend_attributes)=" + _nested(4))
_SHAPE = re.compile(r"\b(pred|[suf]\d+\w*|bf16)\[([\d,]*)\]")
_KERNEL = re.compile(r" custom-call\(.*custom_call_target=\"tpu_custom_call\"")
_OPERANDS = re.compile("operand_layout_constraints=" + _nested(2))

# Matrix products of [T, S, E] (or transposed) that each attention kernel makes per query head.
_PRODUCTS = (
    ("_fwd", 2),  # scores, output
    ("_dkv_dq", 5),  # scores, slope of weights, of values, of keys, of queries
    ("_dkv", 4),  # scores, slope of weights, of values, of keys
    ("_dq", 3),  # scores, slope of weights, of queries
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Pallas call: its name, the shapes it reads and writes, and how often it runs."""

    name: str
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    times: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """Work of one device. ``bytes`` are XLA's: what all instructions read and write, on-chip
    buffers among it. ``counted_once``: loops whose runs depend on data. ``unknown_kernels`` add
    their bytes and no FLOPs.
    """

    flops: float
    bytes: float
    counted_once: tuple[str, ...] = ()
    unknown_kernels: tuple[str, ...] = ()

    def times(self, n: float) -> Cost:
        """The cost of ``n`` such programs."""
        return dataclasses.replace(self, flops=self.flops * n, bytes=self.bytes * n)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            tuple(dict.fromkeys(self.counted_once + other.counted_once)),
            tuple(dict.fromkeys(self.unknown_kernels + other.unknown_kernels)),
        )


def program_cost(compiled: Any) -> Cost:
    """The cost of one run of ``compiled`` (``jax.jit(f).lower(...).compile()``) on one device."""
    return text_cost(compiled.as_text())


def text_cost(hlo: str) -> Cost:
    """The cost of one run of a compiled program, from its text in XLA's notation."""
    program = _Program(hlo)
    whole = _analysed(program, program.entry)
    flops, moved = whole
    for loop in program.loops:
        if loop.runs is None:
            continue
        body_flops, body_bytes = _analysed(program, loop.body)
        again = program.times[loop.inside] * (loop.runs - 1)
        flops, moved = flops + again * body_flops, moved + again * body_bytes
    unknown = []
    for kernel in program.kernels:
        work = kernel_flops(kernel)
        if work is None:
            unknown.append(kernel.name)
        flops += kernel.times * (work or 0.0)
        moved += kernel.times * kernel_bytes(kernel)
    once = tuple(loop.name for loop in program.loops if loop.runs is None)
    return Cost(flops, moved, once, tuple(dict.fromkeys(unknown)))


def kernel_flops(kernel: Kernel) -> float | None:
    """FLOPs of one run of an attention kernel, None for any other kernel.

    2 * products * heads * T * S * E, halved (times (T + 1) / 2T) where queries and keys are equally
    many, since a causal kernel skips what lies ahead. Nothing is taken off for other hidden parts:
    such a kernel leaves out no block because of its segments.
    """
    products = next((n for key, n in _PRODUCTS if key in kernel.name), None)
    floats = [
        shape for kind, shape in kernel.operands if kind in ("bf16", "f32") and len(shape) > 2
    ]
    if products is None or "mha" not in kernel.name and "mqa" not in kernel.name or len(floats) < 2:
        return None
    q, k = floats[:2]
    *heads, n_queries, size = q
    n_keys = k[-2]
    share = (n_queries + 1) / (2 * n_queries) if n_queries == n_keys else 1.0
    return 2.0 * products * math.prod(heads) * n_queries * n_keys * size * share


def kernel_bytes(kernel: Kernel) -> float:
    """Bytes of one run of a kernel if it reads each operand and writes each result once."""
    return float(sum(_n_bytes(shape) for shape in kernel.operands + kernel.results))


@dataclasses.dataclass(frozen=True)
class _Loop:
    name: str
    inside: str  # the computation that holds it
    body: str
    runs: int | None


class _Program:
    """A compiled program's text taken apart: computations, loops, kernels."""

    def __init__(self, hlo: str) -> None:
        self.header, self.computations, self.entry = _split(hlo)
        lines = self.computations
        self.bodies = {name: dict(_instructions(text)) for name, text in lines.items()}
        found = [
            (name, instruction, match)
            for name, body in self.bodies.items()
            for instruction, text in body.items()
            if (match := _WHILE.search(text))
        ]
        self.loops = [
            _Loop(instruction, name, match[3], self._runs(name, match))
            for name, instruction, match in found
        ]
        self.times = self._count()
        self.kernels = [
            Kernel(instruction, *_kernel_shapes(text), self.times[name])
            for name, body in self.bodies.items()
            for instruction, text in body.items()
            if _KERNEL.search(text) and self.times[name]
        ]

    def _count(self) -> dict[str, int]:
        """How often each computation runs, those inside fusions aside."""
        runs = {loop.body: loop.runs for loop in self.loops}
        times: dict[str, int] = collections.defaultdict(int)
        queue = [(self.entry, 1)]
        while queue:
            name, n = queue.pop()
            times[name] += n
            for text in self.bodies[name].values():
                if match := _WHILE.search(text):
                    queue.append((match[3], n * (runs[match[3]] or 1)))
                elif " fusion(" not in text:
                    called = [c.rstrip(",") for c in _CALLED.findall(text)]
                    queue += [(c, n) for c in called if c in self.bodies]
        return times

    def _runs(self, inside: str, loop: re.Match[str]) -> int | None:
        """How often a loop runs that counts up to a constant; None where it is no such loop."""
        if noted := _NOTED_RUNS.search(loop.string):  # the CPU's compiler writes it down
            return int(noted[1])
        state, condition, _ = loop.groups()
        compare = _COMPARE.search(self.computations[condition])
        if compare is None:
            return None
        tests = self.bodies[condition]
        index = _ELEMENT.search(tests.get(compare[1], ""))
        last = _CONSTANT.search(tests.get(compare[2], ""))
        if last is None and (carried := _ELEMENT.search(tests.get(compare[2], ""))):
            last = self._initial(inside, state, int(carried[1]))
        if index is None or last is None:
            return None
        first = self._initial(inside, state, int(index[1]))
        if first is None:
            return None
        return max(0, int(last[1]) - int(first[1]))

    def _initial(self, inside: str, state: str, index: int) -> re.Match[str] | None:
        """The constant that a loop's state begins with at ``index``, if it is one."""
        body = self.bodies[inside]
        made = re.search(r" tuple\((.*?)\)", body.get(state, ""))
        if made is None:
            return None
        names = [part.strip().split(" ")[-1].lstrip("%") for part in made[1].split(",")]
        text = body.get(names[index], "")
        while (copy := _COPY.search(text)) and not _CONSTANT.search(text):
            text = body.get(copy[1], "")
        return _CONSTANT.search(text)


def _split(hlo: str) -> tuple[str, dict[str, str], str]:
    """The program's name line, the text of each computation, and which of them it begins with."""
    computations: dict[str, str] = {}
    header, entry, name, lines = hlo.split("\n", 1)[0], "", "", []
    for line in _NOTES.sub("", hlo).splitlines():
        known = _KNOWN_RUNS.search(line)
        line = line.split(", backend_config=")[0] + (f" /*runs={known[1]}*/" if known else "")
        if match := _COMPUTATION.match(line):
            name, lines = match[1], [line.removeprefix("ENTRY ")]
            entry = name if line.startswith("ENTRY ") else entry
        elif name:
            lines.append(line)
            if line.startswith("}"):
                computations[name], name = "\n".join(lines), ""
    return header.split(",")[0], computations, entry


def _instructions(computation: str) -> Iterator[tuple[str, str]]:
    for line in computation.splitlines():
        if match := _INSTRUCTION.match(line):
            yield match[1], " " + match[2]


def _analysed(program: _Program, entry: str) -> tuple[float, float]:
    """XLA's FLOPs and bytes of the program that begins with computation ``entry``."""
    texts = [f"ENTRY {text}" if n == entry else text for n, text in program.computations.items()]
    xla: Any = xla_client
    module = xla.hlo.hlo_module_from_text("\n\n".join([program.header, *texts]))
    client = jax.local_devices(backend="cpu")[0].client
    found = xla._xla.hlo_module_cost_analysis(client, module)
    return float(found.get("flops", 0.0)), float(found.get("bytes accessed", 0.0))


def _kernel_shapes(text: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    given = _OPERANDS.search(text)
    results = text.split(" custom-call(")[0]
    return _shapes(given[0] if given else ""), _shapes(results)


def _shapes(text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (kind, tuple(int(n) for n in sizes.split(",") if n)) for kind, sizes in _SHAPE.findall(text)
    )


def _n_bytes(shape: tuple[str, tuple[int, ...]]) -> int:
    kind, sizes = shape
    width = 16 if kind == "bf16" else 8 if kind == "pred" else int(re.sub(r"\D.*", "", kind[1:]))
    return math.prod(sizes) * max(width, 8) // 8
