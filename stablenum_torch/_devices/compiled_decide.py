"""Compile the decision into a few kernels instead of launching a kernel for each operation.

A decision takes about a hundred operations on a few numbers. Launching them one by one on a GPU takes up to a
millisecond; inductor turns them into about five kernels. Each function is compiled at its first call, which
takes a few seconds; later runs load the compiled code from torch's cache on disk. Where that is impossible
because torch's private interfaces have changed, ``torch.compile`` is asked; where nothing can be compiled (no
Triton, no C compiler), the operations run one by one. Either way a warning says so.

torch's own switches apply: ``torch.compiler.set_stance("force_eager")`` and ``TORCHDYNAMO_DISABLE=1``.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from stablenum._support.user_warnings import warn
from stablenum_torch._devices.traced import Traced
from stablenum_torch._devices.waits import capturing

__all__ = ["NotCompiledWarning", "fewer_kernels"]

T = TypeVar("T")

_BACKEND = "inductor"
_NUMERICS = {
    # Round every operation, as eager kernels do. A fused multiply-add, an approximate division or a flushed
    # subnormal would change only the last bit, but decisions are compared across frameworks.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    # Ranks that tuned their kernels independently could sum in different orders and drift apart.
    "deterministic": True,
}


class NotCompiledWarning(UserWarning):
    """The decision of a guarded step is not compiled in the fastest way: ``torch.compile`` compiles it, or it
    runs operation by operation. The message says which, why, and what it costs."""


def fewer_kernels(
    function: Callable[..., T], *settings: Hashable, on: Tensor, shape: Hashable = None
) -> Callable[..., T]:
    """Return ``function`` with ``settings`` bound to it, compiled if the tensor ``on`` is on a GPU.

    Args:
        function: a pure function, which takes the settings, then tuples of tensors.
        settings: arguments that do not change from step to step.
        on: a tensor on the device in question.
        shape: identifies the shapes of the arguments. Each ``shape`` is compiled separately, because torch
            compiles only a few variants of one code object.
    """
    # A step that is itself being compiled absorbs the operations into its own graph. For tensors without
    # data (torch's fake tensors) there is nothing to gain.
    if torch.compiler.is_compiling() or not _pays_off(on):
        return functools.partial(function, *settings)
    return _compiled((on.device, shape), function, *settings)


def _pays_off(on: Tensor) -> bool:
    return on.is_cuda and type(on) is Tensor


@functools.lru_cache(maxsize=256)
def _compiled(_kind: Hashable, function: Callable[..., Any], *settings: Hashable) -> _Compiled:
    return _Compiled(function, *settings)


class _Compiled:
    """A pure function of tensors: compiled, or run operation by operation after compiling has failed.

    Attributes:
        warned: the warnings that have been given, each once per process.
    """

    warned: ClassVar[set[str]] = set()

    def __init__(self, function: Callable[..., Any], *settings: Hashable) -> None:
        self._eager = functools.partial(function, *settings)
        self._fast: Callable[..., Any] | None = None
        self._tried = self._failed = False

    def __call__(self, *args: Any) -> Any:
        # Nothing can be compiled while a CUDA graph is being captured. Under a dispatch mode, such as
        # FlopCounterMode, torch refuses to compile, or runs the function uncompiled from then on.
        if self._failed or is_in_torch_dispatch_mode() or (not self._tried and capturing()) or _turned_off():
            return self._eager(*args)
        try:
            result = self._compiled(*args)
        except (torch.OutOfMemoryError, NotCompiledWarning):  # a warning is an error if the user says so
            raise
        except Exception as error:  # noqa: BLE001  (compilers fail in many ways)
            result = self._eager(*args)  # raises if the arguments are wrong
            self._failed = True
            _warn(_FAILED, error)
        self._tried = True
        return result

    def _compiled(self, *args: Any) -> Any:
        """Call the compiled function; ``torch.compile`` makes it if it cannot be traced on its own."""
        if self._fast is None:
            inductor = _BACKEND == "inductor"
            self._fast = Traced(self._eager, _known_options()) if inductor else self._by_dynamo()
        try:
            return self._fast(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # another version of torch
            if not isinstance(self._fast, Traced):
                raise
            other = self._by_dynamo()
            result = other(*args)
            self._fast = other
            _warn(_SLOWER, error)
            return result

    def _by_dynamo(self) -> Callable[..., Any]:
        backend = {"options": _known_options()} if _BACKEND == "inductor" else {"backend": _BACKEND}
        return torch.compile(_with_separate_code(self._eager), fullgraph=True, dynamic=False, **backend)


def _turned_off() -> bool:
    """Return whether one of torch's own switches forbids to compile."""
    if "1" in (os.environ.get("TORCHDYNAMO_DISABLE"), os.environ.get("TORCH_COMPILE_DISABLE")):
        return True
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return getattr(stance, "stance", "default") != "default"


def _with_separate_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a code object of its own, because torch limits the variants compiled per code
    object."""

    def call(*args: Any) -> Any:
        return function(*args)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "decide", None, call.__closure__)


def _known_options() -> dict[str, Any]:
    """Return the options of inductor that this version of torch has."""
    from torch._inductor import list_options

    known = set(list_options())
    return {name: value for name, value in _NUMERICS.items() if name in known}


_FAILED = (
    "the guard's decision could not be compiled and runs operation by operation, which costs up to a "
    "millisecond per step on a GPU; training is not affected. Reason: {reason}. "
    "Compiling needs Triton and a C compiler. TORCHDYNAMO_DISABLE=1 turns compiling off."
)
_SLOWER = (
    "the guard's decision is compiled by torch.compile, which costs about 50 us more per step than the way "
    "that this version of torch does not allow; training is not affected. Reason: {reason}."
)


def _warn(text: str, error: Exception) -> None:
    if text in _Compiled.warned:
        return
    _Compiled.warned.add(text)
    cause = getattr(error, "inner_exception", error)  # torch's wrapper explains little
    reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    warn(text.format(reason=reason), NotCompiledWarning)
