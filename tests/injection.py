"""Raise an exception at a chosen line that the library executes, as Ctrl-C can at any line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import stablenum
import stablenum_jax
import stablenum_torch

__all__ = ["InterruptError", "executed_lines", "first_and_last", "interrupted_at", "some"]

_PACKAGES = tuple(str(Path(p.__file__).parent) for p in (stablenum, stablenum_torch, stablenum_jax))

Line = tuple[str, int]


class InterruptError(BaseException):
    """Like KeyboardInterrupt, ``except Exception`` does not catch it."""


def executed_lines(call: Callable[[], object], inside: Sequence[str] = _PACKAGES) -> list[Line]:
    """Call the function and return the lines that ran in files below ``inside``, in order, as often as they
    ran."""
    seen: list[Line] = []
    _traced(call, inside, lambda line: seen.append(line))
    return seen


def interrupted_at(
    number: int,
    call: Callable[[], object],
    error: type[BaseException] = InterruptError,
    inside: Sequence[str] = _PACKAGES,
    *,
    by: signal.Signals | None = None,
) -> Line | None:
    """Call the function, and raise ``error`` just before the line with this number, from 0, runs.

    With ``by``, the signal comes there instead; its handler is expected to raise ``error`` there or later.
    KeyboardInterrupt comes by the signal SIGINT, as from Ctrl-C.

    Returns:
        The line; None if fewer lines ran, or if something has caught the exception.
    """
    number_of_signal = signal.SIGINT if error is KeyboardInterrupt else by
    count = 0
    place: list[Line] = []

    def stop(line: Line) -> None:
        nonlocal count
        count += 1
        if count == number + 1:
            place.append(line)
            if number_of_signal is not None:
                signal.raise_signal(number_of_signal)  # handled at once
            else:
                raise error(f"{line[0]}:{line[1]}")

    # The handler may not be Python's own: workers of pytest-xdist ignore SIGINT.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler) if by is None else None
    try:
        _traced(call, inside, stop)
    except error:
        return place[0] if place else None
    finally:
        if by is None:
            signal.signal(signal.SIGINT, handler)
    return None


def first_and_last(lines: Sequence[Line]) -> list[int]:
    """Return the numbers at which each line runs for the first and for the last time."""
    last = {line: i for i, line in enumerate(lines)}
    first = {line: i for i, line in reversed(list(enumerate(lines)))}
    return sorted({*first.values(), *last.values()})


def some(numbers: Iterable[int], count: int) -> list[int]:
    """Return about ``count`` of the numbers, evenly spaced, with the first and the last."""
    known = list(numbers)
    if len(known) <= count:
        return known
    return sorted({known[round(i * (len(known) - 1) / (count - 1))] for i in range(count)})


def _traced(call: Callable[[], object], inside: Sequence[str], on_line: Callable[[Line], None]) -> None:
    wanted: dict[str, bool] = {}
    folders = tuple(inside)

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            on_line((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in wanted:
            wanted[name] = name.startswith(folders)
        return local if wanted[name] else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
