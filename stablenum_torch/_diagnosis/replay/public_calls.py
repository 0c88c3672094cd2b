"""Note calls of public functions that are compiled and so have no frame, and starts of backward passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from stablenum_torch._diagnosis.replay.naming import PUBLIC
from stablenum_torch._diagnosis.replay.recorder import Recorder

__all__ = ["PublicFunctions"]


class PublicFunctions(TorchFunctionMode):
    """Notes in a recorder which public function is running, and from which tensors a backward pass starts."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward or func is torch.autograd.backward:
            roots = args[0] if args else kwargs["tensors"]
            self._recorder.begin_backward([roots] if isinstance(roots, Tensor) else roots)
            return func(*args, **kwargs)
        if func is torch.autograd.grad:
            found = func(*args, **kwargs)
            if not (kwargs.get("create_graph") or args[4:5] == (True,)):
                inputs = args[1] if len(args) > 1 else kwargs["inputs"]
                with torch.no_grad():
                    self._recorder.note_gradients([inputs] if isinstance(inputs, Tensor) else inputs, found)
            return found
        name = getattr(func, "__name__", "")
        if name not in PUBLIC:
            return func(*args, **kwargs)
        before = self._recorder.public, self._recorder.public_options
        self._recorder.public, self._recorder.public_options = name, _options(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            self._recorder.public_failed(name, error)
            raise
        finally:
            self._recorder.public, self._recorder.public_options = before


# Functions of Python that consist of several operations, of which none has the axis as it was given.
_COMPOSED = (functional.normalize,)


def _options(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if func not in _COMPOSED:
        return {}
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    return {"axis": given.arguments["dim"], "ord": given.arguments["p"]}
