"""The tables of "NaN-safe functions and losses": each case in PyTorch, in JAX and with stablenum."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F  # noqa: N812
from cure_cases import THEMES, Case

import stablenum_jax.losses
import stablenum_jax.numerics
import stablenum_torch.losses
import stablenum_torch.numerics

__all__ = ["Found", "measured", "short", "write_cures"]

TORCH = {
    "torch": torch,
    "F": F,
    "numerics": stablenum_torch.numerics,
    "losses": stablenum_torch.losses,
}
JAX = {
    "jax": jax,
    "jnp": jnp,
    "optax": optax,
    "numerics": stablenum_jax.numerics,
    "losses": stablenum_jax.losses,
}


class Found(NamedTuple):
    """The value of an expression, and the gradient of its sum."""

    who: str
    written: str
    value: np.ndarray
    gradient: np.ndarray


def measured(case: Case) -> list[Found]:
    """Every expression of a case; those of stablenum come last, one for each framework."""
    rows = [Found("PyTorch", text, *_in_torch(text, case)) for text in case.torch]
    rows += [Found("JAX", text, *_in_jax(text, case)) for text in case.jax]
    rows.append(Found("stablenum, PyTorch", case.ours, *_in_torch(case.ours, case)))
    rows.append(Found("stablenum, JAX", case.ours, *_in_jax(case.ours, case)))
    return rows


def _in_torch(text: str, case: Case) -> tuple[np.ndarray, np.ndarray]:
    inputs = {name: torch.from_numpy(value) for name, value in _arrays(case).items()}
    wanted = inputs[case.by].requires_grad_()
    value = eval(text, TORCH | inputs)
    (gradient,) = torch.autograd.grad(value, wanted, torch.ones_like(value), materialize_grads=True)
    return value.detach().numpy(), gradient.numpy()


def _in_jax(text: str, case: Case) -> tuple[np.ndarray, np.ndarray]:
    inputs = {name: jnp.asarray(value) for name, value in _arrays(case).items()}
    value, pull = jax.vjp(lambda x: eval(text, JAX | inputs | {case.by: x}), inputs[case.by])
    (gradient,) = pull(jnp.ones_like(value))
    return np.asarray(value), np.asarray(gradient)


def _arrays(case: Case) -> dict[str, np.ndarray]:
    """The arguments: floating-point ones in the case's format, whole numbers and booleans unchanged."""
    arrays = {name: np.asarray(value) for name, value in case.at.items()}
    return {
        name: array.astype(case.format) if array.dtype == np.float64 else array
        for name, array in arrays.items()
    }


def short(values: Any) -> str:
    """Numbers with three digits, or five from 100 to 1e5; vectors in brackets, one-row matrices as a row."""
    array = np.squeeze(np.asarray(values, np.float64)) if np.size(values) == 1 else np.asarray(values)
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim:
        return f"[{(', ' if array.ndim == 1 else ',<br>').join(short(v) for v in array)}]"
    number = float(array)
    if math.isnan(number):
        return "**NaN**"
    text = f"{number:.5g}" if 100 <= abs(number) < 1e5 else f"{number:.3g}"
    text = re.sub(r"e([+-])0*(\d+)", lambda m: f"e{m[1].strip('+')}{m[2]}", text)
    return "0" if float(text) == 0 else text


def write_cures(directory: Path) -> None:
    """Write one table per theme."""
    for theme, cases in THEMES.items():
        lines = ["| as written | value | gradient |", "| --- | --- | --- |"]
        for case in cases:
            lines += ["| " + " | ".join(cells) + " |" for cells in [[_place(case), "", ""], *_rows(case)]]
        text = "\n".join([":::{table}", ":class: cures", *lines, ":::", ""])
        (directory / f"cures-{theme}.md").write_text(text, encoding="utf-8")


def _place(case: Case) -> str:
    at = ", ".join(f"{name} = {_plain(value)}" for name, value in case.at.items())
    kind = f", in {case.format}" if case.format != "float32" else ""
    by = f"; gradient with respect to {case.by}" if case.by != "x" else ""
    return f"**`{case.name}`** at {at}{kind}{by}"


def _plain(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        return _plain(value[0])
    if isinstance(value, list):
        return f"[{', '.join(_plain(v) for v in value)}]"
    return str(value) if isinstance(value, (bool, int)) else short(value)


def _rows(case: Case) -> list[list[str]]:
    """The rows of a case; stablenum has one row where both frameworks show the same."""
    found = [(f.who, f.written, short(f.value), short(f.gradient)) for f in measured(case)]
    *theirs, ours, ours_jax = found
    rows = [[_written(who, text), value, gradient] for who, text, value, gradient in theirs]
    if ours[2:] == ours_jax[2:]:
        return [*rows, [f"**stablenum** `{ours[1]}`", *ours[2:]]]
    return [*rows, *([f"**{who}** `{text}`", v, g] for who, text, v, g in (ours, ours_jax))]


def _written(who: str, text: str) -> str:
    """The expression, with its framework if the code does not show it."""
    return f"`{text}`" if re.search(r"\b(torch|F|jnp|jax|optax)\.", text) else f"`{text}` in {who}"
