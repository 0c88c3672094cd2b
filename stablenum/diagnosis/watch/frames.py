"""The watcher's own frames: out of the script's warnings and tracebacks."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, TypeVar

__all__ = ["called_from", "raised_by_a_signal", "transparent", "without_our_frames"]

F = TypeVar("F", bound=Callable[..., Any])

# Frames whose file has both words in its name are not counted by ``warnings.warn(..., stacklevel=2)``: Python
# shows a warning about an import at the import.
_UNCOUNTED = " (importlib._bootstrap)"
_NAME = "<watched call>"


def transparent(function: F) -> F:
    """Return the function, whose frames no warning counts and no traceback of the command shows."""
    made = getattr(function, "__code__", None)
    if isinstance(made, CodeType) and not made.co_filename.endswith(_UNCOUNTED):
        function.__code__ = made.replace(co_filename=made.co_filename + _UNCOUNTED)
    return function


@transparent
def called_from(
    frame: FrameType, inner: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return ``inner(*args, **kwargs)``, where a warning by code in C names the line of ``frame``."""
    code = _at(frame.f_code.co_filename, frame.f_lineno or 1)
    return FunctionType(code, frame.f_globals)(inner, args, kwargs)


def without_our_frames(error: BaseException) -> None:
    """Take the watcher's frames out of the tracebacks of an exception and of those it was raised from."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _others(one.__traceback__)
            pending += [one.__cause__, one.__context__]


def raised_by_a_signal(error: BaseException) -> bool:
    """Return whether a handler of the script raised this, during whatever was running."""
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    tb = error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code in handlers:
            return True
        tb = tb.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    found = getattr(handler, "__code__", None)  # of a method, too
    return found if isinstance(found, CodeType) else None


def _others(tb: TracebackType | None) -> TracebackType | None:
    kept = []
    while tb is not None:
        code = tb.tb_frame.f_code
        if not code.co_filename.endswith(_UNCOUNTED) and code.co_name != _NAME:
            kept.append(tb)
        tb = tb.tb_next
    rest = None
    for one in reversed(kept):
        rest = TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rest


def _call(inner: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return inner(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _at(file: str, line: int) -> CodeType:
    # The call is on the second line of the function.
    return _call.__code__.replace(co_filename=file, co_firstlineno=line - 1, co_name=_NAME, co_qualname=_NAME)
