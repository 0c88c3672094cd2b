"""Try a recorded operation again in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from stablenum_torch._devices.generators import rng_state, set_rng_state
from stablenum_torch._diagnosis.replay.flags import flags_of
from stablenum_torch._diagnosis.replay.schemas import tensors_in

__all__ = ["finite_in_float32"]

_LOW = (torch.float16, torch.bfloat16)


def finite_in_float32(
    func: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    before: Mapping[int, Tensor],
    written: Set[int],
) -> bool | None:
    """Return whether an operation has a finite result in float32; None if it cannot run in float32.

    Args:
        func: an aten operation.
        call: the operation's arguments.
        before: id of an argument that the call has written -> its previous contents.
        written: ids of all arguments that the call writes.
    """
    if any(id(t) in written and id(t) not in before and t.dtype not in _LOW for t in tensors_in(call)):
        return None  # the memory would be written a second time
    if any(isinstance(x, torch.Generator) for x in call[1].values()):
        return None

    def widened(x: Any) -> Any:
        if isinstance(x, Tensor):
            x = before.get(id(x), x)
            return x.float() if x.dtype in _LOW else x.clone() if id(x) in before else x
        if isinstance(x, torch.dtype):
            return torch.float32 if x in _LOW else x
        if isinstance(x, list | tuple):
            return type(x)(widened(item) for item in x)
        return x

    rng = rng_state(torch_only=True)
    try:
        result = func(*(widened(x) for x in call[0]), **{k: widened(v) for k, v in call[1].items()})
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # the kernel supports low precision only
    finally:
        set_rng_state(rng)
    return not any(any(flags_of(t)) for t in tensors_in(result))
