"""Work that is finished although an exception, such as that of Ctrl-C, arrives in the middle of it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["finish"]


def finish(action: Callable[[], object]) -> None:
    """Call ``action``; if an exception stops it, call it again before the exception goes on.

    Args:
        action: may be called any number of times, and ends in the same state each time.
    """
    try:
        action()
    except BaseException:
        action()
        raise
