"""Evaluate a jaxpr in float64: its formats widened, and its numbers as they were written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from stablenum.diagnosis.diff.sides.exact_constants import LARGEST_WRITTEN, exact_constants, narrow_constant
from stablenum_jax._diagnosis.diff.fused_attention import formula_of
from stablenum_jax._diagnosis.replay.jax_internals import (
    bind,
    called_jaxpr,
    context_of,
    differentiated_jaxpr,
    scan_counts,
    sub_jaxpr,
)

__all__ = [
    "NO_FLOAT64", "as_recorded", "as_written", "is_float", "is_float_dtype", "is_of_bits", "solving",
    "wide_dtype", "wide_params", "widened",
]  # fmt: skip

_DTYPES = ("new_dtype", "preferred_element_type", "dtype", "out_dtype", "accum_dtype", "float_dtype")
# What an operation raises that has no float64 form, such as a kernel of one chip.
NO_FLOAT64 = (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
# Scatters keep the jaxpr that combines two elements, in the format of the elements.
_COMBINING = {
    "scatter-add": lax.add, "scatter_add": lax.add, "scatter-mul": lax.mul, "scatter_mul": lax.mul,
    "scatter_min": lax.min, "scatter-min": lax.min, "scatter_max": lax.max, "scatter-max": lax.max,
}  # fmt: skip


def wide_params(eqn: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an equation with all formats widened."""
    given, name = dict(params), eqn.primitive.name
    if is_of_bits(name):
        return given
    for key in _DTYPES:
        if given.get(key) is not None and is_float_dtype(given[key]):
            given[key] = wide_dtype(given[key])
    if "precision" in given:  # may name an algorithm that rounds the operands
        given["precision"] = None
    if name in _COMBINING:
        number = jax.ShapeDtypeStruct((), wide_dtype(eqn.outvars[0].aval.dtype))
        given["update_jaxpr"] = jax.make_jaxpr(_COMBINING[name])(number, number).jaxpr
    return given


def as_recorded(eqn: Any, inputs: list[Any]) -> list[Any]:
    """Return the inputs in the formats of the program, for equations that have no float64 form."""
    return [
        jnp.asarray(x, v.aval.dtype) if is_float(x) else x for x, v in zip(inputs, eqn.invars, strict=True)
    ]


def as_written(data: Any, numbers: Collection[float]) -> Any:
    """Return the numbers, in float64, that a small array of a program holds rounded."""
    dtype = getattr(data, "dtype", None)
    if dtype is None or np.iscomplexobj(data) or dtype == np.float64:
        return data
    if dtype == np.float32:
        return exact_constants(data)
    array = np.asarray(data)

    def rounded(number: float) -> float:
        return float(np.asarray(number).astype(array.dtype))

    exact = [narrow_constant(float(x), numbers, rounded) for x in array.ravel()]
    return np.asarray(exact, np.float64).reshape(array.shape)


def is_of_bits(name: str) -> bool:
    """Return whether a primitive works on the bits of a format, which are those that were recorded."""
    return name == "bitcast_convert_type" or name.startswith(("random_", "threefry"))


def is_float(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, float)
    return is_float_dtype(dtype)


def is_float_dtype(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def wide_dtype(dtype: Any) -> Any:
    if not is_float_dtype(dtype):
        return dtype
    return np.dtype(np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64)


def solving(eqn: Any, inputs: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the closed jaxpr that solves the system of a ``custom_linear_solve``, and what it is given: the
    parts have a float64 form, and the whole has none, as its functions are compiled for float32."""
    solve, lengths = eqn.params["jaxprs"].solve, eqn.params["const_lengths"]
    begin = lengths.matvec + lengths.vecmat
    return solve, [*inputs[begin : begin + lengths.solve], *inputs[sum(lengths) :]]


@lru_cache(maxsize=64)  # bodies of loops; chosen, not measured
def widened(closed: Any, numbers: frozenset[float]) -> Callable[..., list[Any]]:
    """Return a closed jaxpr as a compiled function in float64, such as the body of a long loop.

    Args:
        closed: the jaxpr.
        numbers: those that the other program computes with.
    """
    return jax.jit(_Widened(numbers).closed(closed))


class _Widened:
    """Evaluates equations under a trace, with all formats widened."""

    def __init__(self, numbers: Collection[float]) -> None:
        self._numbers = numbers

    def closed(self, closed: Any) -> Callable[..., list[Any]]:
        jaxpr, consts = sub_jaxpr(closed)
        return lambda *args: self._run(jaxpr, consts, args)

    def _run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env = dict(zip(jaxpr.constvars, map(self._exact, consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return self._exact(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            with context_of(eqn):
                made = self._made(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, map(_wide, made), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _exact(self, data: Any) -> Any:
        if not is_float(data):
            return data
        small = np.size(data) <= LARGEST_WRITTEN and not isinstance(data, jax.core.Tracer)
        return _wide(as_written(data, self._numbers) if small else data)

    def _made(self, eqn: Any, inputs: list[Any]) -> Sequence[Any]:
        name, p = eqn.primitive.name, eqn.params
        if name == "custom_linear_solve":
            solve, given = solving(eqn, inputs)
            return self.closed(solve)(*given)
        called = called_jaxpr(eqn) or differentiated_jaxpr(eqn)
        if called is not None:
            return self._run(*called, inputs)
        if name == "cond":
            branches = [self.closed(b) for b in p["branches"]]
            return lax.switch(jnp.asarray(inputs[0], jnp.int32), branches, *inputs[1:])
        if name == "while":
            return self._while(p, inputs)
        if name == "scan":
            return self._scan(p, inputs)
        return self._computed(eqn, inputs)

    def _while(self, p: Mapping[str, Any], inputs: list[Any]) -> Sequence[Any]:
        ends = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        of_condition, of_body, carry = inputs[: ends[0]], inputs[ends[0] : ends[1]], inputs[ends[1] :]
        goes_on, body = self.closed(p["cond_jaxpr"]), self.closed(p["body_jaxpr"])
        return lax.while_loop(lambda c: goes_on(*of_condition, *c)[0], lambda c: body(*of_body, *c), carry)

    def _scan(self, p: Mapping[str, Any], inputs: list[Any]) -> Sequence[Any]:
        n_consts, n_carry = scan_counts(dict(p), len(inputs))
        consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]
        body = self.closed(p["jaxpr"])

        def once(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            out = body(*consts, *carry, *rows)
            return out[:n_carry], out[n_carry:]

        rows = inputs[n_consts + n_carry :]
        end, stacked = lax.scan(once, carry, rows, length=p["length"], reverse=p["reverse"])
        return [*end, *stacked]

    def _computed(self, eqn: Any, inputs: list[Any]) -> Sequence[Any]:
        name, given = eqn.primitive.name, wide_params(eqn, eqn.params)
        if name == "reduce_precision":
            return inputs[:1]
        if is_of_bits(name):
            return bind(eqn, as_recorded(eqn, inputs), given)
        formula = formula_of(name, inputs, given)
        if formula is not None:
            return formula(*inputs)
        try:
            return bind(eqn, inputs, given)
        except NO_FLOAT64:
            return bind(eqn, as_recorded(eqn, inputs))


def _wide(data: Any) -> Any:
    return jnp.asarray(data, wide_dtype(data.dtype)) if is_float(data) and hasattr(data, "dtype") else data
