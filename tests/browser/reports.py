"""Reports of comparisons, drawn at random: a transformer of PyTorch and its port, or what a test asks for."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from stablenum import DiffReport
from stablenum.diagnosis.diff.differences import Cause, Difference, Location, Off, Row

SHARED = ("linear", "mul", "softmax", "matmul", "add", "transpose", "gelu")
DECOMPOSED = ("mean", "sub", "rsqrt")
LAYERS = (("norm1", "LayerNorm_0"), ("attn", "SelfAttention_0"), ("mlp", "MlpBlock_0"))
SHARES = (("forward", 0.4), ("backward", 0.5), ("update", 0.1))

EPSILON = Cause(
    code="epsilon_value",
    sentence="the left program adds 1e-05 under the root, the right one 1e-06.",
    evidence="With 1e-05 in the right program, both sides agree to 3e-15.",
    remedy="Give the right program nn.LayerNorm(epsilon=1e-5).",
    confirmed=True,
)
ORDER = Cause(
    code="operation_order",
    sentence="the right program scales before it adds.",
    evidence="",
    remedy="Compare the order of the two lines.",
    confirmed=False,
)


def row(**more: Any) -> Row:
    """An operation, with its usual fields."""
    plain: dict[str, Any] = {
        "operation": "add",
        "where": "model.py:7",
        "code": "x = x + 1",
        "module": "",
        "phase": "forward",
        "step": 1,
        "state": "equal",
        "partner": None,
        "error": None,
        "allowed": None,
        "off": None,
    }
    return Row(**(plain | more))


def report_of(operations: int, *, differs: bool = True, seed: int = 0) -> DiffReport:
    """A report on two programs of about so many operations each."""
    draw = random.Random(seed)
    left, right = _programs(operations, draw)
    if differs:
        left, right, difference = _parted(left, right, draw)
    return DiffReport(
        verdict="different" if differs else "the same in exact arithmetic",
        differences=(difference, _second(left, right)) if differs else (),
        weights={
            f"params.Block_{n}.{right}.kernel": f"blocks.{n}.{left}.weight, transposed"
            for n in range(12)
            for left, right in LAYERS
        },
        left_off=None if differs else Off(error=3e-7, where="model.py:31", operation="linear", added=1.2e-7),
        right_off=None
        if differs
        else Off(error=5e-7, where="port.py:44", operation="dot_general", added=2e-7),
        matched=(
            (sum(r.partner is not None for r in left), len(left)),
            (sum(r.partner is not None for r in right), len(right)),
        ),
        notes=("Dropout masks of the left program were drawn again for the right one.",),
        left_rows=tuple(left),
        right_rows=tuple(right),
    )


def _programs(operations: int, draw: random.Random) -> tuple[list[Row], list[Row]]:
    left: list[Row] = []
    right: list[Row] = []
    for phase, share in SHARES:
        wanted = len(left) + round(operations * share)
        blocks = max(2, round(operations * share / 60))
        for place in range(len(left), wanted):
            block = (place - wanted + round(operations * share)) * blocks // max(1, round(operations * share))
            name, port = LAYERS[place // 8 % 3]
            here = {"phase": phase, "module": f"blocks.{block}.{name}"}
            there = {"phase": phase, "module": f"Block_{block}/{port}"}
            if phase == "update":
                here["module"] = there["module"] = ""
            _add(left, right, here, there, draw)
    return left, right


def _add(left: list[Row], right: list[Row], here: Any, there: Any, draw: random.Random) -> None:
    if draw.random() < 0.12:
        for name in DECOMPOSED[: draw.randint(1, 3)]:
            line = draw.randint(20, 80)
            right.append(
                row(operation=name, where=f"port.py:{line}", code=f"{name}(x)", state="unmatched", **there)
            )
    operation = draw.choice(SHARED)
    error = 0.0 if draw.random() < 0.1 else 10 ** draw.gauss(-14, 0.7)
    same = {
        "state": "equal" if draw.random() < 0.25 else "rounding",
        "error": error,
        "allowed": 10 ** draw.gauss(-12.3, 0.3),
        "off": 10 ** draw.gauss(-7, 0.5),
    }
    a, b = draw.randint(10, 60), draw.randint(20, 80)
    code = f"x = F.{operation}(x)"
    left.append(
        row(operation=operation, where=f"model.py:{a}", code=code, partner=len(right), **same, **here)
    )
    code = f"h = jnp.{operation}(h)"
    right.append(
        row(operation=operation, where=f"port.py:{b}", code=code, partner=len(left) - 1, **same, **there)
    )


def _parted(
    left: list[Row], right: list[Row], draw: random.Random
) -> tuple[list[Row], list[Row], Difference]:
    """The programs with a difference in the middle of the forward pass."""
    start = next(i for i in range(round(0.2 * len(left)), len(left)) if left[i].partner is not None)
    other = left[start].partner
    assert other is not None
    left = [_after(r, draw) if i >= start else r for i, r in enumerate(left)]
    right = [_after(r, draw) if j >= other else r for j, r in enumerate(right)]
    left[start] = replace(
        left[start], operation="layer_norm", where="model.py:99", code="x = self.norm1(x)", partner=None,
        state="different", error=None,
    )  # fmt: skip
    right[other] = replace(
        right[other], operation="div", where="port.py:99", code="return (x - mean) / jnp.sqrt(var + epsilon)",
        partner=None, state="different", error=None,
    )  # fmt: skip
    difference = Difference(
        left=_location(left[start]),
        right=_location(right[other]),
        result="loss",
        step=1,
        error=4.3e-6,
        allowed=3e-9,
        causes=(EPSILON, ORDER),
    )
    return left, right, difference


def _after(r: Row, draw: random.Random) -> Row:
    if r.partner is None:
        return replace(r, state="different")
    return replace(r, state="different", error=10 ** draw.gauss(-6, 0.8))


def _second(left: list[Row], right: list[Row]) -> Difference:
    return Difference(
        left=_location(left[-1]), right=None, result="updated head.weight", step=1, error=2e-3, allowed=1e-10
    )


def _location(r: Row) -> Location:
    return Location(where=r.where, operation=r.operation, module=r.module, phase=r.phase, code=r.code)
