"""Rows that take a second, with bounds that hold on a busy machine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from benchmarks.steps import summary
from benchmarks.steps.measure import measure
from benchmarks.steps.rows import JAX, TORCH, Row, row_named

TORCH_ROW = replace(
    row_named("torch adamw fused 10k/10 float32"),
    size="tiny",
    tensors=3,
    shape=(50, 4),
    rounds=5,
    variants=TORCH,
    bound=math.inf,
)
JAX_ROW = replace(
    row_named("jax adamw xla 10k/10 float32"),
    size="tiny",
    tensors=3,
    shape=(50, 4),
    rounds=5,
    variants=JAX,
    bound=math.inf,
)


def kinds(row: Row) -> list[Row]:
    """The row with each optimizer, kernel and dtype that is measured; in JAX with different variants."""
    if row.framework == "jax":
        row = replace(row, variants=("bare", "apply_if_finite", "wrapper", "fold"))
    more = [replace(row, optimizer="sgd"), replace(row, dtype="bfloat16")]
    if row.framework == "torch":
        more += [replace(row, kernel="foreach"), replace(row, optimizer="sgd", kernel="foreach")]
    return more


def measured(row: Row) -> dict[str, Any]:
    """The row's result, from this process alone."""
    return summary.result_of(row, [measure(row)])
