"""Shape of a decoder: all that ``transformer`` needs to know of a model.

``hf_config`` makes one of a Hugging Face ``config.json`` and back.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

FAMILIES = ("llama", "qwen3", "qwen3_5")
DTYPES = ("float32", "bfloat16")
REMAT = ("none", "full", "dots")
ATTENTION = ("auto", "xla", "splash")
Kind = Literal["full", "linear"]


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's stretching of the rotary frequencies: names as in ``config.json``."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """Sizes of a Gated DeltaNet layer: each key head serves ``value_heads / key_heads`` others."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder: pre-norm, rotary, grouped-query attention, gated SiLU MLP.

    ``family`` says what else: ``qwen3`` has an RMS norm on each query and key head; ``qwen3_5``
    that too, norms that store an offset from one, an output gate on attention, positions on the
    first ``rotary_dim`` of each head only, and, where ``layer_types`` says ``linear``, Gated
    DeltaNet in place of attention. ``layer_types`` () and ``rotary_dim`` 0 mean all of them.

    How it is computed: weights are stored in ``param_dtype`` ("" is ``dtype``) and computed with
    in ``dtype``. ``remat`` names what the backward pass recomputes: ``none``, ``full`` (everything
    but each layer's input) or ``dots`` (all but the results of matrix products with weights).
    ``scan`` stacks the layers' weights, so that compile time does not depend on depth; on CPU it is
    slower. ``attention``: ``splash`` is the Pallas kernel, ``xla`` plain XLA, ``auto`` the first on
    TPU and the second elsewhere. ``chunk``: tokens that DeltaNet's parallel form takes at a time.
    """

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float
    rope_scaling: Llama3Rope | None = None
    rotary_dim: int = 0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    family: str = "qwen3"
    layer_types: tuple[str, ...] = ()
    linear: LinearShape | None = None
    dtype: str = "float32"
    param_dtype: str = ""
    remat: str = "none"
    scan: bool = False
    attention: str = "auto"
    chunk: int = 64
    max_positions: int = 32768
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError, naming the field, for a shape that cannot be computed."""
        names = "vocab_size d_model n_layers n_heads n_kv_heads head_dim d_ff max_positions chunk"
        sizes = {name: getattr(self, name) for name in names.split()}
        if self.linear is not None:
            sizes |= {f"linear.{k}": v for k, v in dataclasses.asdict(self.linear).items()}
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"model.{name} must be a positive integer, got {value!r}")
        _divides("n_heads", self.n_heads, "n_kv_heads", self.n_kv_heads)
        for name in ("head_dim", "rotary_dim"):
            if getattr(self, name) % 2:
                raise ValueError(
                    f"model.{name} must be even for rotary pairs, got {getattr(self, name)}"
                )
        if not 0 <= self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"model.rotary_dim={self.rotary_dim} must be from 0 to head_dim={self.head_dim}"
            )
        choices = {"family": FAMILIES, "dtype": DTYPES, "param_dtype": ("", *DTYPES)}
        choices |= {"remat": REMAT, "attention": ATTENTION}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"model.{name}={getattr(self, name)!r}, allowed: {', '.join(allowed)}"
                )
        if self.rope_theta <= 0 or self.norm_eps <= 0:
            raise ValueError(
                f"model.rope_theta={self.rope_theta} and model.norm_eps={self.norm_eps} "
                "must be above 0"
            )
        self._check_layer_types()

    def _check_layer_types(self) -> None:
        if self.layer_types and len(self.layer_types) != self.n_layers:
            raise ValueError(
                f"model.layer_types names {len(self.layer_types)} layers, "
                f"model.n_layers={self.n_layers}"
            )
        odd = sorted(set(self.layer_types) - {"full", "linear"})
        if odd:
            raise ValueError(f"model.layer_types {odd}, allowed: full, linear")
        if "linear" in self.layer_types and self.linear is None:
            raise ValueError("model.layer_types has linear layers but model.linear gives no sizes")
        if self.linear is not None:
            _divides(
                "linear.value_heads",
                self.linear.value_heads,
                "linear.key_heads",
                self.linear.key_heads,
            )

    @property
    def qk_norm(self) -> bool:
        """Whether query and key heads are normalised."""
        return self.family != "llama"

    @property
    def gated(self) -> bool:
        """Whether attention's output is gated, and norms store an offset from one."""
        return self.family == "qwen3_5"

    @property
    def stored_dtype(self) -> str:
        """The dtype of the parameters."""
        return self.param_dtype or self.dtype

    @property
    def kinds(self) -> tuple[str, ...]:
        """``full`` or ``linear``, for each layer."""
        return self.layer_types or ("full",) * self.n_layers

    @property
    def period(self) -> int:
        """How many entries ``params["layers"]`` has.

        With ``scan`` the length of the shortest pattern of kinds whose repetition makes up the
        layers; entry j holds layers j, j + period, ... stacked. Without, the number of layers.
        """
        n, kinds = self.n_layers, self.kinds
        if not self.scan:
            return n
        return next(p for p in range(1, n + 1) if n % p == 0 and kinds == kinds[:p] * (n // p))


def _divides(of: str, whole: int, by: str, part: int) -> None:
    if part < 1 or whole % part:
        raise ValueError(f"model.{of}={whole} is not a multiple of model.{by}={part}")
