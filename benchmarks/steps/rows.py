"""What is measured: a row is one optimizer at one size, with all variants that are timed in turn.

The rows are not a full product. The number of parameters varies at 108 tensors (the cost of bandwidth), the
number of tensors varies at 1 M parameters (the cost per tensor), and 10 k parameters show the fixed cost.
bfloat16, SGD and the foreach kernels are measured at 38 M, where traffic matters and the fixed cost does not.
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

# The variants of each framework. Ratios are relative to the first.
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
# The variants that leave the gradients unchanged, and those that clip; their final parameters differ.
UNCLIPPED = ("bare", "idle")
CLIPPED = tuple(name for name in dict.fromkeys(TORCH + JAX) if name not in UNCLIPPED)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One set of variants to time.

    Attributes:
        framework, optimizer, kernel: the step; ``kernel`` is the kind of implementation.
        size, tensors: the number of parameters (as a label) and of equal tensors that they are split into.
        shape: the shape of each tensor.
        dtype: the dtype of parameters and gradients.
        rounds, warmup: timed rounds in each process, and rounds before them that are not counted.
        variants: the variants to time.
        bound: the largest relative uncertainty of a ratio to the bare step (see ``repeats``).
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
        """A unique name, such as ``torch adamw fused 38M/108 float32``, by which `--only` selects."""
        return f"{self.framework} {self.optimizer} {self.kernel} {self.size}/{self.tensors} {self.dtype}"

    def in_turn(self, turn: int) -> tuple[str, ...]:
        """The variants in an order that depends on the turn."""
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
        """The number of bytes of all gradients."""
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

# jmp and DynamicScale take a minute to compile; they are measured once at 38 M and once at 10 k.
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
    """The row without variants that cannot run: on CUDA, GradScaler has no kernel that unscales bfloat16."""
    if (row.framework, row.dtype, device) != ("torch", "bfloat16", "cuda"):
        return row
    return replace(row, variants=tuple(name for name in row.variants if name != "scaler"))


def row_named(name: str) -> Row:
    """The row of that name.

    Raises:
        ValueError: there is no row of that name.
    """
    for row in ROWS:
        if row.name == name:
            return row
    raise ValueError(f"row must be one of {[row.name for row in ROWS]}; got {name!r}.")
