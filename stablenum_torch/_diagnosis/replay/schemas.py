"""What the schema of an operation declares: which arguments it writes, which results are views."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Operation", "defaults_in", "describe", "numbers_in", "options_in", "tensors_in", "written_by"]

# Operations that overwrite their target without reading it.
_OVERWRITES = frozenset({
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_",
    "random_", "resize_", "set_", "uniform_", "zero_",
})  # fmt: skip

# Operations that read only shapes and dtypes.
_SHAPES_ONLY = frozenset({
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
})  # fmt: skip

# Operations that write running statistics, which their schemas do not declare.
_SILENT = frozenset({"cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm"})


# How many results of an operation are values. The others are kept for its backward pass: partly uninitialised
# memory, and the states of generators.
_VALUES = {
    "_cudnn_rnn": 3,
    "_scaled_dot_product_cudnn_attention": 1,
    "_scaled_dot_product_efficient_attention": 1,
    "_scaled_dot_product_flash_attention": 1,
    "cudnn_batch_norm": 3,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """An aten operation.

    Attributes:
        name: the name without namespace and overload.
        full: the full name, such as "aten.add.Tensor".
        written: positions and names of the arguments that the operation writes.
        overwrites: whether it writes without reading what was there.
        shapes_only: whether it reads no element of its arguments.
        view: whether its results share memory with its first argument.
        empty: whether its result is uninitialised memory.
        values: how many of its results are values, None for all.
        each: whether it does the same to every tensor of a list.
        options: positions and names of the arguments that say over which axes it works, and how.
        defaults: positions and names of the arguments that are numbers unless they are given, and these.
    """

    name: str
    full: str
    written: tuple[tuple[int, str], ...] = ()
    overwrites: bool = False
    shapes_only: bool = False
    view: bool = False
    empty: bool = False
    values: int | None = None
    each: bool = False
    options: tuple[tuple[int, str], ...] = ()
    defaults: tuple[tuple[int, str, float], ...] = ()

    def kept(self, results: Any) -> tuple[Any, ...]:
        """Return the results that are kept for the backward pass."""
        return () if self.values is None else tuple(results[self.values :])


# The arguments that say over which axes an operation works, under the names of the core.
_OPTIONS = {"dim": "axis", "correction": "correction", "keepdim": "keepdims", "ord": "ord"}
_known: dict[Any, Operation] = {}


def describe(func: Callable[..., Any]) -> Operation:
    """Return the description of an operation, read from its schema once."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = _read(func)
    return found


def _read(func: Any) -> Operation:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return Operation(name=str(getattr(func, "__name__", func)), full=str(func))
    name = schema.name.split("::")[-1]
    arguments = list(enumerate(schema.arguments))
    written = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    if name in _SILENT:
        written += tuple((i, a.name) for i, a in arguments if a.name in ("running_mean", "running_var"))
    returns = [r.alias_info for r in schema.returns]
    return Operation(
        name=name,
        full=str(func),
        written=written,
        overwrites=name in _OVERWRITES or schema.overload_name.endswith("out"),
        shapes_only=name in _SHAPES_ONLY,
        view=any(info is not None and not info.is_write for info in returns),
        empty=name.startswith(("empty", "new_empty")),
        values=_VALUES.get(name),
        each=name.startswith(("_foreach_", "_fused_")),
        options=tuple((i, a.name) for i, a in arguments if a.name in _OPTIONS),
        defaults=tuple(
            (i, a.name, a.default_value) for i, a in arguments if isinstance(a.default_value, float)
        ),
    )


def options_in(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the axis and similar arguments of a call, under the names of the core."""
    found: dict[str, Any] = {}
    for position, name in operation.options:
        given = args[position] if position < len(args) else kwargs.get(name)
        found[_OPTIONS[name]] = tuple(given) or None if isinstance(given, list | tuple) else given
    if "correction" in found:
        found["correction"] = 1 if found["correction"] is None else found["correction"]  # 1 is torch's own
        found["count"] = _together(args[0], found.get("axis"))
    return {k: v for k, v in found.items() if v is not None or k == "axis"}


def _together(x: Tensor, axis: tuple[int, ...] | int | None) -> int:
    axes = range(x.dim()) if axis is None else (axis,) if isinstance(axis, int) else axis
    return math.prod(x.shape[a] for a in axes)


def written_by(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call writes."""
    found: list[Tensor] = []
    for position, name in operation.written:
        found += tensors_in(args[position] if position < len(args) else kwargs.get(name))
    return found


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Return the tensors in arguments or results, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def defaults_in(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[float]:
    """Return the numbers that an operation computes with although they were not given, such as a slope."""
    yield from (number for i, name, number in operation.defaults if i >= len(args) and name not in kwargs)


def numbers_in(tree: Any) -> Iterator[float]:
    """Return the plain numbers in arguments, in order."""
    if isinstance(tree, int | float) and not isinstance(tree, bool):
        try:
            yield float(tree)
        except OverflowError:  # a whole number beyond the range of float64
            return
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from numbers_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from numbers_in(item)
