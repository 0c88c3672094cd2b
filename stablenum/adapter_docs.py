"""A core function as an adapter shows it: its text and arguments without ``xp``, in the framework's words."""

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
    """The function's docstring without the hidden arguments, its example replaced.

    Args:
        function: of the core.
        example: lines of a session, which take the place of the function's own.
        words: what is written differently: ours, theirs.
        note: a paragraph before the example.
        hidden: arguments whose lines are dropped.

    Example:
        >>> def f(x, *, axis, xp):
        ...     '''The sum.
        ...
        ...     Args:
        ...         axis: over which.
        ...         xp: the array namespace.
        ...
        ...     Example:
        ...         >>> f(1)
        ...     '''
        >>> print(spelled_text(f, "g(1)", words=[("axis:", "dim:")]).strip())
        The sum.
        <BLANKLINE>
        Args:
            dim: over which.
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
    """The function's signature without the hidden arguments.

    Args:
        function: of the core.
        names: of arguments that are called otherwise: ours to theirs.
        defaults: of arguments, under our names.
        hidden: arguments that are dropped.
        changes: for :meth:`inspect.Signature.replace`: a ``return_annotation``.

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
