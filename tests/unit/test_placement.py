"""What a scanned model keeps for its backward pass is cut over all of a slice's chips.

Compiled for TPU chips that are not there: each layer's input, [B, T, D], is kept once for each
layer; tokens are cut over the ``tensor`` axis between layers, so that a chip holds its part only.
"""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from agentspec.mesh import BATCH_AXES, make_mesh, param_shardings
from agentspec.model.config import ModelConfig
from agentspec.model.transformer import LanguageModel

B, T, D = 1, 4096, 1024


@pytest.fixture(scope="module")
def devices():
    """The eight chips of a v5e:2x4."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("compiling for a TPU needs its compiler: pip install libtpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def temp_bytes(devices, n_layers: int) -> int:
    """Temporary bytes of a chip in a gradient over so many scanned layers."""
    config = ModelConfig(
        vocab_size=512,
        d_model=D,
        n_layers=n_layers,
        n_heads=8,
        n_kv_heads=8,
        head_dim=128,
        d_ff=2 * D,
        rope_theta=1e4,
        dtype="bfloat16",
        remat="full",
        scan=True,
    )
    mesh = make_mesh(1, 1, 8, devices=devices)
    model = LanguageModel(config, mesh)
    where = param_shardings(model.logical_axes, model.shapes, mesh)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model.shapes, where
    )
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=rows)

    def loss(params, ids, positions):
        return model.hidden(params, ids, positions, ids).astype(jnp.float32).sum()

    program = jax.jit(jax.grad(loss), out_shardings=where).lower(params, ids, ids).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_kept_inputs_are_cut_over_the_chips(devices):
    """Whole inputs in bf16 would be B * T * D * 2 bytes a layer; cut over the chips, an eighth."""
    per_layer = (temp_bytes(devices, 12) - temp_bytes(devices, 4)) / 8
    assert per_layer < B * T * D * 2 / 2
