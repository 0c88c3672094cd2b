"""Generate ``decide`` for one configuration: a Python function without the calls inside ``decide``.

The promise is that, on a model of 10 k parameters on a CPU, the guard adds less to a step than ``GradScaler``
and clipping do. ``make bench`` measures this in the row ``torch adamw fused 10k/10 float32`` and fails when
the promise is broken (``benchmarks/steps/promises.py``).

``decide`` consists of about a hundred calls of small functions, which take most of its time on a CPU. The
core never branches on a measured value, because ``jax.jit`` and ``torch.compile`` must be able to trace it.
One run on values that record what is done to them therefore records every operation, and the generated
function consists of the recorded operations. What does not depend on an input is computed while recording,
unused results are dropped, and ``where`` on a single number becomes a branch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stablenum_torch._devices.scalar_namespace import scalars

__all__ = ["Value", "Writer"]

# Functions that use only the kind and shape of their first argument.
_OF_KIND = frozenset(("zeros_like", "ones_like", "full_like"))


class Value:
    """Stands for a number or array that is not known until the function is called; ``sample`` is an
    example."""

    __slots__ = ("name", "sample", "writer")
    __array_ufunc__ = None  # the Value's operators also handle a NumPy number on the left

    def __init__(self, writer: Writer, name: str, sample: Any) -> None:
        self.writer, self.name, self.sample = writer, name, sample

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
        return self.writer.add("{}[{}]", operator.getitem, self, index)

    def __bool__(self) -> bool:
        raise TypeError("cannot branch on a measured value; use xp.where.")


def _define_operators() -> None:
    signs = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
    signs |= {"and": "&", "or": "|", "xor": "^"}
    signs |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
    for name, sign in signs.items():
        function = getattr(operator, f"__{name}__")

        def forward(self: Value, other: Any, f: Any = function, sign: str = sign) -> Any:
            return self.writer.add(f"{{}} {sign} {{}}", f, self, other)

        def backward(self: Value, other: Any, f: Any = function, sign: str = sign) -> Any:
            return self.writer.add(f"{{}} {sign} {{}}", f, other, self)

        setattr(Value, f"__{name}__", forward)
        setattr(Value, f"__r{name}__", backward)
    for name, sign in {"neg": "-", "abs": "abs", "invert": "~"}.items():
        function = getattr(operator, f"__{name}__")

        def alone(self: Value, f: Any = function, sign: str = sign) -> Any:
            return self.writer.add(f"{sign}({{}})", f, self)

        setattr(Value, f"__{name}__", alone)


_define_operators()


class Writer:
    """An array namespace whose functions record each call as a line of Python.

    Example:
        >>> writer = Writer()
        >>> x = writer.input(np.float32(2.0))
        >>> function = writer.function([writer.where(x > 1, x * 2, x)])
        >>> float(function(np.float32(3.0))[0]), float(function(np.float32(0.5))[0])
        (6.0, 0.5)
    """

    def __init__(self) -> None:
        self._inputs: list[str] = []
        self._constants: dict[str, Any] = {"isfinite": math.isfinite, "isnan": math.isnan}
        self._names: dict[int, str] = {}  # of constants, by identity
        self._made: dict[str, Value] = {}  # by expression: each is written once
        self._lines: dict[str, tuple[str, list[str]]] = {}  # name -> expression and the names in it

    def input(self, sample: Any) -> Value:
        """Add an argument to the function and return it; the arguments are in the order of these calls."""
        name = f"i{len(self._inputs)}"
        self._inputs.append(name)
        return Value(self, name, sample)

    def function(self, results: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """Return a function of all inputs that returns ``results`` (values and constants) as a tuple."""
        names = [self._name(result) for result in results]
        wanted, waiting = set(), list(names)
        while waiting:
            name = waiting.pop()
            if name in self._lines and name not in wanted:
                wanted.add(name)
                waiting += self._lines[name][1]
        body = [f"    {name} = {text}" for name, (text, _) in self._lines.items() if name in wanted]
        source = [f"def written({', '.join(self._inputs)}):", *body, f"    return ({', '.join(names)},)"]
        scope = dict(self._constants)
        exec("\n".join(source), scope)  # the text is generated above, from the core's own operations only
        made: Callable[..., tuple[Any, ...]] = scope["written"]
        return made

    def add(self, template: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record an operation; the result is a constant if no argument is a Value."""
        sample = function(*map(_sample, args), **kwargs)
        if not any(_has_value(arg) for arg in args):
            return sample
        names = [self._name(arg) for arg in args]
        text = template.format(*names)
        if text not in self._made:
            self._made[text] = Value(self, f"v{len(self._made)}", sample)
            used = [name for arg in args for name in self._value_names(arg)]
            self._lines[self._made[text].name] = (text, used)
        return self._made[text]

    def _name(self, arg: Any) -> str:
        if isinstance(arg, Value):
            return arg.name
        if isinstance(arg, (list, tuple)) and _has_value(arg):
            return f"[{', '.join(self._name(part) for part in arg)}]"
        if id(arg) not in self._names:
            self._names[id(arg)] = f"c{len(self._names)}"
            self._constants[self._names[id(arg)]] = arg  # keeps the object alive, so its id stays unique
        return self._names[id(arg)]

    def _value_names(self, arg: Any) -> list[str]:
        if isinstance(arg, Value):
            return [arg.name]
        return [name for part in arg for name in self._value_names(part)] if _has_value(arg) else []

    # --- the namespace -------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        function = getattr(scalars, name)
        if isinstance(function, type) or not callable(function):
            return function  # a dtype, a constant
        return lambda *args, **kwargs: self._call(name, function, args, kwargs)

    def _call(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name in _OF_KIND and not _has_value(args[1:]):
            return function(*map(_sample, args), **kwargs)
        samples = [_sample(arg) for arg in args]
        template = _OF_SCALARS.get(name)
        if name == "where":
            branch = isinstance(samples[0], (bool, np.bool_)) and np.shape(samples[1]) == np.shape(samples[2])
            template = template if branch else None
        elif kwargs or any(isinstance(sample, np.ndarray) for sample in samples):
            template = None
        if template is None:
            keywords = "".join(f", {key}={self._name(value)}" for key, value in kwargs.items())
            template = f"{self._name(function)}({', '.join(['{}'] * len(args))}{keywords})"
        return self.add(template, function, *args, **kwargs)


# The Python expression for each operation on single numbers; it gives the same result as in `scalars`.
_OF_SCALARS = {
    "where": "{1} if {0} else {2}",
    "minimum": "{0} if {0} <= {1} or {0} != {0} else {1}",
    "maximum": "{0} if {0} >= {1} or {0} != {0} else {1}",
    "isfinite": "isfinite({0})",
    "isnan": "isnan({0})",
    "logical_not": "not {0}",
    "abs": "abs({0})",
}


def _sample(arg: Any) -> Any:
    if isinstance(arg, Value):
        return arg.sample
    return [_sample(part) for part in arg] if isinstance(arg, (list, tuple)) and _has_value(arg) else arg


def _has_value(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return any(_has_value(part) for part in arg)
    return isinstance(arg, Value)
