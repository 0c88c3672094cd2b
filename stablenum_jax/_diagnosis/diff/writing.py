"""Write an equation as code that anyone can run."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stablenum.diagnosis.diff.sides.play import Dialect
from stablenum_jax._diagnosis.replay.cells import Cell

__all__ = ["DIALECT", "code_of", "code_of_part"]

DIALECT = Dialect(
    ("import jax", "import jax.numpy as jnp"),
    ('jax.config.update("jax_enable_x64", True)', ""),
    "jnp.asarray({})",
    "np.asarray({})",
    numbers=True,
    within="jax.enable_x64(True)",
)

# These may change nothing in float64.
_NOTHING = frozenset({"convert_element_type", "copy", "copy_p", "reduce_precision", "stop_gradient"})
# What functions say to arguments that they do not take, and Python to text that is no code.
_REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip
# Relative to the largest entry: the player may have added up an entry in another order, from a thousand
# terms.
_ROUNDING = 1e3 * np.finfo(np.float64).eps


def code_of(
    primitive: Any, params: Mapping[str, Any], inputs: Sequence[Cell], outputs: Sequence[Cell]
) -> str | None:
    """Return an equation as code: as the public function that gives the same, else as the primitive.

    Args:
        primitive: that of the equation.
        params: its parameters.
        inputs, outputs: what it read and what it gave.

    Returns:
        A line with ``$7`` for the value 7; None if the equation cannot be written.
    """
    if any(_is_key(c.data) for c in (*inputs, *outputs)):
        return None
    if len(inputs) == len(outputs) == 1 and primitive.name in _NOTHING and _equal(inputs[0], outputs[0]):
        return f"${outputs[0].id} = ${inputs[0].id}"
    arguments = [f"${c.id}" for c in inputs]
    targets = ", ".join(f"${c.id}" for c in outputs)
    if primitive.multiple_results and len(outputs) == 1:
        targets += ","
    for callee, kept in _ways(primitive, params):
        texts = {key: _text(value) for key, value in kept.items()}
        if any(text is None for text in texts.values()) or not _gives(callee, texts, inputs, outputs):
            continue
        return f"{targets} = {callee}({', '.join([*arguments, *(f'{k}={v}' for k, v in texts.items())])})"
    return None


def code_of_part(operation: str, inputs: Sequence[Cell], outputs: Sequence[Cell]) -> str | None:
    """Return a part of a loop as code: a row that is taken from an array, or rows that are stacked."""
    if any(_is_key(c.data) for c in (*inputs, *outputs)):
        return None
    made = outputs[0]
    if operation == "stack" and inputs:
        return f"${made.id} = jnp.stack([{', '.join(f'${c.id}' for c in inputs)}])"
    if operation == "index":
        rows = enumerate(np.asarray(inputs[0].data))
        number = next((i for i, row in rows if np.array_equal(row, made.data, equal_nan=True)), None)
        return None if number is None else f"${made.id} = ${inputs[0].id}[{number}]"
    return None


def _ways(primitive: Any, params: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the functions that may compute an equation, each with the parameters that it takes."""
    name = primitive.name.replace("-", "_")
    ways: list[tuple[str, dict[str, Any]]] = []
    public = getattr(lax, name, None)
    if callable(public):
        taken = {k: v for k, v in params.items() if k in inspect.signature(public).parameters}
        ways.append((f"jax.lax.{name}", {k: v for k, v in taken.items() if v is not None}))
    if getattr(lax, f"{name}_p", None) is primitive:
        ways.append((f"jax.lax.{name}_p.bind", dict(params)))
    return ways


def _gives(
    callee: str, texts: Mapping[str, str | None], inputs: Sequence[Cell], outputs: Sequence[Cell]
) -> bool:
    """Return whether a call gives what the equation gave."""
    options = ", ".join(f"{k}={v}" for k, v in texts.items())
    data = [c.data for c in inputs]
    try:
        with jax.enable_x64(True):
            made = eval(f"{callee}(*data, {options})", {"jax": jax, "jnp": jnp, "np": np, "data": data})
    except _REFUSALS:
        return False
    results = list(made) if isinstance(made, tuple | list) else [made]
    return len(results) == len(outputs) and all(
        _same(np.asarray(a), np.asarray(c.data)) for a, c in zip(results, outputs, strict=True)
    )


def _equal(a: Cell, b: Cell) -> bool:
    return _same(np.asarray(a.data), np.asarray(b.data))


def _same(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind != "f":
        return bool((a == b).all())
    scale = float(np.abs(np.nan_to_num(b, posinf=0.0, neginf=0.0)).max(initial=0.0))
    return bool(np.allclose(a, b, rtol=0.0, atol=_ROUNDING * scale, equal_nan=True))


def _is_key(data: Any) -> bool:
    return jnp.issubdtype(getattr(data, "dtype", np.dtype(float)), jax.dtypes.extended)


def _text(x: Any) -> str | None:
    """Return a parameter as code; None if it has none."""
    if getattr(lax, type(x).__name__, None) is type(x):
        return f"jax.lax.{type(x).__name__}.{x.name}" if isinstance(x, enum.Enum) else f"jax.lax.{x!r}"
    if type(x) is tuple:
        parts = [_text(y) for y in x]
        return None if None in parts else f"({', '.join(map(str, parts))}{',' if len(x) == 1 else ''})"
    if isinstance(x, np.dtype) or (isinstance(x, type) and issubclass(x, np.generic)):
        return f"jnp.{np.dtype(x).name}" if hasattr(jnp, np.dtype(x).name) else None
    if x is None or isinstance(x, bool | int | str):
        return repr(x)
    if isinstance(x, float):
        return repr(x) if x - x == 0 else f"float('{x}')"
    return None
