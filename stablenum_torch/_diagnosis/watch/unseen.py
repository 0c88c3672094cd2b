"""Look at what a script does, so that neither the script nor a mode of the script notices."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stablenum._support.interrupts import and_restore
from stablenum.diagnosis.watch.frames import called_from, transparent
from stablenum.diagnosis.watch.session import FAILED, Session

__all__ = ["Unseen", "never_compiled", "outside_graphs"]

F = TypeVar("F", bound=Callable[..., Any])
_eval_frame = torch._C._dynamo.eval_frame
_STAGE = os.path.join("distributed", "pipelining", "stage.py")
_scripted: list[Callable[..., Any]] = []


def outside_graphs(function: F) -> F:
    """Return the function, which compiled functions call, rather than compile it as a part of themselves."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return never_compiled(function)


def never_compiled(function: F) -> F:
    """Return the function, which torch.compile does not compile when a compiled function has called it."""
    try:
        skip = _eval_frame._FrameAction.SKIP
        strategy = _eval_frame._FrameExecStrategy(skip, _eval_frame._FrameAction.DEFAULT)
        _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:  # torch before 2.7
        getattr(_eval_frame, "skip_code", lambda code: None)(function.__code__)
    return function


never_compiled(called_from)


@never_compiled
def _on_unwritten_memory() -> bool:
    """Return whether a stage of a pipeline runs on memory that nobody has written, to learn shapes: its
    numbers are those that happen to be there."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "_inference" in code.co_name and code.co_filename.endswith(_STAGE):
            return True
        frame = frame.f_back
    return False


@never_compiled
def _always(*args: Any, **kwargs: Any) -> bool:
    return True


class Unseen:
    """Runs the checks of a watcher, each in a thread of the script.

    Args:
        session: notes it when a check itself fails.
        when_over: called after the check that has found a failure.

    Attributes:
        recording: whether operations are recorded; then no frame is added to the script's own.
    """

    def __init__(self, session: Session, when_over: Callable[[], None]) -> None:
        self.session, self.recording = session, False
        self._when_over, self._local = when_over, threading.local()

    @property
    def looking(self) -> bool:
        """Whether this thread runs a check."""
        return getattr(self._local, "looking", False)

    @never_compiled
    def look(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what ``action`` returns, which is neither watched nor recorded; FAILED if it fails."""
        compiling = _eval_frame.set_eval_frame(None)
        graded = torch.is_grad_enabled()
        plain = torch._C.DisableTorchFunction()
        modes = contextlib.ExitStack() if torch._C._len_torch_dispatch_stack() else None

        def run() -> Any:
            self._local.looking = True
            plain.__enter__()
            if modes is not None:
                modes.enter_context(_disable_current_modes())
            torch._C._set_grad_enabled(False)
            return self.session.sheltered(action, *args, **kwargs)

        def restore() -> None:
            torch._C._set_grad_enabled(graded)
            if modes is not None:
                modes.close()
            plain.__exit__(None, None, None)
            self._local.looking = False
            _eval_frame.set_eval_frame(compiling)
            if self.session.over:
                self._when_over()

        return and_restore(run, restore)

    def wrap(
        self,
        owner: Any,
        name: str,
        before: Any,
        after: Any = None,
        *,
        concerns: Callable[..., bool] = _always,
    ) -> None:
        """Replace a function by one that first passes its arguments to ``before``, except in a look.

        What ``before`` returns is passed to ``after``, together with the function's result.

        Args:
            owner: has the function.
            name: the function's name.
            before, after: run in a look.
            concerns: asked first, without the cost of a look: whether a call with these arguments is for
                ``before`` at all.
        """
        inner = getattr(owner, name)
        is_python = hasattr(inner, "__code__")

        @functools.wraps(inner)
        @never_compiled
        @transparent
        def outer(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.looking or self.session.over or self.session.ignores():
                return inner(*args, **kwargs)
            if _on_unwritten_memory():
                return inner(*args, **kwargs)
            kept = self.look(before, *args, **kwargs) if concerns(*args, **kwargs) else FAILED
            if is_python or self.recording:
                result = inner(*args, **kwargs)
            else:
                result = called_from(sys._getframe(1), inner, args, kwargs)
            if after is not None and kept is not FAILED and not self.session.over:
                self.look(after, kept, result)
            return result

        setattr(owner, name, outer)
        builtin = torch.jit._builtins._find_builtin(inner)
        if builtin is not None:  # torch.jit.script knows it by its id, which must stay its own
            _scripted.append(outer)
            torch.jit._builtins._register_builtin(outer, builtin)
