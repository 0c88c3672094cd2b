"""Load a file that defines the two programs of a comparison."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import typer

from stablenum.commands.outputs import check_file
from stablenum.commands.terminal import say
from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.diff.sides.recording import ended
from stablenum.diagnosis.diff.weights.given import check_form

__all__ = ["Pair", "failed", "load_pair"]


class Pair(NamedTuple):
    """What a file defines: two programs, and the map of their weights."""

    left: Program
    right: Program
    weights: Any = "match"


def load_pair(path: Path) -> Pair:
    """Return what ``left()`` and ``right()`` of a file return, and its ``weights``.

    Raises:
        typer.BadParameter: there is no such file, or it defines no such function, or one that returns
            something else than a program; or ``weights`` is none that ``stablenum.diff`` takes.
        typer.Exit: the file or one of its functions fails.
    """
    module = _module(path)
    left, right = _side(module, path, "left"), _side(module, path, "right")
    weights = getattr(module, "weights", "match")
    try:
        check_form(weights)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(f"in {path}, {error}", param_hint="PAIR.py") from error
    return Pair(left, right, weights)


def _module(path: Path) -> Any:
    check_file(path, "PAIR.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"{path} is not a Python file.", param_hint="PAIR.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # as if the file were run
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise _failed(path, "the file", error) from error
    return module


def _side(module: Any, path: Path, name: str) -> Program:
    function = getattr(module, name, None)
    if not callable(function):
        raise typer.BadParameter(
            f"{path} must define a function {name}() that returns a program made by stablenum_torch.program "
            "or stablenum_jax.program.",
            param_hint="PAIR.py",
        )
    try:
        made = function()
    except Exception as error:
        raise _failed(path, f"{name}()", error) from error
    if not (hasattr(made, "play") and hasattr(made, "parameters")):
        raise typer.BadParameter(
            f"{name}() in {path} must return a program made by stablenum_torch.program or "
            f"stablenum_jax.program; it returns {type(made).__name__}.",
            param_hint="PAIR.py",
        )
    found: Program = made
    return found


def _failed(path: Path, what: str, error: Exception) -> typer.Exit:
    line = ""
    at = error.__traceback__
    while at is not None:
        if Path(at.tb_frame.f_code.co_filename) == path.resolve():
            line = f", line {at.tb_lineno}"
        at = at.tb_next
    return failed(f"{what} in {path} failed{line}: {ended(error)}")


def failed(message: str) -> typer.Exit:
    """Print why two programs cannot be compared, which is no fault of the command line, and return the end
    of the command, with the exit code 2."""
    say(f"Error: {message}", err=True)
    return typer.Exit(2)
