"""``exact_norms``: the same bits in every layout, in JAX."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import array_api_compat.numpy as npx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax as sj
from stablenum.norms import exact_sums
from stablenum_jax._step.measure import exactly as exact
from stablenum_jax._step.measure.exactly import leaf_sums
from tests.jax.exact_layouts import FEW, LAYOUTS, gradients
from tests.selection import only

FLOAT32_MAX = float(np.finfo(np.float32).max)


@pytest.fixture(scope="module", params=only(["few"], ["few", "all"]))
def ran(request: pytest.FixtureRequest) -> Any:
    """What up to eight devices recorded: one process for all layouts, or for one of each kind."""
    few = ["few"] * (request.param == "few")
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax.exact_layouts", *few],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("rules", ["exact", "single norms"])
def test_every_layout_decides_with_the_same_bits(ran: Any, rules: str) -> None:
    first, *others = ran[rules].values()
    assert others
    assert first["reason"] == "CLIPPED"
    assert all(one == first for one in others), ran[rules]


def test_without_it_layouts_differ_in_the_last_bits(ran: Any) -> None:
    """If this fails, the gradients do not show what the test above is about."""
    assert len({one["norm"] for one in ran["rounded"].values()}) > 1
    assert ran["exact"].keys() in ({*FEW}, {*LAYOUTS})


def test_the_norm_is_the_true_one(ran: Any) -> None:
    squares = [Fraction(float(x)) ** 2 for part in gradients().values() for x in np.asarray(part).ravel()]
    norm = np.float32(float.fromhex(ran["exact"]["one device"]["norm"]))
    below, above = np.nextafter(norm, np.float32(0)), np.nextafter(norm, np.float32(np.inf))
    assert Fraction(float(below)) ** 2 < sum(squares) < Fraction(float(above)) ** 2


SHAPES = [(), (0,), (7,), (0, 3), (30, 41), (2, 3, 4, 5)]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_sums_are_those_of_the_core(dtype: Any) -> None:
    rng = np.random.default_rng(1)
    made = [rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape)) for shape in SHAPES]
    leaves = [jnp.asarray(x, dtype) for x in made]
    found = jax.jit(leaf_sums)(leaves)
    for i, leaf in enumerate(leaves):
        bits = np.asarray(leaf).astype(np.float32).view(np.int32)
        expected = exact_sums.summed(bits, xp=npx)
        assert int(found.window[i]) == int(expected.window)
        np.testing.assert_array_equal(found.digits[i], expected.digits)


@pytest.mark.parametrize("most", [2**12, 2**10, 2**8])
def test_axes_too_long_for_int32_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """With a smaller bound in place of 2**31, small arrays take the paths of huge ones."""
    leaf = jnp.asarray(np.random.default_rng(2).standard_normal((5, 64, 3)), jnp.float32)
    expected = leaf_sums([leaf, leaf.ravel()[:100]])
    monkeypatch.setattr(exact, "_MOST", most)
    found = leaf_sums([leaf, leaf.ravel()[:100]])
    np.testing.assert_array_equal(found.digits, expected.digits)


def test_a_complex_gradient_counts_with_both_parts() -> None:
    found = leaf_sums([jnp.asarray([3 + 4j, 0.0]), None])
    assert exact_sums.norms(found, xp=jnp).value.tolist() == [5.0, 0.0]


def test_a_float64_gradient_is_rounded_to_float32() -> None:
    with jax.enable_x64(True):
        found = exact_sums.norms(leaf_sums([jnp.asarray([0.1]), jnp.asarray([1e300])]), xp=jnp)
    assert found.value.tolist() == [float(np.float32(0.1)), FLOAT32_MAX]


@pytest.mark.parametrize(
    ("values", "reason", "norm"),
    [
        ([3.0, 4.0], "CLIPPED", 5.0),
        ([0.0, 0.0], "OK", 0.0),
        ([3e38, 3e38], "CLIPPED", FLOAT32_MAX),
        ([2e38, 2e38], "CLIPPED", 2e38 * 2**0.5),
        ([1e-40, 0.0], "OK", 0.0),
        ([math.inf, 1.0], "INF_GRADIENT", math.inf),
        ([math.inf, math.nan], "NAN_GRADIENT", math.nan),
    ],
)
def test_gradients_of_every_size_are_decided_as_without_it(
    stepper: Any, values: Any, reason: str, norm: float
) -> None:
    grads, params = {"w": jnp.asarray(values)}, {"w": jnp.zeros(2)}
    for exactly in (False, True):
        tx = optax.chain(sj.guard(clip=1.0, exact_norms=exactly), optax.sgd(1.0))
        after, state = stepper(tx)(params, tx.init(params), grads)
        last = sj.metrics(state)
        assert last["reason"].name == reason
        np.testing.assert_allclose(last["grad_norm"], norm, rtol=1e-6)
        if reason == "CLIPPED":
            np.testing.assert_allclose(np.linalg.norm(after["w"]), 1.0, rtol=1e-5)


def test_units_and_elements_are_measured_besides(stepper: Any) -> None:
    rule = stablenum.AdaptiveGradClip(clipping=0.5)
    scale = stablenum.UnderflowAwareLossScale(init_scale=2.0)
    params, grads = {"w": jnp.ones((2, 3))}, {"w": jnp.arange(6.0).reshape(2, 3)}
    ends = []
    for exactly in (False, True):
        tx = optax.chain(sj.guard(clip=(rule, 1.0), loss_scale=scale, exact_norms=exactly), optax.sgd(1.0))
        ends.append(stepper(tx)(params, tx.init(params), grads)[0]["w"])
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


def test_with_multisteps_the_norm_is_that_of_the_scaled_mean(stepper: Any) -> None:
    inner = optax.chain(sj.guard(clip=1.0, loss_scale=4.0, exact_norms=True), optax.sgd(1.0))
    tx = optax.MultiSteps(inner, 2).gradient_transformation()
    params, grads = {"w": jnp.zeros(2)}, {"w": jnp.asarray([12.0, 16.0])}
    state = tx.init(params)
    for _ in range(2):
        params, state = stepper(tx)(params, state, grads)
    assert sj.metrics(state)["grad_norm"] == 5.0


def test_a_tree_without_parameters_has_no_norm() -> None:
    tx = optax.chain(sj.guard(exact_norms=True), optax.sgd(1.0))
    _, state = sj.step(tx, {}, tx.init({}), {})
    assert sj.metrics(state)["grad_norm"] == 0.0
