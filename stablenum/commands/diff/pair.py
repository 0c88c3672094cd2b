"""Load the programs of a comparison: from Python files that define them, and from recordings."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import typer

from stablenum.commands.outputs import check_file
from stablenum.commands.terminal import say
from stablenum.diagnosis.diff.mending.built import Built
from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.diff.sides.recording import ended
from stablenum.diagnosis.diff.weights.given import check_form
from stablenum.diagnosis.replay.source_files import package_of
from stablenum.diagnosis.watch.edited_sources import edited

__all__ = [
    "FILES",
    "Origin",
    "Pair",
    "built",
    "executed",
    "failed",
    "load_pair",
    "load_program_of",
    "load_sides",
]

# Recordings, and named arrays that another program has written.
FILES = (".snum", ".npz")
# The functions that a file may define.
_SIDES = ("program", "left", "right")


class Origin(NamedTuple):
    """Where a program comes from: a file, and the function that makes it; "" for a recording."""

    path: Path
    function: str = ""


class Pair(NamedTuple):
    """Two programs or recordings, the map of their weights, and where they come from."""

    left: Any
    right: Any
    weights: Any
    origins: tuple[Origin, Origin]


def load_pair(path: Path) -> Pair:
    """Return what ``left()`` and ``right()`` of a file return, and its ``weights``.

    Raises:
        typer.BadParameter: there is no such file, or it defines no such function, or one that returns
            something else than a program; or ``weights`` is none that ``stablenum.diff`` takes.
        typer.Exit: the file or one of its functions fails.
    """
    module = _module(path, "PAIR.py")
    left, right = _side(module, path, "left"), _side(module, path, "right")
    return Pair(left, right, _weights(module, path), (Origin(path, "left"), Origin(path, "right")))


def load_sides(left: Path, right: Path, side: str | None) -> Pair:
    """Return the programs of two files, each a recording or a file that defines ``program()``; and the
    ``weights`` that the latter define.

    Args:
        left, right: the files.
        side: "left" or "right", the function of a Python file that is called instead of ``program()``.

    Raises:
        typer.BadParameter, typer.Exit: as for :func:`load_pair`.
    """
    made, weights, origins = list[Any](), list[Any](), list[Origin]()
    for path, name in ((left, "LEFT"), (right, "RIGHT")):
        if path.suffix.lower() in FILES:
            made.append(_recording(path, name))
            origins.append(Origin(path))
            continue
        origins.append(Origin(path, side or "program"))
        before = set(sys.modules)
        module = _module(path, name)
        made.append(_side(module, path, side or "program"))
        weights += [_weights(module, path)] if hasattr(module, "weights") else []
        _forget(path.resolve().parent, before)
    given = weights[0] if weights else "match"
    return Pair(made[0], made[1], given, (origins[0], origins[1]))


def built(origin: Origin, texts: Mapping[str, str]) -> Built:
    """Return a program made once more, with other texts of some files, which are given by their real paths.
    What it prints is not shown, and modules are then as they were.

    Raises:
        Exception: whatever the file or its function raises.
    """
    path = origin.path.resolve()
    before = dict(sys.modules)
    own = {path.stem, *_own_modules(path.parent, ())}
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        try:
            with redirect_stdout(nowhere), redirect_stderr(nowhere), edited(texts):
                for name in own:
                    sys.modules.pop(name, None)
                module = executed(path)
                made = getattr(module, origin.function)()
                if not _is_program(made):
                    raise TypeError(
                        f"{origin.function}() returned {type(made).__name__}, which is not a program."
                    )
                return Built(made, vars(module))
        finally:
            for name in {*own, *_own_modules(path.parent, before)}:
                sys.modules.pop(name, None)
            sys.modules.update({name: before[name] for name in own if name in before})


def executed(path: Path) -> ModuleType:
    """Run a file as a module, and return it.

    Raises:
        Exception: whatever the file raises.
        ImportError: it is not a Python file.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)  # as if the file were run
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _forget(folder: Path, before: Collection[str]) -> None:
    """Forget the modules of a folder that were imported for a program: another one may have some of these
    names beside it."""
    for name in _own_modules(folder, before):
        del sys.modules[name]
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    importlib.invalidate_caches()


def _own_modules(folder: Path, before: Collection[str]) -> list[str]:
    """Return the names of the modules that lie in a folder and were not there before."""
    found, within = [], os.path.join(folder, "")
    for name in [n for n in sys.modules if n not in before]:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and _real(file).startswith(within) and not package_of(file):
            found.append(name)
    return found


@cache
def _real(file: str) -> str:
    """Return the real path of a module's file: there are thousands of modules."""
    return os.path.realpath(file)


def _is_program(made: Any) -> bool:
    return hasattr(made, "play") and hasattr(made, "parameters")


def load_program_of(path: Path, side: str | None) -> Program:
    """Return the program that a file defines by ``program()``, or by ``left()`` or ``right()``."""
    return _side(_module(path, "PROGRAM.py"), path, side or "program")


def _recording(path: Path, name: str) -> Any:
    from stablenum.diagnosis.diff.lockfile.loading import load_program

    check_file(path, name)
    try:
        return load_program(path)
    except (OSError, ValueError) as error:
        raise failed(str(error)) from error


def _weights(module: Any, path: Path) -> Any:
    weights = getattr(module, "weights", "match")
    try:
        check_form(weights)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(f"in {path}, {error}", param_hint="PAIR.py") from error
    return weights


def _module(path: Path, name: str) -> Any:
    check_file(path, name)
    try:
        return executed(path)
    except ImportError as error:
        if path.suffix == ".py":
            raise _failed(path, "the file", error) from error
        raise typer.BadParameter(f"{path} is not a Python file.", param_hint=name) from error
    except Exception as error:
        raise _failed(path, "the file", error) from error


def _side(module: Any, path: Path, name: str) -> Program:
    function = getattr(module, name, None)
    if not callable(function):
        others = [f"{n}()" for n in _SIDES if n != name and callable(getattr(module, n, None))]
        has = (
            f" It defines {' and '.join(others)}: choose with --side." if others and name == "program" else ""
        )
        raise typer.BadParameter(
            f"{path} must define a function {name}() that returns a program made by stablenum_torch.program "
            f"or stablenum_jax.program.{has}",
            param_hint=str(path),
        )
    try:
        made = function()
    except Exception as error:
        raise _failed(path, f"{name}()", error) from error
    if not _is_program(made):
        raise typer.BadParameter(
            f"{name}() in {path} must return a program made by stablenum_torch.program or "
            f"stablenum_jax.program; it returns {type(made).__name__}.",
            param_hint=str(path),
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
