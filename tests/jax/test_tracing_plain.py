"""Where the replay computes with NumPy, the result has the same bits as XLA's; all else is left to XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stablenum_jax._diagnosis.replay.jax_internals import bind
from stablenum_jax._diagnosis.replay.numpy_answers import numpy_answer

EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    np.inf,
    -np.inf,
    np.nan,
    3.4e38,
    1e-39,
    1e-45,
    1.2e-38,
    65504.0,
    7e4,
    1e19,
    0.1,
]
A = jnp.asarray(EDGES, jnp.float32)
B = jnp.asarray(EDGES[::-1], jnp.float32)

PROGRAMS: dict[str, Callable[..., Any]] = {
    "broadcast": lambda x: jax.lax.broadcast_in_dim(x, (2, x.shape[0], 3), (1,)),
    "reshape": lambda x: x.reshape(3, 5),
    "transpose": lambda x: x.reshape(3, 5).T,
    "squeeze": lambda x: x.reshape(15, 1).squeeze(1),
    "slice": lambda x: x[2:9:3],
    "concatenate": lambda x: jnp.concatenate([x, x[:2]]),
    "rev": lambda x: x[::-1],
    "to_half": lambda x: x.astype(jnp.float16),
    "to_bfloat16": lambda x: x.astype(jnp.bfloat16),
    "half_to_single": lambda x: x.astype(jnp.float16).astype(jnp.float32),
    "to_integer": lambda x: x.astype(jnp.int32),
    "from_integer": lambda x: jnp.arange(5, dtype=jnp.int32).astype(jnp.float32) + x[:5],
    "to_float8": lambda x: x.astype(jnp.float8_e5m2),
    "select": lambda x: jnp.where(x > 1, x, -jnp.inf),
    "compare": lambda x: (x == x) | (x < 1) & (x >= 0),
    "integers": lambda x: jnp.arange(5) * 2**30 + (2**31 - 1),
    "iota": lambda x: jax.lax.broadcasted_iota(jnp.int32, (3, 4), 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_shape_and_selection_operations(name: str) -> None:
    jaxpr = jax.make_jaxpr(PROGRAMS[name])(A)
    _compare(jaxpr.jaxpr, [A], jaxpr.consts)


@pytest.mark.parametrize("function", [jnp.add, jnp.subtract, jnp.multiply, jnp.divide])
def test_arithmetic_gives_xlas_bits(function: Any) -> None:
    """Each pair of edges is computed on its own, so that one subnormal does not send all of them to XLA."""
    closed = jax.make_jaxpr(function)(jnp.float32(1), jnp.float32(1))
    (eqn,) = closed.jaxpr.eqns
    asked = 0
    for a in A:
        for b in B:
            (want,) = bind(eqn, [a, b])
            got = numpy_answer(eqn.primitive.name, [a, b], eqn.params, eqn.outvars[0].aval)
            if got is not None:
                asked += 1
                np.testing.assert_array_equal(got, np.asarray(want))
    assert asked > 100


def test_functions_and_values_that_are_left_to_xla() -> None:
    one = jnp.float32(1.0)
    for function, x in [(jnp.exp, one), (jnp.sum, A), (lambda x: x + x, jnp.bfloat16(1.0)), (jnp.add, 1e-39)]:
        args = (x, x) if function is jnp.add else (x,)
        eqn = jax.make_jaxpr(function)(*args).jaxpr.eqns[0]
        data = [jnp.asarray(a) for a in args][: len(eqn.invars)]
        assert numpy_answer(eqn.primitive.name, data, eqn.params, eqn.outvars[0].aval) is None


def _compare(jaxpr: Any, args: list[Any], consts: list[Any]) -> None:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        inputs = [v.val if hasattr(v, "val") else env[v] for v in eqn.invars]
        want = bind(eqn, inputs)
        got = numpy_answer(eqn.primitive.name, inputs, eqn.params, eqn.outvars[0].aval)
        if got is not None:
            assert got.dtype == want[0].dtype
            np.testing.assert_array_equal(got.astype(np.float64), np.asarray(want[0]).astype(np.float64))
        env.update(zip(eqn.outvars, want, strict=True))
