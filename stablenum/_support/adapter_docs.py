"""The docstring and signature of a core function as an adapter shows them, without ``xp``."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["HIDDEN", "spelled_signature", "spelled_text"]

HIDDEN = ("xp", "sums", "items")
"""Arguments that adapters fill in."""


def spelled_text(
    function: Callable[..., Any],
    example: str,
    *,
    words: Iterable[tuple[str, str]] = (),
    note: str = "",
    hidden: tuple[str, ...] = HIDDEN,
) -> str:
    """Return the function's docstring without the hidden arguments and with another example.

    Args:
        function: the core function.
        example: lines of an interactive session that replace the function's own example.
        words: pairs of the core's term and the framework's term for it.
        note: a paragraph to insert before the example.
        hidden: arguments whose lines are dropped. Each must be documented in a single line.

    Example:
        >>> def f(x, *, axis, xp):
        ...     '''The sum.
        ...
        ...     Args:
        ...         axis: the axis to sum over.
        ...         xp: the array namespace.
        ...
        ...     Example:
        ...         >>> f(1)
        ...     '''
        >>> print(spelled_text(f, "g(1)", words=[("axis:", "dim:")]).strip())
        The sum.
        <BLANKLINE>
        Args:
            dim: the axis to sum over.
        <BLANKLINE>
        Example:
            g(1)
    """
    text = inspect.cleandoc(function.__doc__ or "").partition("Example:")[0]
    starts = tuple(f"    {name}: " for name in hidden)
    text = "\n".join(line for line in text.splitlines() if not line.startswith(starts))
    for ours, theirs in ((", xp:", ":"), *words):
        text = text.replace(ours, theirs)
    text = text.rstrip() + (f"\n\n{note}" if note else "")
    return f"{text}\n\nExample:\n{textwrap.indent(inspect.cleandoc(example), '    ')}\n"


def spelled_signature(
    function: Callable[..., Any],
    *,
    names: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    hidden: tuple[str, ...] = HIDDEN,
    **changes: Any,
) -> inspect.Signature:
    """Return the function's signature without the hidden arguments.

    Args:
        function: the core function.
        names: arguments to rename, as a mapping from the core's name to the framework's.
        defaults: new defaults, keyed by the core's argument names.
        hidden: arguments to drop.
        changes: passed to :meth:`inspect.Signature.replace`, for example ``return_annotation``.

    Example:
        >>> def f(x, *, axis=-1, xp): ...
        >>> str(spelled_signature(f, names={"axis": "dim"}, defaults={"axis": None}))
        '(x, *, dim=None)'
    """
    names, defaults = names or {}, defaults or {}
    signature = inspect.signature(function)
    parameters = [
        p.replace(name=names.get(p.name, p.name), default=defaults.get(p.name, p.default))
        for p in signature.parameters.values()
        if p.name not in hidden
    ]
    return signature.replace(parameters=parameters, **changes)
