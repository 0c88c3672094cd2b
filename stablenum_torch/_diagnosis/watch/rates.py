"""Find the user's line that gives an optimizer a setting, such as a learning rate, that is NaN or inf.

The lines of the script are traced while a step is recorded: assignments to a parameter group are seen, and so
are the functions of a scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

from torch.optim import Optimizer

from stablenum.diagnosis import Finding, Report
from stablenum.diagnosis.replay.source_files import lines_around
from stablenum.diagnosis.replay.values import Place
from stablenum_torch._diagnosis.replay.source_lines import is_user_file, place_of

__all__ = ["Rates"]

_SETTINGS = ("lr", "momentum", "weight_decay")


class Rates:
    """Traces the user's lines until a setting of an optimizer is not finite.

    Attributes:
        frames: the user's frames at the line that made the setting so, outermost first; () if not known.
        name: the setting.
        value: what it is.
    """

    def __init__(self) -> None:
        self.frames: tuple[Place, ...] = ()
        self.name, self.value = "", math.nan
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._lines: dict[FrameType, int] = {}  # the line that each frame of the user's runs
        self._last: tuple[Place, ...] = ()  # where the last line ran
        self._made: tuple[float, tuple[Place, ...]] | None = None  # what a function of the user's returned
        self._restore = contextlib.ExitStack()

    def begin(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Trace from now on, unless a debugger does."""
        if sys.gettrace() is not None or self.frames:
            return
        self._optimizers.update(optimizers)
        self._note_new_optimizers()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if _is_users(frame.f_code):
                self._restore.callback(setattr, frame, "f_trace", frame.f_trace)
                frame.f_trace, self._lines[frame] = self._in_frame, frame.f_lineno
            frame = frame.f_back
        self._restore.callback(sys.settrace, None)
        sys.settrace(self._call)

    def end(self) -> None:
        """Stop tracing."""
        self._restore.close()
        self._lines.clear()

    def with_line(self, report: Report) -> Report:
        """Return the report with the line as its first finding, if it is known and a setting is the cause."""
        if not (self.frames and report.evidence.settings):
            return report
        place = self.frames[-1]
        first = Finding(
            operation="setting",
            phase="before",
            kind="nan" if math.isnan(self.value) else "inf",
            name=self.name,
            place=place,
            around=lines_around(place),
            frames=self.frames,
        )
        others = tuple(f for f in report.findings if f.operation != "constant")
        return Report.of(
            replace(report.evidence, findings=(first, *others)), notes=report.notes, seconds=report.seconds
        )

    def _note_new_optimizers(self) -> None:
        make = Optimizer.__init__

        @functools.wraps(make)
        def noted(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        Optimizer.__init__ = noted
        self._restore.callback(setattr, Optimizer, "__init__", make)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._in_frame if _is_users(frame.f_code) else None

    def _in_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self.frames:
            self._look()
        if event == "line":
            self._lines[frame] = frame.f_lineno
            self._last = self._places(frame)
        elif event == "return":
            if isinstance(arg, float) and not math.isfinite(arg):
                self._made = float(arg), self._places(frame)
            self._lines.pop(frame, None)
        return self._in_frame

    def _look(self) -> None:
        """Look at the settings, after a line of the user's has run and before the next one does."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for name in _SETTINGS:
                    value = group.get(name)
                    if isinstance(value, float) and not math.isfinite(value):
                        made = self._made is not None and _same(self._made[0], value)
                        self.frames = self._made[1] if made and self._made is not None else self._last
                        self.name, self.value = name, float(value)
                        return

    def _places(self, frame: FrameType | None) -> tuple[Place, ...]:
        found = []
        while frame is not None:
            if _is_users(frame.f_code):
                found.append(place_of(frame.f_code, self._lines.get(frame, frame.f_lineno)))
            frame = frame.f_back
        return tuple(reversed(found))


@functools.cache
def _is_users(code: CodeType) -> bool:
    return is_user_file(code.co_filename)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
