"""Every argument of every safe function, given wrong values: an error that names it, what is allowed and what
came."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import array_api_compat.numpy as np
import jax.numpy as jnp
import pytest
import torch

import stablenum.numerics
import stablenum_jax.numerics
import stablenum_torch.numerics

MODULES: dict[str, tuple[ModuleType, Callable[[Any], Any]]] = {
    "numpy": (stablenum.numerics, lambda rows: np.asarray(rows, dtype=np.float32)),
    "jax": (stablenum_jax.numerics, lambda rows: jnp.asarray(rows, dtype=jnp.float32)),
    "torch": (stablenum_torch.numerics, lambda rows: torch.tensor(rows, dtype=torch.float32)),
}
ROWS, ROW, SHORT = [[1.0, 2.0, 3.0], [0.5, 0.25, 0.125]], [1.0, 2.0, 3.0], [1.0, 2.0]
AXES = ("x", 1.5, 2, -3, True, (0, 0), (0, -2), (0, 5), ("x",), object())
FLAGS = ("x", 1, None)
# Argument -> values that no function takes for it. A list stands for an array.
WRONG: dict[str, tuple[Any, ...]] = {
    "axis": AXES,
    "dim": AXES,
    "keepdims": FLAGS,
    "keepdim": FLAGS,
    "fill": ("x", None, 1j, [1.0, 1j], object()),
    "eps": ("x", -1.0, math.nan, math.inf, True, None),
    "correction": ("x", -1, 1.5, math.nan, None),
    "exponent": ("x", None, 1j, math.nan, math.inf, 1e300),
    "cap": ("x", 0.0, -1.0, math.nan, math.inf, None),
    "mask": ("x", 3.5, ROW),
    "weight": (SHORT, [ROWS]),
    "bias": (SHORT, [ROWS]),
}
# The core leaves arrays to its callers: only an adapter knows which objects are arrays.
WRONG_ARRAYS: tuple[Any, ...] = ("x", None, object(), 1j)
GIVEN = {"exponent": 2.0, "cap": 30.0}
CASES = [(name, function) for name, (module, _) in MODULES.items() for function in sorted(module.__all__)]


def _wrong_values(adapter: str, function: str, name: str) -> list[Any]:
    make = MODULES[adapter][1]
    found = [make(v) if isinstance(v, list) and v != [1.0, 1j] else v for v in WRONG.get(name, ())]
    if function == "cumulative_logsumexp" and name in ("axis", "dim"):
        found += [None, (0,)]
    if name in ("x", "y", "a", "b") and adapter != "numpy":
        found += WRONG_ARRAYS
    if name in ("weight", "bias") and adapter != "numpy":
        found += ["x", object()]
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(("adapter", "function"), CASES)
def test_wrong_values_are_refused_by_name(adapter: str, function: str) -> None:
    module, make = MODULES[adapter]
    call = getattr(module, function)
    names = [name for name in inspect.signature(call).parameters if name != "xp"]
    xp = {"xp": np} if adapter == "numpy" else {}
    required = [n for n in names if inspect.signature(call).parameters[n].default is inspect.Parameter.empty]
    given = {name: GIVEN.get(name, make(ROWS)) for name in required} | xp
    call(**given)
    for name in names:
        assert name in WRONG or name in ("x", "y", "a", "b"), f"say here which values {name} must refuse"
        for value in _wrong_values(adapter, function, name):
            with pytest.raises((TypeError, ValueError)) as caught:
                call(**{**given, name: value})
            message = str(caught.value)
            assert message.startswith(name), (name, value, message)
            assert " must " in message, (name, value, message)
            assert "; got " in message, (name, value, message)


@pytest.mark.parametrize("adapter", MODULES)
def test_axes_and_fills_that_are_right(adapter: str) -> None:
    module, make = MODULES[adapter]
    xp = {"xp": np} if adapter == "numpy" else {}
    axis = "dim" if adapter == "torch" else "axis"
    x = make(ROWS)
    for value in (0, -2, (0,), (0, 1), (-1, 0), None, np.int64(1)):
        assert float(module.norm(x, **{axis: value}, **xp).sum()) > 3
        assert module.rms_norm(x, **{axis: value}, **xp).shape == x.shape
    for fill in (math.inf, math.nan, 3, np.float32(2.0), make(5.0)):
        assert str(float(module.reciprocal(make([0.0]), fill=fill, **xp)[0])) == str(float(fill))
