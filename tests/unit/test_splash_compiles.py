"""The splash kernel compiled for TPUs, without one: it fits, and no array has T x T elements.

Memory is bounded by bytes a head and token of a device: 2 KiB, where the log-sums as the kernel
writes them take 512 and each of q, out and their gradients 256. One byte a score would be T bytes.
"""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from agentspec.mesh import BATCH_AXES, make_mesh
from agentspec.model.attention import Layout
from agentspec.model.splash import splash_attend, splash_attend_sharded


@pytest.fixture(scope="module")
def devices():
    """A function from a topology's name to its devices, to compile for."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("compiling for a TPU needs its compiler: pip install libtpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no metadata server
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-16")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # another process may compile as well
        # Programs for devices that are not there can be written to the cache, not read from it.
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield lambda name: topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def compiled(attend, rows, row_heads, B=1, H=16, K=8, T=16384, E=128, dtype=jnp.bfloat16):
    """The compiled gradient of ``attend`` over rows of trees with branches of up to 1024 tokens."""

    def struct(shape, dtype, sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    q = struct((B, H, T, E), dtype, row_heads)
    k = struct((B, K, T, E), dtype, row_heads)
    i = struct((B, T), jnp.int32, rows)
    layout = Layout(i, i, i, i, struct((B, 32, 1024), jnp.int32, rows))

    def loss(q, k, v, layout):
        return attend(q, k, v, layout).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, k, layout).compile()


def temp_bytes(program) -> int:
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("topology", "H", "K", "T"),
    [("v5e:4x4", 16, 8, 16384), ("v6e:2x4", 16, 8, 16384), ("v5e:4x4", 4, 2, 65536)],
)
def test_one_device(devices, topology, H, K, T):
    one = SingleDeviceSharding(devices(topology)[0])
    assert temp_bytes(compiled(splash_attend, one, one, H=H, K=K, T=T)) < 2048 * H * T


@pytest.mark.parametrize(("topology", "shape"), [("v6e:2x4", (1, 4, 2)), ("v5e:4x4", (1, 2, 8))])
def test_sharded(devices, topology, shape):
    """Each device works on its own rows and heads only, and memory is its part."""
    mesh = make_mesh(*shape, devices=devices(topology))
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    row_heads = NamedSharding(mesh, PartitionSpec(BATCH_AXES, "tensor"))
    attend = functools.partial(splash_attend_sharded, mesh=mesh)
    program = compiled(attend, rows, row_heads, B=2 * shape[0] * shape[1])
    assert temp_bytes(program) < 2 * 2048 * (16 // shape[2]) * 16384
    text = program.as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all"))


@pytest.mark.parametrize(
    ("H", "K", "T", "E", "dtype"),
    [
        (9, 3, 2000, 64, jnp.float32),
        (16, 4, 4096, 256, jnp.bfloat16),
        (2, 1, 512, 256, jnp.float32),
    ],
)
def test_head_sizes_fit(devices, H, K, T, E, dtype):
    """The compiler refuses a kernel whose blocks do not fit in a core's memory."""
    one = SingleDeviceSharding(devices("v5e:4x4")[0])
    assert compiled(splash_attend, one, one, H=H, K=K, T=T, E=E, dtype=dtype) is not None


def test_under_scan_and_checkpoint(devices):
    """Eight layers together need less than one layer's scores would, at one byte a score."""
    one = SingleDeviceSharding(devices("v5e:4x4")[0])

    def layers(q, k, v, layout):
        layer = jax.checkpoint(lambda x, _: (splash_attend(x, k, v, layout), None))
        return jax.lax.scan(layer, q, None, length=8)[0]

    assert temp_bytes(compiled(layers, one, one)) < 16 * 16384**2 // 2

