"""Products in 8 bits: exact emulation, scales by the core's rule, no lasting bad values, digits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.extend.core import Literal

import stablenum_jax
from stablenum import DelayedScaling
from stablenum_jax._precision.fp8 import fp8_dot, init_fp8, quantize
from stablenum_jax._trees.leaves import FP8_STATISTICS
from tests.jax.digits import accuracy, digits, mlp

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def rounded(x, scale, dtype):
    """The oracle: a saturating cast by ml_dtypes, converted back to float64."""
    top = float(ml_dtypes.finfo(dtype).max)
    y = np.clip(np.asarray(x, np.float32) * np.float32(scale), -top, top)
    return y.astype(dtype).astype(np.float64) / np.float64(np.float32(scale))


def rules(history: int, *, power_of_two: bool = True) -> dict[str, DelayedScaling]:
    """The rules of a product by their keywords, with a history of this length."""
    formats = {"forward_scaling": "float8_e4m3fn", "backward_scaling": "float8_e5m2"}
    return {
        name: DelayedScaling(format=fmt, history=history, power_of_two=power_of_two)
        for name, fmt in formats.items()
    }


def use(state, x, w, g, **how):
    """One use: the result, both gradients and the next state."""
    out, pull = jax.vjp(functools.partial(fp8_dot, **how), x, w, state)
    return out, *pull(g)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_and_scales_equal_the_oracles(native: bool, dtype) -> None:
    scaling = rules(3, power_of_two=False)
    rng, state = np.random.default_rng(1), init_fp8(**scaling)
    run = jax.jit(functools.partial(use, **scaling, native=native))
    seen = [[], [], []]
    scales = [0.0, 0.0, 0.0]
    for size in (1.0, 1e3, 1e-3, 7.0, 2e5, 1.0):
        x, w, g = (
            jnp.asarray(rng.normal(size=shape) * size, dtype) for shape in ((2, 5, 8), (8, 4), (2, 5, 4))
        )
        out, dx, dw, state = run(state, x, w, g)
        tops = ((x, 448.0), (w, 448.0), (g, 57344.0))
        largest = [float(np.abs(np.asarray(array, np.float64)).max()) for array, _ in tops]
        if not seen[0]:  # the first use is scaled by its own largest element
            scales = [top / amax for (_, top), amax in zip(tops, largest, strict=True)]
        qx, qw = rounded(x, scales[0], E4M3), rounded(w, scales[1], E4M3)
        qg = rounded(g, scales[2], E5M2)
        expected = (qx @ qw, qg @ qw.T, np.einsum("abk,abn->kn", qx, qg))
        for got, want in zip((out, dx, dw), expected, strict=True):
            assert got.dtype == dtype
            tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
            got = np.asarray(got, np.float64)
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
        for k, (_, top) in enumerate(tops):
            seen[k].append(largest[k])
            scales[k] = top / max(seen[k][-3:])
        np.testing.assert_allclose(state.forward.scale, scales[:2], rtol=3e-7)
        np.testing.assert_allclose(state.backward.scale, scales[2:], rtol=3e-7)


@pytest.mark.parametrize("sizes", [(3, 8, 4), (16, 8, 16), (16, 48, 32)])
def test_products_in_8_bits_fit_the_hardware_or_are_made_in_float32(sizes: tuple[int, int, int]) -> None:
    """XLA on an H200 gives NaN for products of 8-bit arrays whose sizes are no multiples of 16."""
    m, k, n = sizes
    x, w, g = (jnp.ones(shape) for shape in ((m, k), (k, n), (m, n)))
    traced = jax.make_jaxpr(functools.partial(use, native=True))(init_fp8(), x, w, g)
    products = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    bits = [jnp.finfo(v.aval.dtype).bits for eqn in products for v in eqn.invars]
    fits = [shape % 16 == 0 for shape in sizes]
    assert bits == [8 if all(fits) else 32] * 6


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(3, 8, 4), (64, 256, 128), (1024, 512, 256)])
def test_native_products_on_a_gpu_equal_those_in_float32(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    rng = np.random.default_rng(5)
    x, w, g = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((m, k), (k, n), (m, n)))
    for a, b in zip(
        *(jax.jit(functools.partial(use, native=how))(init_fp8(), x, w, g)[:3] for how in (True, False)),
        strict=True,
    ):
        a, b = (np.asarray(part, np.float64) for part in (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 * np.abs(b).max())


@pytest.mark.sampled
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_non_finite_values_pass_through_and_leave_the_scales_unchanged(bad: float, place: int) -> None:
    scaling = rules(4)
    good = [jnp.full((2, 3), 2.0), jnp.full((3, 2), 2.0), jnp.full((2, 2), 2.0)]
    *_, state = use(init_fp8(**scaling), *good, **scaling)
    spoiled = list(good)
    spoiled[place] = spoiled[place].at[0, 0].set(bad)
    out, dx, dw, after = use(state, *spoiled, **scaling)
    assert not all(np.isfinite(part).all() for part in (out, dx, dw))
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert np.isfinite(a).all()
        if a.ndim == 1:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_values_are_rounded_before_the_cast_which_a_compiler_may_remove(name: str) -> None:
    """XLA on a GPU removes a conversion to a narrower format and back, and all rounding with it."""
    x = jnp.asarray(np.random.default_rng(3).normal(size=1000) * 100, jnp.float32)
    traced = jax.make_jaxpr(lambda x: quantize(x, jnp.float32(1.5), name).astype(jnp.float32))(x)
    known = dict(zip(traced.jaxpr.invars, [x], strict=True))
    removed = 0
    for eqn in traced.jaxpr.eqns:
        given = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
        if eqn.params.get("new_dtype") == jnp.dtype(name):
            removed, made = removed + 1, given
        else:
            made = eqn.primitive.bind(*given, **eqn.params)
            made = made if eqn.primitive.multiple_results else [made]
        known |= dict(zip(eqn.outvars, made, strict=True))
    assert removed == 1
    np.testing.assert_array_equal(known[traced.jaxpr.outvars[0]], rounded(x, 1.5, jnp.dtype(name)) * 1.5)


def test_rounding_saturates_and_lets_nan_through() -> None:
    x = jnp.asarray([1e30, -1e30, jnp.inf, -jnp.inf, jnp.nan, 0.0])
    one = jnp.float32(1.0)
    e5m2 = np.asarray(quantize(x, one, "float8_e5m2"), np.float32)
    np.testing.assert_array_equal(e5m2, [57344.0, -57344.0, np.inf, -np.inf, np.nan, 0.0])
    e4m3 = np.asarray(quantize(x, one, "float8_e4m3fn"), np.float32)
    np.testing.assert_array_equal(e4m3, [448.0, -448.0, np.nan, np.nan, np.nan, 0.0])
    assert np.isinf(quantize(x[:1], jnp.float32(2.0**100), "float8_e5m2")).sum() == 0


def test_the_backward_pass_keeps_one_byte_per_element_of_the_factors() -> None:
    """Besides the 8-bit factors, only the state and the two scales in use are kept."""

    def size(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    x, w = jax.ShapeDtypeStruct((2, 5, 8), jnp.bfloat16), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    state = jax.eval_shape(init_fp8)
    _, pull = jax.eval_shape(functools.partial(jax.vjp, fp8_dot), x, w, state)
    assert size(pull) == x.size + w.size + size((state, state.forward.scale))


def test_no_elements() -> None:
    out, pull = jax.vjp(fp8_dot, jnp.zeros((0, 3)), jnp.ones((3, 2)), init_fp8())
    dx, dw, state = pull(out)
    assert (out.shape, dx.shape) == ((0, 2), (0, 3))
    assert (dw == 0).all()
    assert float(state.backward.scale[0]) == 1.0


def test_wrong_use_is_named() -> None:
    with pytest.raises(ValueError, match="x and w must have shapes"):
        fp8_dot(jnp.ones((2, 3)), jnp.ones((2, 3)), init_fp8())
    with pytest.raises(ValueError, match="state must come from init_fp8 with the same forward_scaling"):
        fp8_dot(jnp.ones((2, 3)), jnp.ones((3, 3)), init_fp8(), **rules(2))
    with pytest.raises(ValueError, match="backward_scaling must be a DelayedScaling"):
        init_fp8(backward_scaling=rules(2)["forward_scaling"])
    with pytest.raises(ValueError, match="forward_scaling must be a DelayedScaling"):
        fp8_dot(jnp.ones((2, 3)), jnp.ones((3, 3)), init_fp8(), forward_scaling="max")


def train_digits(dot, spoil_at: int | None = None) -> tuple[float, int, dict]:
    """Train an MLP on the digits under a guard, with ``dot(x, w, state)`` for its products."""
    x, y = digits("train")
    params = mlp(seed=0)
    states = {name: init_fp8(**rules(16)) for name in params}
    variables = {"params": params, FP8_STATISTICS: states}
    tx = optax.chain(stablenum_jax.guard(), optax.adam(2e-3))

    def loss(variables, x, y):
        for i, (name, layer) in enumerate(variables["params"].items()):
            x = dot(x, layer["w"], variables[FP8_STATISTICS][name]) + layer["b"]
            x = jax.nn.relu(x) if i < len(params) - 1 else x.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    def one(carry, batch):
        variables, opt_state = carry
        value, grads = stablenum_jax.value_and_grad(loss, opt_state)(variables, *batch)
        return stablenum_jax.step(tx, variables, opt_state, grads, value=value), None

    order = np.concatenate([np.random.default_rng(i).permutation(len(x))[:1280] for i in range(20)])
    xs, ys = x[order].reshape(-1, 64, 64), y[order].reshape(-1, 64)
    if spoil_at is not None:
        xs[spoil_at, 3, 7] = np.inf
    start = (variables, tx.init(params))
    (variables, opt_state), _ = jax.jit(lambda c: jax.lax.scan(one, c, (xs, ys)))(start)
    skipped = stablenum_jax.metrics(opt_state)["skipped_total"]
    return accuracy(variables["params"]), skipped, variables[FP8_STATISTICS]


def bfloat16_dot(x, w, state):
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def fp8(x, w, state):
    return fp8_dot(x.astype(jnp.bfloat16), w, state, **rules(16))


def test_digits_in_8_bits_end_as_well_as_in_bfloat16() -> None:
    plain, _, _ = train_digits(bfloat16_dot)
    quantised, skipped, states = train_digits(fp8)
    spoiled, skipped_when_spoiled, _ = train_digits(fp8, spoil_at=150)
    assert plain > 0.9
    assert abs(quantised - plain) <= 0.01
    assert abs(spoiled - plain) <= 0.01
    assert (skipped, skipped_when_spoiled) == (0, 1)
    assert all((state.forward.scale != 1).all() for state in states.values())


def test_one_state_for_all_examples_of_a_vmap_is_rejected_where_it_would_be_summed() -> None:
    x, w, state = jnp.ones((5, 2, 3)), jnp.full((3, 4), 0.5), stablenum_jax.init_fp8()
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), state)

    def total(x, w, state):
        return fp8_dot(x, w, state).sum()

    def of_all(w, state, shared=True):
        return jax.vmap(total, (0, None, None if shared else 0))(x, w, state).sum()

    wrong = {
        "outside": lambda: jax.grad(of_all, (0, 1))(w, state),
        "compiled": lambda: jax.jit(jax.grad(of_all))(w, state),
        "inside": lambda: jax.vmap(jax.jit(jax.grad(total, 2)), (0, None, None))(x, w, state),
    }
    for run in wrong.values():
        with pytest.raises(ValueError, match="the gradients of one state for all 5 examples"):
            run()
    assert of_all(w, state) == pytest.approx(5 * 2 * 4 * 1.5)  # no next state, nothing to sum
    each = jax.grad(of_all, 1)(w, states, shared=False)
    whole = jax.grad(total, 2)(x, w, state)
    np.testing.assert_array_equal(each.forward.scale, [whole.forward.scale] * 5)
