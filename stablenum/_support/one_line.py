"""How an object is shown in one line: settings and counts, never the elements of an array."""

from __future__ import annotations

from pathlib import Path

__all__ = ["kind_of", "one_line"]


def one_line(of: object, **fields: object) -> str:
    """Return the name of an object's class with these fields. Classes and functions are shown by their names.

    Example:
        >>> one_line([1.0], keep=3, format="npz", folder=Path("runs"), model=dict, optimizer=None)
        "list(keep=3, format='npz', folder='runs', model=dict, optimizer=None)"
    """
    shown = ", ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    return f"{type(of).__name__}({shown})"


def kind_of(value: object) -> object:
    """Return what :func:`one_line` shows of a value that may hold arrays: its class, or None for None.

    A function is returned as it is.

    Example:
        >>> one_line([1.0], optimizer=kind_of({"lr": 0.1}), loss_fn=kind_of(len))
        'list(optimizer=dict, loss_fn=len)'
    """
    return value if value is None or hasattr(value, "__qualname__") else type(value)


def _shown(value: object) -> str:
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return name
    return repr(str(value) if isinstance(value, Path) else value)
