"""Write a call of an aten operation as code that anyone can run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from stablenum.diagnosis.diff.sides.play import Dialect
from stablenum_torch._diagnosis.replay.schemas import describe, tensors_in, written_by

__all__ = ["DIALECT", "code_of"]

DIALECT = Dialect(
    ("import torch",), (), "torch.from_numpy({})", "{}.numpy()", numbers=False, within="torch.no_grad()"
)

# What these give depends on how their argument lies in memory.
_BY_MEMORY = frozenset({"_reshape_alias", "as_strided", "as_strided_", "set_"})
# These may change nothing in float64, where every value is an array of its own.
_NOTHING = frozenset({"_to_copy", "alias", "clone", "contiguous", "detach", "lift_fresh", "to"})
# From these on, arguments are given by name.
_NAMED = ("dim", "kernel_size", "stride")
_RESHAPES = frozenset({"_unsafe_view", "view"})


def code_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Mapping[int, int], out: Any
) -> Callable[[Mapping[int, int]], str] | None:
    """Return a function that writes a call, given the value of each result by its id; None if it cannot be
    written.

    Args:
        func, args, kwargs: the call.
        names: id of a tensor that the call reads -> its value.
        out: what the call gave.
    """
    operation = describe(func)
    if operation.name in _BY_MEMORY or not hasattr(func, "_schema"):
        return None
    if operation.name in _NOTHING and isinstance(out, Tensor) and _same(args[0], out):
        return lambda made: f"${made[id(out)]} = ${names[id(args[0])]}"
    written = {id(t): t for t in written_by(operation, args, kwargs)}
    args, kwargs = _with_names(func, args, kwargs)
    call = _callee(func, operation.name, args, kwargs, out if not written else None)

    def code(made: Mapping[int, int]) -> str:
        inside = {**names, **{i: made[i] for i in written}}
        arguments = [
            *(_text(a, inside) for a in args),
            *(f"{k}={_text(a, inside)}" for k, a in kwargs.items()),
        ]
        line = f"{_targets(out, made, written)}{call}({', '.join(arguments)})"
        return "\n".join([*(_copied(t, names.get(i), made[i]) for i, t in written.items()), line])

    return code


def _with_names(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, an axis or a stride and what follows it by name:
    ``sum(x, dim=[1])``."""
    names = [a.name for a in func._schema.arguments][: len(args)]
    first = min((names.index(name) for name in _NAMED if name in names), default=len(args))
    return args[:first], {**dict(zip(names[first:], args[first:])), **kwargs}


def _callee(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> str:
    """Return the public function that gives the same for the same arguments, else the operation itself."""
    public = "reshape" if name in _RESHAPES else name
    function = None if public.startswith("_") or out is None else getattr(torch, public, None)
    try:
        if function is not None and _same(function(*args, **kwargs), out):
            return f"torch.{public}"
    except (TypeError, RuntimeError, ValueError):
        pass
    return f"torch.ops.{func}"


def _same(a: Any, b: Any) -> bool:
    mine, theirs = list(tensors_in(a)), list(tensors_in(b))
    return len(mine) == len(theirs) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(mine, theirs)
    )


def _copied(tensor: Tensor, before: int | None, after: int) -> str:
    """Return the line that makes the tensor that a call writes into."""
    if before is None:
        return f"${after} = torch.empty({list(tensor.shape)}, dtype={tensor.dtype})"
    return f"${after} = ${before}.clone()"


def _targets(out: Any, made: Mapping[int, int], written: Collection[int]) -> str:
    """Return what the new results are assigned to."""
    results = [out] if isinstance(out, Tensor) else list(out or ())
    names = [f"${made[id(x)]}" if id(x) in made and id(x) not in written else "_" for x in results]
    if all(name == "_" for name in names):
        return ""
    return f"{', '.join(names)}{'' if isinstance(out, Tensor) or len(names) > 1 else ','} = "


def _text(x: Any, names: Mapping[int, int]) -> str:
    """Return an argument as code."""
    if isinstance(x, Tensor):
        known = names.get(id(x))
        return f"torch.empty({list(x.shape)}, dtype={x.dtype})" if known is None else f"${known}"
    if isinstance(x, torch.device):
        return "'cpu'"
    if isinstance(x, list | tuple):
        return f"[{', '.join(_text(a, names) for a in x)}]"
    if isinstance(x, float) and x - x != 0:
        return f"float('{x}')"
    return repr(x)
