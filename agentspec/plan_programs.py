"""The job's device programs, compiled for a TPU slice that is not there.

In: settings, a model's shape, and a ``Setting`` (slice, mesh, micro-batch, recomputation). Out: for
each program what it takes of a chip's memory and what it costs (``Measured``). No array is made:
the programs are those of training and sampling (``update.Update``, ``rollout.decode.Programs``),
lowered for shapes with shardings and compiled by the TPU compiler, which needs libtpu and no TPU.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from agentspec.chips import GIB, Slice
from agentspec.configuration import ConfigError
from agentspec.costs import Cost, program_cost
from agentspec.mesh import batch_sharding, make_mesh, param_shardings
from agentspec.model.config import ModelConfig
from agentspec.model.transformer import LanguageModel
from agentspec.optim import Optimizer
from agentspec.progress import say
from agentspec.settings import Settings
from agentspec.tokens.pack import pack
from agentspec.types import Branch, TreeRow
from agentspec.update import make_update


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one plan is made for, and what a search for a better one may change."""

    slice: Slice
    mesh: tuple[int, int, int]  # data, fsdp, tensor
    rows: int  # of a micro-batch, each host's
    remat: str
    chunk_tokens: int  # of the head: loss.logits_chunk_tokens
    engine_rows: tuple[int, int]  # cache rows of a host: agent's, speculator's

    @property
    def global_rows(self) -> int:
        """Rows of a micro-batch over all hosts."""
        return self.rows * (self.slice.n_chips // self.slice.host_chips)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A compiled program; bytes on each chip. ``needs_bytes`` stands in where it is too large to be
    compiled: then there is nothing else but the arguments.
    """

    name: str
    argument_bytes: int
    output_bytes: int = 0
    aliased_bytes: int = 0
    temporary_bytes: int = 0
    cost: Cost | None = None
    compile_s: float = 0.0
    needs_bytes: int | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of arguments, results, results in an argument's place, temporaries."""
        return self.argument_bytes, self.output_bytes, self.aliased_bytes, self.temporary_bytes

    @property
    def total_bytes(self) -> int:
        """Arguments, results that are no argument's memory, and temporaries."""
        if self.needs_bytes is not None:
            return self.needs_bytes
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes


def slice_devices(wanted: Slice) -> list[Any]:
    """Devices of the slice to compile for; ModuleNotFoundError where libtpu is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError("libtpu is not installed", name="libtpu")
    # libtpu asks the machine which TPU it has, unless it is told; these count when it is loaded.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nothing here touches a TPU
    more: dict[str, Any] = {}
    if wanted.chip.name == "v4":
        more["chip_config_name"] = "megacore"  # one device a chip
    if wanted.n_chips == 1:
        more["chips_per_host_bounds"] = (1, 1, 1)
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=wanted.name, **more)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"libtpu knows no slice {wanted.name}: {reason}") from error
    return list(found.devices)


def compiled(name: str, jitted: Any, *args: Any, **kwargs: Any) -> Measured:
    """Compiles ``jitted`` for its arguments' shapes and shardings, and says what came out."""
    found = _compiled(name, jitted, *args, **kwargs)
    said = f"{found.total_bytes / GIB:.2f} GiB a chip, compiled in {found.compile_s:.0f} s"
    say(f"[plan] {name}: {said}")
    return found


def _compiled(name: str, jitted: Any, *args: Any, **kwargs: Any) -> Measured:
    start = time.monotonic()
    held = chip_bytes((args, kwargs))
    try:
        program = jitted.lower(*args, **kwargs).compile()
    except jax.errors.JaxRuntimeError as error:
        needs = _needs_bytes(str(error))
        if needs is None:
            raise
        return Measured(name, held, needs_bytes=needs, compile_s=time.monotonic() - start)
    memory = program.memory_analysis()
    return Measured(
        name,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        _cost(program),
        time.monotonic() - start,
    )


def _cost(program: Any) -> Cost | None:
    """The program's cost; None, and said so, where its text cannot be read."""
    try:
        return program_cost(program)
    except jax.errors.JaxRuntimeError as error:  # seen with a libtpu newer than jaxlib's own
        found = importlib.metadata.version("libtpu"), importlib.metadata.version("jaxlib")
        say(
            "[plan] costs are not counted: jaxlib {1} cannot read what libtpu {0} wrote; install "
            "the libtpu of constraints.txt. ".format(*found)
            + str(error).splitlines()[0]
        )
        return None


def _needs_bytes(message: str) -> int | None:
    """What a program needs, from the compiler's refusal; None for another error."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    number = r"([\d.]+)([KMGT])"
    forms = (rf"Used {number} of", rf"HLO temporaries \({number}\)", rf"\({number}\) exceeds")
    sizes = re.search("|".join(forms), message)
    if sizes is None:
        return None
    size, unit = [part for part in sizes.groups() if part]
    return int(float(size) * {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}[unit])


def chip_bytes(tree: Any) -> int:
    """Bytes of a tree of (abstract) arrays on the chip that holds most."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
    return total


class Training:
    """The update's programs for one setting: gradients of a micro-batch, their sum, the step."""

    def __init__(
        self, settings: Settings, config: ModelConfig, setting: Setting, devices: list[Any]
    ) -> None:
        """Raises ConfigError for a mesh that does not go with the slice, model or rows."""
        self.settings, self.setting = settings, setting
        try:
            self.mesh = make_mesh(*setting.mesh, devices=devices)
            self.rows = batch_sharding(self.mesh, setting.global_rows)
            self.model = LanguageModel(
                dataclasses.replace(config, remat=setting.remat), mesh=self.mesh
            )
            shardings = param_shardings(self.model.logical_axes, self.model.shapes, self.mesh)
        except ValueError as error:
            raise ConfigError(f"config section mesh: {error}") from error
        self.params = jax.tree.map(placed, self.model.shapes, shardings)
        o = settings.optim
        optimizer = Optimizer(weight_decay=o.weight_decay, clip_norm=o.clip_norm)
        state = jax.eval_shape(optimizer.init, self.model.shapes)
        self.state = jax.tree.map(placed, state, optimizer.shardings(self.model.shapes, shardings))
        loss = dataclasses.replace(settings.loss, logits_chunk_tokens=setting.chunk_tokens)
        self.update = make_update(
            self.model,
            optimizer,
            loss,
            temperature=settings.agent.temperature,
            max_tokens=settings.episode.max_tokens,
            reference_params=() if loss.kl else None,  # its shape is given below
            mesh=self.mesh,
        )
        self.reference = self.params if loss.kl else None
        self._measured: dict[Any, Measured] = {}

    def gradients(self, name: str, branches: int) -> Measured:
        """The program of one micro-batch whose every row is full: a trunk and ``branches``."""
        one = full_row(self.settings, branches)
        table = "linear" in self.model.config.kinds
        batch = pack([one], self.settings.pack.row_tokens, 1, branch_table=table)[0]
        arrays = {**batch.arrays(), "sequence_ids_BT": batch.sequence_ids_BT}
        batch_args = {
            key: jax.ShapeDtypeStruct(
                (self.setting.global_rows, *array.shape[1:]), array.dtype, sharding=self.rows
            )
            for key, array in arrays.items()
        }
        scalar = self._scalar
        shapes = tuple(array.shape for array in batch_args.values())
        if shapes not in self._measured:  # branches change the program of hybrid models only
            self._measured[shapes] = compiled(
                name, self.update._grads, self.params, self.reference, batch_args, scalar, scalar
            )
        return dataclasses.replace(self._measured[shapes], name=name)

    def adding(self) -> Measured:
        """The program that adds a micro-batch's gradients to the sum of those before."""
        return compiled("add gradients", self.update._add, self.params, self.params)

    def applying(self) -> Measured:
        """The optimizer's program."""
        return compiled("optimizer step", self.update._apply, self.state, self.params, self._scalar)

    @property
    def _scalar(self) -> jax.ShapeDtypeStruct:
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)


def full_row(settings: Settings, branches: int) -> TreeRow:
    """A row of exactly ``pack.row_tokens``: a trunk with ``branches`` of the longest prediction."""
    n = settings.speculator.max_tokens
    trunk = settings.pack.row_tokens - branches * n
    if trunk < 1:
        raise ConfigError(
            f"config key pack.row_tokens={settings.pack.row_tokens} has no room for {branches} "
            f"branches of speculator.max_tokens={n}"
        )

    def tokens(n: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        return (1,) * n, (0,) + (1,) * (n - 1), (0.0,) * n

    return TreeRow(
        *tokens(trunk), branches=tuple(Branch(trunk, *tokens(n)) for _ in range(branches))
    )


def placed(leaf: Any, sharding: Any) -> Any:
    """The abstract array of leaf's shape and dtype that lies as ``sharding`` says."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
