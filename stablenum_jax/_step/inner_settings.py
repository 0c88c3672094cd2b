"""Settings inside a transformation, constants and schedules, that make a whole update NaN or inf.

They are in closures, so nothing shows them but the program of the update. In it, numbers that depend on no
array (a learning rate, a power of the step's number) are computed before the decision, which costs next to
nothing, and each operation of such a number with an array says whether *every* element of the result is
certain to be NaN or inf, whatever the gradients are. Small tables are computed with in the same way. An
operation that is not known here is certain of nothing, so that no sound step is skipped. (RAdam computes the
root of a negative number in its first steps, but does not select it.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from stablenum_jax._trees.leaves import is_floating, varying_axes

__all__ = ["certainly_nonfinite"]

PyTree: TypeAlias = Any
# () bool: an array, or a Python bool where it is known when the step is traced.
Bool: TypeAlias = Any


class _Known(NamedTuple):
    """An array whose elements are all equal to a number that depends on no array."""

    number: Any


class _Table(NamedTuple):
    """A small array that depends on no other, such as the table of a schedule."""

    number: Any


class _Certain(NamedTuple):
    """What is certain of every element of an array."""

    nan: Bool = False
    nonfinite: Bool = False


_Fact: TypeAlias = _Known | _Table | _Certain
_UNKNOWN = _Certain()

# The element at each place is that of the operand, wherever that is.
_MOVES = frozenset(
    (
        *("broadcast_in_dim", "copy", "expand_dims", "reshape", "rev", "slice", "squeeze", "transpose"),
        *("pcast", "pvary"),  # to every device
    )
)
# The result is not finite where the operand is not.
_KEEPS = frozenset(("abs", "convert_element_type", "neg", "reduce_precision", "sqrt", "square"))
# The result is NaN where an operand is.
_PASSES_NAN = frozenset(
    (
        "cbrt",
        "cos",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "max",
        "min",
        "rsqrt",
        "sign",
        "sin",
        "tanh",
    )
)
_COMPARES = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))
_SUMS = frozenset(("add", "add_any", "mul", "sub"))
_SMALL = 256  # elements of a table, which are computed with before the decision
_CALLS = ("call_jaxpr", "fun_jaxpr", "jaxpr")


def certainly_nonfinite(
    update: Callable[[PyTree, PyTree], PyTree], arrays: PyTree, opt_state: PyTree
) -> Bool:
    """Return whether a whole update is NaN or inf for any finite gradients: False, or () bool.

    Args:
        update: returns the updates; it is traced once more, and not run. Numbers in its closure are settings.
        arrays: its first argument, of which nothing is certain: gradients, parameters, the loss.
        opt_state: its second argument. The numbers in it are taken for settings.
    """
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(arrays, opt_state)
    states = jax.tree.leaves(opt_state)
    facts: list[_Fact] = [_UNKNOWN] * (len(closed.jaxpr.invars) - len(states))
    facts += map(_setting, states)
    tests = _Tests()
    found = tests.of_program(closed.jaxpr, closed.consts, facts)
    updates = zip(found, jax.tree.leaves(shapes), strict=True)
    return tests.any(*(tests.nonfinite(fact) for fact, like in updates if is_floating(like) and like.size))


class _Tests:
    """Derives facts. What all parameters have in common is tested once, and not for each of them."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}
        self._kept: list[Any] = []  # so that no other object gets the identity of one

    def _once(self, name: Any, operands: Sequence[Any], make: Callable[[], Any]) -> Any:
        key = (name, *map(id, operands))
        if key not in self._made:
            self._kept += operands
            self._made[key] = make()
        return self._made[key]

    def of_program(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[_Fact]) -> list[_Fact]:
        """Return the facts of a program's results."""
        known: dict[Any, _Fact] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            known[var] = _constant(value)

        def read(var: Any) -> _Fact:
            return _Known(var.val) if hasattr(var, "val") else known.get(var, _UNKNOWN)

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._results(eqn, [read(var) for var in eqn.invars]), strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _results(self, eqn: Any, operands: list[_Fact]) -> list[_Fact]:
        name = eqn.primitive.name
        unknown: list[_Fact] = [_UNKNOWN] * len(eqn.outvars)
        if all(fact is _UNKNOWN for fact in operands):
            return unknown
        if name in _MOVES and not isinstance(operands[0], _Table):
            return [operands[0]]
        inner = next((eqn.params[key] for key in _CALLS if key in eqn.params), None)
        if inner is not None and len(getattr(inner, "jaxpr", inner).invars) == len(operands):
            return self.of_program(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
        plain = all(_is_small(var.aval) for var in (*eqn.invars, *eqn.outvars)) and not eqn.effects
        numbers = [fact.number for fact in operands if isinstance(fact, (_Known, _Table))]
        if plain and len(numbers) == len(operands):
            return self._computed(eqn, numbers)
        if name in _COMPARES and True in map(_plain, map(self.nan, operands)):
            return [_Known(np.bool_(name == "ne"))]
        if (
            name in _MOVES
            or name in _SUMS
            or name in _KEEPS
            or (name == "integer_pow" and eqn.params["y"] > 0)
        ):
            return [_Certain(self.any(*map(self.nan, operands)), self.any(*map(self.nonfinite, operands)))]
        if name in _PASSES_NAN:
            nan = self.any(*map(self.nan, operands))
            return [_Certain(nan, nan)]
        if name == "div":
            return [self._quotient(*operands)]
        return [self._choice(*operands)] if name == "select_n" else unknown

    def _computed(self, eqn: Any, numbers: Sequence[Any]) -> list[_Fact]:
        """Compute an operation on numbers."""

        def compute() -> list[_Fact]:
            given = [
                jnp.broadcast_to(jnp.asarray(x, var.aval.dtype), var.aval.shape)
                for x, var in zip(numbers, eqn.invars, strict=True)
            ]
            found = eqn.primitive.bind(*given, **eqn.params)
            return [_constant(number) for number in (found if eqn.primitive.multiple_results else [found])]

        kinds = tuple(str(var.aval) for var in (*eqn.invars, *eqn.outvars))
        found: list[_Fact] = self._once((eqn.primitive.name, str(eqn.params), kinds), numbers, compute)
        return found

    def _quotient(self, above: _Fact, below: _Fact) -> _Fact:
        by_zero = self._test("zero", below.number, lambda x: x == 0) if isinstance(below, _Known) else False
        nan = self.any(self.nan(above), self.nan(below))
        return _Certain(nan, self.any(nan, by_zero, self.nonfinite(above)))

    def _choice(self, which: _Fact, *cases: _Fact) -> _Fact:
        number = which.number if isinstance(which, _Known) else None
        return _Certain(
            *(self._chosen(number, [of(case) for case in cases]) for of in (self.nan, self.nonfinite))
        )

    def _chosen(self, which: Any, column: Sequence[Bool]) -> Bool:
        """Return the test of the case that is chosen; if that is not known, whether all hold."""
        if all(case is False for case in column) or (which is None and False in map(_plain, column)):
            return False

        def choose() -> Any:
            cases = [jnp.asarray(case) for case in column]
            return jnp.stack(cases).all() if which is None else jax.lax.select_n(jnp.asarray(which), *cases)

        return self._once("choice", [which, *column], choose)

    def nan(self, fact: _Fact) -> Bool:
        """Return whether every element is certain to be NaN."""
        return (
            self._test("nan", fact.number, lambda x: x != x)
            if isinstance(fact, (_Known, _Table))
            else fact.nan
        )

    def nonfinite(self, fact: _Fact) -> Bool:
        """Return whether every element is certain to be NaN or inf."""
        if isinstance(fact, (_Known, _Table)):
            return self._test("nonfinite", fact.number, lambda x: x - x != 0)
        return fact.nonfinite

    def _test(self, name: str, number: Any, test: Callable[[Any], Any]) -> Bool:
        """Return whether a floating-point number passes a test; in Python if it is known."""
        if not is_floating(number):
            return False
        if isinstance(number, (float, complex, np.ndarray, np.generic)):
            with np.errstate(invalid="ignore"):
                return bool(np.all(test(number)))
        return self._once(name, [number], lambda: jnp.all(test(number)))

    def any(self, *tests: Bool) -> Bool:
        """Return whether one of the tests holds."""
        unsure = list({id(test): test for test in tests if test is not False}.values())
        if True in map(_plain, unsure):
            return True
        if len(unsure) < 2:
            return unsure[0] if unsure else False
        return self._once("any", unsure, lambda: jnp.stack(unsure).any())


def _setting(value: Any) -> _Fact:
    """Return what is certain of a value that is no argument. What differs between devices is no setting."""
    return _Known(value) if jnp.shape(value) == () and not varying_axes(value) else _UNKNOWN


def _constant(value: Any) -> _Fact:
    """Return what is certain of a value in a program or computed from such: a number or a small table."""
    small = _is_small(value) and jnp.shape(value) != () and not varying_axes(value)
    return _Table(value) if small else _setting(value)


def _is_small(value: Any) -> bool:
    """Return whether a value has a few numbers or truth values. Keys of random numbers are none."""
    dtype = jnp.result_type(value) if not hasattr(value, "dtype") else value.dtype
    number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_)
    return jnp.shape(value) == () or bool(number and 0 < np.prod(jnp.shape(value)) <= _SMALL)


def _plain(test: Bool) -> bool | None:
    """Return the value of a test that is known in Python."""
    return test if isinstance(test, bool) else None
