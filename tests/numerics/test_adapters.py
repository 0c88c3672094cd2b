"""The adapters: names, spelling, transformations, formats, and errors."""

from __future__ import annotations

import inspect

import array_api_compat.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum.numerics as core
import stablenum_jax.numerics as nj
import stablenum_torch.numerics as nt
from tests.selection import only, thinned

NAMES = core.__all__
ROWS = {"cumulative_logsumexp", "log_softmax", "logsumexp", "softmax", "norm", "normalize"}
ROWS |= {"rms_norm", "layer_norm", "std", "variance"}
EXTRA = {"power": (1.5,), "soft_cap": (3.0,)}
TWO = {"arctan2", "divide", "logaddexp", "logsubexp", "xlogy"}


def arguments(name, array):
    rng = np.random.default_rng(0)
    x = rng.uniform(0.2, 0.8, (3, 4))
    second = (array(x[::-1] * 0.2),) if name in TWO else ()
    return (array(x), *second), EXTRA.get(name, ())


def test_both_adapters_have_the_names_of_the_core():
    assert nt.__all__ == nj.__all__ == core.__all__


@pytest.mark.parametrize("name", NAMES)
def test_signatures_and_docstrings_are_those_of_the_core(name):
    for module, axis in ((nt, "dim"), (nj, "axis")):
        function = getattr(module, name)
        parameters = inspect.signature(function).parameters
        assert "xp" not in parameters
        assert "xp:" not in function.__doc__
        assert (axis in parameters) == (name in ROWS)
        assert ">>>" in function.__doc__


@pytest.mark.parametrize("name", thinned(NAMES))
def test_torch_transformations(name):
    xs, extra = arguments(name, lambda a: torch.tensor(a, dtype=torch.float32))

    def run(*values):
        return getattr(nt, name)(*values, *extra)

    def total(*values):
        return run(*values).sum()

    slopes = torch.func.grad(total)(*xs)
    each = torch.func.vmap(torch.func.grad(total))(*xs)
    if name != "norm":  # over everything by default
        torch.testing.assert_close(slopes, each)
    second = torch.func.grad(lambda *v: torch.func.grad(total)(*v).sum())(*xs)
    assert torch.isfinite(second).all()
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*xs), run(*xs))
    with torch.autocast("cpu", torch.bfloat16):
        assert run(*xs).dtype == torch.float32
        assert run(*(x.to(torch.bfloat16) for x in xs)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", only(["arctan2", "divide", "norm", "power", "rms_norm", "softmax"], NAMES))
def test_jax_transformations(name):
    xs, extra = arguments(name, lambda a: jnp.asarray(a, jnp.float32))

    def total(*values):
        return getattr(nj, name)(*values, *extra).sum()

    slopes = jax.jit(jax.grad(total))(*xs)
    each = jax.jit(jax.vmap(jax.grad(total)))(*xs)
    if name != "norm":
        np.testing.assert_allclose(slopes, each, rtol=1e-5, atol=1e-6)
    second = jax.jit(jax.grad(lambda *v: jax.grad(total)(*v).sum()))(*xs)
    assert jnp.isfinite(second).all()


@pytest.mark.parametrize("name", thinned(NAMES))
def test_vmap_over_matrices_is_a_loop(name):
    """torch is tested with value and gradient, rows along every axis, and no fallback warning.

    JAX is tested with the value alone, and rows along the last axis.
    """
    rng = np.random.default_rng(1)
    rows = [rng.uniform(0.2, 0.8, (2, 3, 4)).astype(np.float32) for _ in range(1 + (name in TWO))]
    if name == "logsubexp":
        rows[1] -= 1.0
    positional = EXTRA.get(name, ())
    xs = [torch.tensor(r) for r in rows]
    for axis in (0, 1, -1) if name in ROWS else (None,):

        def run(*values, axis=axis):
            return getattr(nt, name)(*values, *positional, **({} if axis is None else {"dim": axis}))

        def total(*values, run=run):
            return run(*values).sum()

        for function in (torch.func.grad(total), run):
            each = torch.stack([function(*(x[i] for x in xs)) for i in range(2)])
            torch.testing.assert_close(torch.func.vmap(function)(*xs), each)
    options = {"axis": -1} if name in ROWS else {}
    mapped = jax.jit(jax.vmap(lambda *values: getattr(nj, name)(*values, *positional, **options)))(*rows)
    np.testing.assert_allclose(mapped, each, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_whole_numbers_and_bools_become_floating_point_numbers(name):
    """As in ``torch.sqrt`` and ``jnp.sqrt``: a masked mean divides by a count."""
    _, extra = arguments(name, list)
    count = 1 + (name in TWO)
    for module, lib, default in ((nt, torch, torch.float32), (nj, jnp, jnp.float32)):
        function = getattr(module, name)
        for dtype in (lib.int32, lib.bool if lib is torch else jnp.bool_):
            whole = lib.ones((2, 2), dtype=dtype)
            wide = lib.ones((2, 2), dtype=default)
            result = function(*[whole] * count, *extra)
            assert result.dtype == default
            np.testing.assert_array_equal(np.asarray(result), np.asarray(function(*[wide] * count, *extra)))
        if count == 2:
            half, whole = lib.ones((2, 2), dtype=lib.float16), lib.ones((2, 2), dtype=lib.int32)
            assert function(half, whole).dtype == function(whole, half).dtype == lib.float16


@pytest.mark.parametrize("name", NAMES)
def test_lists_and_complex_numbers_raise(name):
    _, extra = arguments(name, list)
    count = 1 + (name in TWO)
    for module, lib in ((nt, torch), (nj, jnp)):
        with pytest.raises(TypeError, match="floating-point format; got list"):
            getattr(module, name)(*[[1.0]] * count, *extra)
        with pytest.raises(TypeError, match=r"floating-point format; got (torch\.)?complex64"):
            getattr(module, name)(*[lib.ones((2, 2), dtype=lib.complex64)] * count, *extra)


@pytest.mark.parametrize("name", sorted(TWO))
def test_a_number_may_stand_for_an_array(name):
    x = torch.tensor([0.5, 2.0])
    assert torch.equal(getattr(nt, name)(x, 0.25), getattr(nt, name)(x, torch.full((2,), 0.25)))
    assert torch.equal(getattr(nt, name)(3.0, x), getattr(nt, name)(torch.full((2,), 3.0), x))
    assert getattr(nj, name)(jnp.asarray([0.5], jnp.bfloat16), 0.25).dtype == jnp.bfloat16


def test_a_mask_must_be_of_booleans():
    for name in ("logsumexp", "softmax", "log_softmax"):
        with pytest.raises(TypeError, match="mask must be a bool array"):
            getattr(nt, name)(torch.ones(2), mask=torch.ones(2))
        with pytest.raises(TypeError, match="mask must be a bool array"):
            getattr(nj, name)(jnp.ones(2), mask=jnp.ones(2))


def test_rows_of_length_0():
    assert nt.logsumexp(torch.ones((2, 0))).tolist() == [-torch.inf, -torch.inf]
    assert nj.logsumexp(jnp.ones((2, 0))).tolist() == [-np.inf, -np.inf]
    for name in ("softmax", "log_softmax", "normalize", "rms_norm", "cumulative_logsumexp"):
        assert getattr(nt, name)(torch.ones((2, 0))).shape == (2, 0)
        assert getattr(nj, name)(jnp.ones((2, 0))).shape == (2, 0)


def test_xla_on_a_cpu_flushes_subnormal_numbers_and_torch_does_not():
    """This is why everything below the smallest normal number is treated as 0: then the frameworks agree."""
    assert float(jax.jit(lambda x: x * 1.0 + 0.0 * x)(jnp.float32(1e-40))) in (0.0, float(np.float32(1e-40)))
    assert float(torch.tensor(1e-38) * 0.01) > 0
    assert float(jax.jit(lambda x: x * 0.01)(jnp.float32(1e-38))) == 0


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16])
def test_two_narrow_tensors_under_compile(form):
    x = torch.tensor([0.5, 2.0], dtype=form)
    torch.compiler.reset()
    run = torch.compile(nt.logaddexp, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(x, x), nt.logaddexp(x, x))


def test_mixed_formats_give_the_promoted_format():
    for module, lib, array in ((nt, torch, torch.tensor), (nj, jnp, jnp.asarray)):
        x = {name: array([0.5], dtype=getattr(lib, name)) for name in ("float16", "bfloat16", "float32")}
        assert module.divide(x["float16"], x["bfloat16"]).dtype == lib.float32
        assert module.divide(x["float16"], x["float32"]).dtype == lib.float32
        assert module.divide(x["float16"], 2.0).dtype == lib.float16
    double = nt.divide(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.bfloat16))
    assert double.dtype == torch.float64


def test_an_axis_that_does_not_exist_raises():
    for module, one, name in ((nt, torch.ones, "dim"), (nj, jnp.ones, "axis")):
        for shape, axis in (((2, 2), 2), ((2, 2), -3), ((), -1)):
            with pytest.raises(ValueError, match=f"{name} must be a whole number"):
                module.cumulative_logsumexp(one(shape), axis)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_exponent_that_is_traced_or_learned_gives_what_a_number_gives(dtype):
    x = np.asarray([0.25, 4.0, 9.0, 0.0, -2.0])
    for exponent in (0.7, -1.3, 2.0, 0.0, 1.0):
        fixed = nj.power(jnp.asarray(x, dtype), exponent)
        traced = jax.jit(nj.power)(jnp.asarray(x, dtype), exponent)
        learned = nt.power(torch.tensor(x, dtype=getattr(torch, dtype)), torch.tensor(exponent))
        assert traced.dtype == fixed.dtype == dtype
        assert str(learned.dtype) == f"torch.{dtype}"
        for found in (traced, learned.numpy()):
            np.testing.assert_allclose(
                np.asarray(found, float), np.asarray(fixed, float), rtol=2e-3 if dtype == "float16" else 1e-6
            )


def test_an_exponent_for_each_column_is_broadcast():
    x, exponents = jnp.asarray([[4.0], [9.0]]), jnp.asarray([0.5, 2.0, 1.0])
    expected = [[2.0, 16.0, 4.0], [3.0, 81.0, 9.0]]
    np.testing.assert_allclose(nj.power(x, exponents), expected, rtol=1e-6)
    np.testing.assert_allclose(
        core.power(np.asarray(x), np.asarray(exponents), xp=array_api_compat.numpy), expected, rtol=1e-6
    )
    with pytest.raises(TypeError, match="exponent must be"):
        nj.power(x, jnp.asarray(1j))
