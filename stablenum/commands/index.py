"""The commands: where each is, what it does in one line, and what it needs.

Nothing is imported here, so that the command can list itself and say what to install where it lacks all else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CLI", "COMMANDS", "Command", "complaint", "is_app_there"]

# What has to be installed, by the name by which it is installed: the modules of which one must be there.
Needs = Mapping[str, tuple[str, ...]]

# What every command needs; it is the extra "cli".
CLI: Needs = {"rich": ("rich",), "typer": ("typer",)}

_NUMPY: Needs = {"numpy": ("numpy",)}
_ARRAYS: Needs = {"ml-dtypes": ("ml_dtypes",), **_NUMPY}
_FRAMEWORK: Needs = {**_NUMPY, "torch (or jax)": ("torch", "jax")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        module: the module in ``stablenum.commands`` that has the function of the command's name.
        about: what it does, for the list of all commands.
        needs: what it needs beyond the extra ``cli``.
    """

    module: str
    about: str
    needs: Needs = field(default_factory=dict)


# In the order in which they are listed.
COMMANDS: Mapping[str, Command] = {
    "demo": Command(
        module="demo.command",
        about="Show in two minutes what stablenum does, on programs that come with it.",
        needs={
            "matplotlib": ("matplotlib",),
            **_ARRAYS,
            "scikit-learn": ("sklearn",),
            "torch (or jax)": ("torch", "jax"),
        },
    ),
    "explain": Command(
        module="explain.command",
        about="Name the line of a script at which a value stops being finite.",
        needs=_FRAMEWORK,
    ),
    "checkup": Command(
        module="explain.checkup_command",
        about="Name what keeps a script from learning although all values are finite.",
        needs=_FRAMEWORK,
    ),
    "record": Command(
        module="diff.record",
        about="Write a program's numbers into a file, to compare elsewhere.",
        needs=_NUMPY,
    ),
    "diff": Command(
        module="diff.command",
        about="Name the first operation at which two programs differ.",
        needs=_NUMPY,
    ),
    "verify": Command(
        module="verify.command",
        about="Name what in a checkpoint is non-finite or suspicious.",
        needs=_ARRAYS,
    ),
    "report": Command(
        module="report.command",
        about="Show the log of a run: loss, gradient norm, loss scale, skips.",
    ),
    "compare": Command(
        module="compare.command",
        about="Run unstable trainings without and with the guard on every backend.",
        needs={"matplotlib": ("matplotlib",), **_ARRAYS, "scikit-learn": ("sklearn",)},
    ),
}


def is_app_there() -> bool:
    """Return whether the extra ``cli`` is there, without which commands can only be listed."""
    return not _missing(CLI)


def complaint(name: str) -> str | None:
    """Return what a command lacks and how to install it; None if it lacks nothing."""
    lacks = [*_missing(CLI), *_missing(COMMANDS[name].needs)]
    if not lacks:
        return None
    # By the names of packages: stablenum itself need not come from an index that knows its extras.
    packages = " ".join(need.partition(" ")[0] for need in lacks)
    return f"{name} needs {', '.join(lacks)}: pip install {packages}"


def _missing(needs: Needs) -> list[str]:
    return [name for name, modules in needs.items() if not any(map(_is_there, modules))]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook that blocks the module, or a stub in sys.modules
        return False
