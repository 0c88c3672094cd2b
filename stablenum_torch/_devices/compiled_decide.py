"""Fewer kernels: small arithmetic on an accelerator, compiled, where it would be a launch an operation.

What is decided of a step is some hundred operations on a few numbers. Run one by one on a GPU they cost
their launches, up to a millisecond; inductor makes about five kernels of them. Every function is compiled
at its first call, for some seconds, and from torch's own cache on disk in later runs. Where that cannot be
done (no Triton, no C compiler) the operations run one by one, with a warning.

torch's own switches hold: ``torch.compiler.set_stance("force_eager")`` and ``TORCHDYNAMO_DISABLE=1``.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from stablenum_torch._devices.waits import capturing

__all__ = ["NotCompiledWarning", "fewer_kernels"]

T = TypeVar("T")

_BACKEND = "inductor"
_NUMERICS = {
    # Eager kernels round every operation; so do these. A fused multiply-add, an approximate division or a
    # flushed subnormal would only be another number in the last bit, but decisions are compared across
    # frameworks.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    # Ranks that each timed their own kernels could sum in different orders, and drift apart by the last bit.
    "deterministic": True,
}


class NotCompiledWarning(UserWarning):
    """A guarded step runs its decision operation by operation, for it could not be compiled."""


def fewer_kernels(
    function: Callable[..., T], *settings: Hashable, on: Tensor, shape: Hashable = None
) -> Callable[..., T]:
    """``function(*settings, ...)``, compiled if the tensor ``on`` lies on a GPU; without side effects.

    Args:
        function: of settings, then of tuples of tensors; pure.
        settings: what does not change from step to step.
        on: a tensor that tells the device.
        shape: what tells one shape of the arguments from another. Each is compiled apart: of one code
            torch compiles a few variants and no more.
    """
    # A step that is itself being compiled takes the operations into its own graph. Tensors without data
    # (torch's fake ones) have nothing to gain.
    if torch.compiler.is_compiling() or not _pays_off(on):
        return functools.partial(function, *settings)
    return _compiled((on.device, shape), function, *settings)


def _pays_off(on: Tensor) -> bool:
    return on.is_cuda and type(on) is Tensor


@functools.lru_cache(maxsize=256)
def _compiled(_kind: Hashable, function: Callable[..., Any], *settings: Hashable) -> _Compiled:
    return _Compiled(function, *settings)


class _Compiled:
    """A pure function of tensors: compiled, or operation by operation once compiling it has failed.

    Attributes:
        warned: whether the one warning of a process was given.
    """

    warned: ClassVar[bool] = False

    def __init__(self, function: Callable[..., Any], *settings: Hashable) -> None:
        self._eager = functools.partial(function, *settings)
        self._fast: Callable[..., Any] | None = None
        self._tried = self._failed = False

    def __call__(self, *args: Any) -> Any:
        # Nothing can be compiled while a CUDA graph is being captured.
        if self._failed or (not self._tried and capturing()):
            return self._eager(*args)
        try:
            if self._fast is None:
                self._fast = torch.compile(
                    _with_code_of_its_own(self._eager), fullgraph=True, dynamic=False, **_backend()
                )
            result = self._fast(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  (compilers fail in many ways)
            result = self._eager(*args)  # or says what is wrong with the arguments
            self._failed = True
            _warn(error)
        self._tried = True
        return result


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, behind code that it shares with no other: torch limits how often one code is compiled."""

    def call(*args: Any) -> Any:
        return function(*args)

    return types.FunctionType(call.__code__.replace(), call.__globals__, "decide", None, call.__closure__)


def _backend() -> dict[str, Any]:
    if _BACKEND != "inductor":
        return {"backend": _BACKEND}
    from torch._inductor import list_options

    known = set(list_options())
    return {"options": {name: value for name, value in _NUMERICS.items() if name in known}}


def _warn(error: Exception) -> None:
    if _Compiled.warned:
        return
    _Compiled.warned = True
    cause = getattr(error, "inner_exception", error)  # what torch wraps a compiler's error in says little
    reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    warnings.warn(
        "the guard's decision could not be compiled and runs operation by operation, which costs up to a "
        f"millisecond a step on a GPU; training is not affected. the reason: {reason}. "
        "Compiling needs Triton and a C compiler. TORCHDYNAMO_DISABLE=1 turns compiling off.",
        NotCompiledWarning,
        stacklevel=2,
    )
