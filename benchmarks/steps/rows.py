"""What is measured: one row is one optimizer on one size, and all variants that take turns on it.

The rows are no full product. Parameters grow at 108 tensors (what bandwidth costs), tensors grow at 1 M
parameters (what each tensor costs), and 10 k parameters show what is fixed. bfloat16, SGD and the foreach
kernels are at 38 M, where the difference in traffic shows and the fixed part does not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "CLIPPED",
    "JAX_ROWS",
    "LABELS",
    "OURS",
    "ROWS",
    "TORCH_ROWS",
    "UNCLIPPED",
    "Row",
    "on_device",
    "row_named",
]

# The variants of each framework. The first is what the ratios are of.
TORCH = ("bare", "clip", "scaler", "isfinite", "accelerate", "idle", "fold", "all")
JAX = ("bare", "clip", "apply_if_finite", "dynamic_scale", "jmp", "idle", "wrapper", "fold", "all")
LABELS = {
    "bare": "bare",
    "clip": "clip",
    "scaler": "GradScaler + clip",
    "isfinite": "isfinite loop + clip",
    "accelerate": "Accelerate",
    "apply_if_finite": "apply_if_finite + clip",
    "dynamic_scale": "flax DynamicScale + clip",
    "jmp": "jmp + clip",
    "idle": "ours, multiplier 1",
    "wrapper": "ours as chain, clip",
    "fold": "ours, scale and clip",
    "all": "ours, everything",
}
OURS = ("idle", "wrapper", "fold", "all")
# Which leave the gradients as they are, and which clip them: what the parameters have to be at the end.
UNCLIPPED = ("bare", "idle")
CLIPPED = tuple(name for name in dict.fromkeys(TORCH + JAX) if name not in UNCLIPPED)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One set of variants to time.

    Attributes:
        framework, optimizer, kernel: which step; ``kernel`` is how it is carried out.
        size, tensors: parameters (as people say it) and into how many equal tensors they are cut.
        shape: of each tensor.
        dtype: of parameters and gradients.
        rounds, warmup: timed rounds in each process, and those thrown away before them.
        variants: which are timed.
        bound: within how much of itself each ratio to the bare step has to be known (see ``repeats``).
    """

    framework: Literal["torch", "jax"]
    optimizer: Literal["adamw", "sgd"] = "adamw"
    kernel: Literal["fused", "foreach", "xla"] = "fused"
    size: str
    tensors: int
    shape: tuple[int, ...]
    dtype: Literal["float32", "bfloat16"] = "float32"
    rounds: int
    warmup: int = 4
    variants: tuple[str, ...]
    bound: float = 0.1

    @property
    def name(self) -> str:
        """``torch adamw fused 38M/108 float32``: unique, and what `--only` looks at."""
        return f"{self.framework} {self.optimizer} {self.kernel} {self.size}/{self.tensors} {self.dtype}"

    def in_turn(self, turn: int) -> tuple[str, ...]:
        """The variants in an order of that turn's own."""
        return tuple(random.Random(turn).sample(self.variants, len(self.variants)))

    @property
    def parameters(self) -> int:
        """Elements in all tensors."""
        n = self.tensors
        for side in self.shape:
            n *= side
        return n

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients."""
        return self.parameters * (4 if self.dtype == "float32" else 2)


_38M = Row(framework="torch", size="38M", tensors=108, shape=(350, 1000), rounds=11, variants=TORCH)
_1M = replace(_38M, size="1M", shape=(9260,), rounds=51)
# Every variant has 1.8 GB of parameters and moments here.
_150M = replace(
    _38M,
    size="150M",
    shape=(1389, 1000),
    rounds=7,
    variants=("bare", "clip", "scaler", "idle", "fold", "all"),
)
_10K = replace(_1M, size="10k", tensors=10, shape=(1000,), rounds=201)

TORCH_ROWS = (
    _10K,
    replace(_1M, tensors=10, shape=(100, 1000)),
    _1M,
    replace(_1M, tensors=2000, shape=(500,), rounds=21),
    _38M,
    _150M,
    replace(_38M, dtype="bfloat16"),
    replace(_38M, kernel="foreach", rounds=7),
    replace(_38M, optimizer="sgd"),
    replace(_38M, optimizer="sgd", kernel="foreach"),
)

# jmp and DynamicScale take a minute to compile; they are driven once at 38 M and once at 10 k.
_FEWER = tuple(name for name in JAX if name not in ("dynamic_scale", "jmp"))
_JAX_38M = replace(_38M, framework="jax", kernel="xla", variants=_FEWER)
_JAX_1M = replace(_1M, framework="jax", kernel="xla", variants=_FEWER)

JAX_ROWS = (
    replace(_10K, framework="jax", kernel="xla", variants=JAX),
    replace(_JAX_1M, tensors=10, shape=(100, 1000)),
    _JAX_1M,
    # XLA takes from half a minute to a minute to compile each of these.
    replace(_JAX_1M, tensors=2000, shape=(500,), rounds=21, variants=("bare", "apply_if_finite", "fold")),
    replace(_JAX_38M, variants=JAX),
    # The peers hold a second set of parameters and moments while they choose between the two.
    replace(
        _JAX_38M,
        size="150M",
        shape=(1389, 1000),
        rounds=7,
        variants=("bare", "apply_if_finite", "idle", "fold"),
    ),
    replace(_JAX_38M, dtype="bfloat16"),
    replace(_JAX_38M, optimizer="sgd"),
)

ROWS = TORCH_ROWS + JAX_ROWS


def on_device(row: Row, device: str) -> Row:
    """The row without what cannot run there: on CUDA, GradScaler has no kernel that unscales bfloat16."""
    if (row.framework, row.dtype, device) != ("torch", "bfloat16", "cuda"):
        return row
    return replace(row, variants=tuple(name for name in row.variants if name != "scaler"))


def row_named(name: str) -> Row:
    """The row of that name.

    Raises:
        ValueError: there is none.
    """
    for row in ROWS:
        if row.name == name:
            return row
    raise ValueError(f"row must be one of {[row.name for row in ROWS]}; got {name!r}.")
