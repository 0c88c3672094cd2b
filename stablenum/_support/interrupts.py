"""Work that is finished although an exception, such as that of Ctrl-C, arrives in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["and_restore", "and_then", "finish"]

T = TypeVar("T")


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


def and_then(first: Callable[[], object], then: Callable[[], object]) -> None:
    """Call ``first`` and, once it has returned, ``then``, whatever exception comes between or stops ``then``.

    Args:
        first: cannot be undone or repeated.
        then: completes ``first``; may be called any number of times, and ends in the same state each time.
    """
    done: list[object] = []
    try:
        done.append(first())  # no interrupt comes between the return and the note of it
        then()
    except BaseException:
        if done:
            then()
        raise


def and_restore(body: Callable[[], T], restore: Callable[[], object]) -> T:
    """Return ``body()``; before that, and whatever it raises, call ``restore``.

    A ``with`` or a single ``finally`` is left without its cleanup if Ctrl-C comes just before the cleanup
    begins. Here ``restore`` is called again then.

    Args:
        body: changes what is to be restored; nothing is changed before it is called.
        restore: is called until it has returned once, and does again what an earlier call has done.
    """
    restored: list[object] = []

    def once() -> None:
        if not restored:
            restored.append(restore())

    try:
        try:
            return body()
        finally:
            once()
    finally:
        once()
