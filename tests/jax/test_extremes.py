"""The largest element and the fraction of tiny ones, for loss-scale rules that need them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax as sj
import stablenum_jax._step.observe as observe
from stablenum.formats import SMALLEST_FLOAT16
from stablenum.reference.guarded import measure_extremes
from stablenum_jax._step.measure.elements import elements, largest_element
from tests.jax.helpers import make_params
from tests.selection import REPEATS

FLOAT32_MAX = float(np.finfo(np.float32).max)


def extremes(leaves: Any, bound: Any) -> tuple[jax.Array, jax.Array]:
    """The largest element, and the fraction of tiny ones."""
    found = elements(leaves, bound)
    return found.largest, found.tiny


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_extremes_equal_the_references(dtype: Any, mode: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 30)) * 10.0 ** rng.uniform(-9, 1, (40, 30))
    x[rng.uniform(size=x.shape) < 0.2] = 0
    x[0, :3] = [2.0**-24, -(2.0**-24), 1.01 * 2.0**-24]
    x = (x + 1j * x[::-1] if dtype == np.complex64 else x).astype(dtype)
    leaves = [x, None, np.zeros((0, 2), dtype), np.asarray(-1.5).astype(dtype)]
    call = functools.partial(extremes, bound=SMALLEST_FLOAT16)
    seen = (call if mode == "eager" else jax.jit(call))(
        [None if x is None else jnp.asarray(x) for x in leaves]
    )
    amax, tiny = measure_extremes(leaves)
    assert 0.01 < tiny < 0.9
    assert [float(value) for value in seen] == [float(amax), float(tiny)]
    assert float(largest_element([jnp.asarray(x)])) == float(measure_extremes([x])[0])


def test_no_elements_and_no_gradients() -> None:
    for leaves in ([], [None], [jnp.zeros((0,))], [jnp.zeros(3)]):
        assert [float(x) for x in extremes(leaves, SMALLEST_FLOAT16)] == [0.0, 0.0]
        assert float(largest_element(leaves)) == 0.0


def test_float64_saturates() -> None:
    with jax.enable_x64(True):
        leaves = [jnp.asarray([1e300, 1e-300, 1.0, 0.0])]
        amax, tiny = extremes(leaves, SMALLEST_FLOAT16)
        assert (float(amax), float(tiny)) == (FLOAT32_MAX, float(np.float32(1 / 3)))
        assert float(largest_element(leaves)) == FLOAT32_MAX
        assert amax.dtype == tiny.dtype == jnp.float32


@pytest.mark.parametrize("rule", [stablenum.LogMaxLossScale(), stablenum.UnderflowAwareLossScale()])
def test_over_a_mesh_axis_the_extremes_cover_all_shards(rule: Any) -> None:
    """The loss scale after a step is that of the whole gradient."""
    x = jnp.asarray([[0.0, 1e-9, 1.0], [0.0, 0.0, -7.0]])

    def scale(x: Any, axis_name: Any = None) -> Any:
        tx = sj.guard(optax.sgd(1.0), loss_scale=rule, axis_name=axis_name)
        return sj.loss_scale(tx.update([x], tx.init([x]), [x])[1])

    over_shards = jax.vmap(functools.partial(scale, axis_name="i"), axis_name="i")(x)
    assert over_shards.tolist() == [float(scale(x))] * 2
    assert float(scale(x)) != rule.init_scale


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(stablenum.LogMaxLossScale(), marks=REPEATS),
        stablenum.UnderflowAwareLossScale(init_scale=64.0, max_tiny=0.2),
    ],
)
def test_inside_multisteps_a_rule_sees_the_scaled_gradients(rule: Any, stepper: Any) -> None:
    """In ``MultiSteps``, gradients are already divided by the scale; the rule counts them as undivided."""
    grads = {"w": jnp.asarray([2.0**-31, 2.0**-29, 1e-3, 0.0])}
    params, scales = {"w": jnp.zeros(4)}, []
    for k in (1, 2):
        tx = optax.chain(sj.guard(loss_scale=rule), optax.sgd(1e-3))
        tx = tx if k == 1 else optax.MultiSteps(tx, k).gradient_transformation()
        opt_state, after = tx.init(params), params
        scales.append([])
        for i in range(4 * k):
            scaled = {"w": grads["w"] * sj.loss_scale(opt_state)}
            after, opt_state = stepper(tx)(after, opt_state, scaled)
            if i % k == k - 1:
                scales[-1].append(float(sj.loss_scale(opt_state)))
    assert scales[0] == scales[1]
    assert len(set(scales[0]) | {rule.init_scale}) > 1


@pytest.mark.parametrize("k", [1, 2])
def test_extremes_are_measured_once_and_only_if_a_rule_needs_them(k: int) -> None:
    """With such a rule, the lowered program has one more reduction for each of the three parameters.

    In ``MultiSteps``, only the guard inside measures them, and not the check of each micro-batch.
    """
    params, counts = make_params(), []
    for rule in ("dynamic", stablenum.UnderflowAwareLossScale()):
        tx = optax.chain(sj.guard(loss_scale=rule), optax.sgd(0.1))
        tx = tx if k == 1 else optax.MultiSteps(tx, k).gradient_transformation()
        step = jax.jit(functools.partial(sj.step, tx))
        counts.append(step.lower(params, tx.init(params), params).as_text().count(" reducer("))
    assert counts[1] == counts[0] + 3


def test_extremes_are_measured_only_for_a_rule_that_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of jit, each measurement costs a pass over the gradients."""
    seen: list[str] = []
    for name in ("elements", "largest_element"):
        honest = getattr(observe, name)
        monkeypatch.setattr(
            observe, name, lambda *a, name=name, honest=honest, **k: (seen.append(name), honest(*a, **k))[1]
        )
    params = {"w": jnp.ones(2)}
    for rule, expected in [
        (None, []),
        ("dynamic", []),
        (stablenum.LogMaxLossScale(), ["largest_element"]),
        (stablenum.UnderflowAwareLossScale(), ["elements"]),
    ]:
        seen.clear()
        tx = optax.chain(sj.guard(clip=1.0, loss_scale=rule), optax.sgd(0.1))
        sj.step(tx, params, tx.init(params), params)
        assert seen == expected
