"""Record what a pure function of the core does to numbers, once, so that it can be written as other code.

The core never branches on a measured value, because ``jax.jit`` and ``torch.compile`` must be able to trace
it. One run on values that record what is done to them therefore records every operation. What does not depend
on an input is computed while recording. ``generated_decide.py`` writes the operations as a Python function,
``kernels/printed_decide.py`` as a kernel for a GPU: there is no second copy of any rule.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stablenum_torch._devices.scalar_namespace import scalars

__all__ = ["Operation", "Recording", "Value", "has_value", "sample_of"]

# Functions that use only the kind and shape of their first argument.
_OF_KIND = frozenset(("zeros_like", "ones_like", "full_like"))


class Value:
    """Stands for a number or array that is not known until the operations are carried out.

    Attributes:
        recording: where the operations on it are recorded.
        name: its name, unique in the recording.
        sample: an example of it.
    """

    __slots__ = ("name", "recording", "sample")
    __array_ufunc__ = None  # the Value's operators also handle a NumPy number on the left

    def __init__(self, recording: Recording, name: str, sample: Any) -> None:
        self.recording, self.name, self.sample = recording, name, sample

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.sample)

    @property
    def ndim(self) -> int:
        return np.ndim(self.sample)

    @property
    def dtype(self) -> Any:
        return np.asarray(self.sample).dtype

    def __getitem__(self, index: Any) -> Any:
        return self.recording.add("getitem", operator.getitem, self, index)

    def __bool__(self) -> bool:
        raise TypeError("cannot branch on a measured value; use xp.where.")


class Operation(NamedTuple):
    """One recorded operation.

    Attributes:
        result: what it gives.
        name: that of Python's operator without underscores ("add"), or of the namespace's function.
        function: what carries it out.
        args: values and constants, and lists of these.
        kwargs: constants.
    """

    result: Value
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def values(self) -> list[Value]:
        """Return the values among the arguments."""
        return _values_in(self.args)


def _define_operators() -> None:
    for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor",
        "lt", "le", "gt", "ge", "eq", "ne",
    ):  # fmt: skip
        function = getattr(operator, f"__{name}__")

        def forward(self: Value, other: Any, f: Any = function, name: str = name) -> Any:
            return self.recording.add(name, f, self, other)

        def backward(self: Value, other: Any, f: Any = function, name: str = name) -> Any:
            return self.recording.add(name, f, other, self)

        setattr(Value, f"__{name}__", forward)
        setattr(Value, f"__r{name}__", backward)
    for name in ("neg", "abs", "invert"):
        function = getattr(operator, f"__{name}__")

        def alone(self: Value, f: Any = function, name: str = name) -> Any:
            return self.recording.add(name, f, self)

        setattr(Value, f"__{name}__", alone)


_define_operators()


class Recording:
    """An array namespace whose functions record each call on a :class:`Value`.

    Attributes:
        inputs: the names of the inputs, in the order in which they were made.

    Example:
        >>> xp = Recording()
        >>> x = xp.input(np.float32(2.0))
        >>> larger = xp.where(x > 1, x * 2, x)
        >>> [operation.name for operation in xp.needed([larger])]
        ['gt', 'mul', 'where']
    """

    def __init__(self) -> None:
        self.inputs: list[str] = []
        self._operations: dict[Any, Operation] = {}  # each is recorded once
        self._of: dict[str, Operation] = {}  # by the name of the result
        self._kept: dict[int, Any] = {}  # constants, so that their ids stay unique

    def input(self, sample: Any) -> Value:
        """Return a new input, of which ``sample`` is an example."""
        name = f"i{len(self.inputs)}"
        self.inputs.append(name)
        return Value(self, name, sample)

    def add(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record an operation; the result is a constant if no argument is a Value."""
        sample = function(*map(sample_of, args), **kwargs)
        if not any(has_value(arg) for arg in args):
            return sample
        key = (name, *map(self._key, args), *((k, self._key(v)) for k, v in kwargs.items()))
        if key not in self._operations:
            result = Value(self, f"v{len(self._operations)}", sample)
            self._operations[key] = self._of[result.name] = Operation(result, name, function, args, kwargs)
        return self._operations[key].result

    def needed(self, results: Sequence[Any]) -> list[Operation]:
        """Return the operations on which ``results`` (values and constants) depend, in order."""
        wanted, waiting = set(), _values_in(results)
        while waiting:
            name = waiting.pop().name
            if name in self._of and name not in wanted:
                wanted.add(name)
                waiting += self._of[name].values()
        return [operation for name, operation in self._of.items() if name in wanted]

    def _key(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            return arg.name
        if isinstance(arg, (list, tuple)) and has_value(arg):
            return tuple(map(self._key, arg))
        self._kept[id(arg)] = arg
        return id(arg)

    # --- the namespace -------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        function = getattr(scalars, name)
        if isinstance(function, type) or not callable(function):
            return function  # a dtype, a constant
        return lambda *args, **kwargs: self._call(name, function, args, kwargs)

    def _call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name in _OF_KIND and not has_value(args[1:]):
            return function(*map(sample_of, args), **kwargs)
        if name == "reshape" and args[1] == ():
            found = self._element(args[0])
            if found is not None:
                return found
        return self.add(name, function, *args, **kwargs)

    def _element(self, value: Any) -> Any:
        """Return an element of an array that was taken as an array of one element, as tensors want it.

        None if the value is something else.
        """
        taken = self._of.get(getattr(value, "name", ""))
        if taken is None or taken.name != "take" or not isinstance(taken.args[1], Value):
            return None
        index = self._of.get(taken.args[1].name)
        if index is None or index.name != "reshape" or np.ndim(sample_of(index.args[0])):
            return None
        return self.add("getitem", operator.getitem, taken.args[0], index.args[0])


def sample_of(arg: Any) -> Any:
    """Return an argument with the samples in place of the values."""
    if isinstance(arg, Value):
        return arg.sample
    return [sample_of(part) for part in arg] if isinstance(arg, (list, tuple)) and has_value(arg) else arg


def has_value(arg: Any) -> bool:
    """Return whether an argument is, or holds, a Value."""
    if isinstance(arg, (list, tuple)):
        return any(has_value(part) for part in arg)
    return isinstance(arg, Value)


def _values_in(arg: Any) -> list[Value]:
    if isinstance(arg, Value):
        return [arg]
    return [value for part in arg for value in _values_in(part)] if isinstance(arg, (list, tuple)) else []
