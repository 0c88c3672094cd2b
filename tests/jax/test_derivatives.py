"""A guarded step can be differentiated: reverse mode, forward mode, differences and optax agree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax
from stablenum_jax.typing import GuardOptState
from tests.jax.helpers import run_on_four_devices
from tests.selection import only

STEPS = 5
# log of the learning rate, size of the first weights, weight of the second term of the loss
META = (-1.5, 0.8, 0.6)
DIRECTION = (0.7, 0.5, -0.4)

SPIKE = {"min_samples": 2, "window": 4, "threshold": 0.5, "min_spread": 0.0}
RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "global norm": {"clip": 0.5},
    "not clipped": {"clip": 100.0},
    "each tensor": {"clip": stablenum.ClipByNorm(0.2)},
    "value": {"clip": stablenum.ClipByValue(0.05)},
    "AGC": {"clip": stablenum.AdaptiveGradClip(clipping=0.2)},
    "AGC and global norm": {"clip": [stablenum.AdaptiveGradClip(clipping=0.4), 0.3]},
    "AutoClip": {"clip": stablenum.AutoClip(window=4, quantile=0.3)},
    "ZClip": {"clip": stablenum.ZClip(warmup_steps=2, z_threshold=0.1, max_norm=2.0)},
    "AdaGC": {"clip": stablenum.AdaGC(warmup_steps=2, clip_ratio=0.8)},
    "update RMS": {"clip": stablenum.ClipUpdateRMS(0.02, per_lr=False)},
    "update RMS by rate": {"clip": stablenum.ClipUpdateRMS(0.1)},
    "skipped spikes": {"clip": 0.5, "spike": stablenum.SpikeGuard(**SPIKE)},
    "clipped spikes": {"spike": stablenum.SpikeGuard(**SPIKE, action="clip")},
    "mean and sd": {
        "spike": stablenum.MeanStdSpikeGuard(
            **{name: x for name, x in SPIKE.items() if name != "min_spread"}, action="clip"
        )
    },
    "dynamic scale": {"clip": 0.5, "loss_scale": stablenum.DynamicLossScale(growth_interval=2)},
    "static scale": {"clip": stablenum.ClipByNorm(0.2), "loss_scale": 1024.0},
    "LogMax scale": {"clip": 0.5, "loss_scale": stablenum.LogMaxLossScale()},
    "underflow-aware scale": {"clip": 0.5, "loss_scale": stablenum.UnderflowAwareLossScale()},
    "exact norms": {"clip": 0.5, "exact_norms": True},
    "exact norms of tensors": {"clip": stablenum.ClipByNorm(0.2), "exact_norms": True},
    "halting": {"clip": 0.5, "max_skips_in_a_row": 3, "escalate": stablenum.EscalatePrecision()},
}
Transformation = optax.GradientTransformation


def first(size: Any) -> dict[str, Any]:
    """Weights of two formats; ``still`` has no gradient but 0."""
    w = np.random.default_rng(3).standard_normal((3, 4))
    return {"w": size * w, "b": (size * w[0]).astype(jnp.float32), "still": jnp.zeros(3)}


def loss(params: Any, batch: Any, weight: Any) -> Any:
    x = jnp.sin(batch @ params["w"] + params["b"])
    still = 0.0 * jnp.sum(params["still"] ** 2) if "still" in params else 0.0
    return jnp.mean((x - 0.3) ** 2) + weight * jnp.mean(x**4) + still


def batches() -> Any:
    """The fourth batch is a spike."""
    x = np.random.default_rng(4).standard_normal((STEPS, 6, 3))
    return jnp.asarray(x * np.asarray([1.0, 1.1, 0.9, 4.0, 1.2])[:, None, None])


def by_step(tx: Any, params: Any, state: Any, grads: Any, value: Any) -> Any:
    return stablenum_jax.step(tx, params, state, grads, value=value)


def by_update(tx: Any, params: Any, state: Any, grads: Any, value: Any) -> Any:
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, value=value)
    return optax.apply_updates(params, updates), state


def trained(
    make: Callable[[Any], Transformation], advance: Callable[..., Any] = by_step, *, still: bool = True
) -> Callable[..., Any]:
    """The loss after training, a function of the meta-parameters; ``bad`` is in the gradients of the third
    step, or, where it is 0, that step is left out. Without ``still``, every gradient is other than 0."""

    def final(meta: Any, bad: Any = None) -> Any:
        rate, size, weight = meta
        tx = make(jnp.exp(rate))
        params = {name: x for name, x in first(size).items() if still or name != "still"}

        def step(carry: Any, given: Any) -> Any:
            params, state = carry
            i, batch = given
            spoilt = i == 2
            value, grads = jax.value_and_grad(loss)(params, batch, weight)
            if any(isinstance(x, GuardOptState) for x in jax.tree.leaves(state, is_leaf=is_guard)):
                scale = stablenum_jax.loss_scale(state)
                grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
            if bad is not None:
                grads = {**grads, "w": jnp.where(spoilt & (bad != 0), bad, grads["w"])}
            after = advance(tx, params, state, grads, value)
            if bad is not None:
                left_out = spoilt & (bad == 0)
                after = jax.tree.map(lambda old, new: jnp.where(left_out, old, new), carry, after)
            return after, None

        given = jnp.arange(STEPS), batches()
        params, _ = jax.lax.scan(step, (params, tx.init(params)), given)[0]
        return loss(params, jnp.ones((2, 3)), 0.0)

    return final


def is_guard(node: object) -> bool:
    return isinstance(node, GuardOptState)


def guarded(rules: dict[str, Any], rate: Any) -> Any:
    return optax.chain(stablenum_jax.guard(**rules), optax.inject_hyperparams(optax.sgd)(rate, momentum=0.9))


def wrapped(rules: dict[str, Any], rate: Any) -> Any:
    return stablenum_jax.guard(optax.inject_hyperparams(optax.sgd)(rate, momentum=0.9), **rules)


def along(final: Callable[[Any], Any]) -> Any:
    """The value, and its slope along a direction by reverse and by forward mode, as one program."""
    direction = jnp.asarray(DIRECTION)

    def all_of_them(meta: Any) -> Any:
        value, forward = jax.jvp(final, (meta,), (direction,))
        return value, jax.grad(final)(meta) @ direction, forward

    return jax.jit(all_of_them)


def slope(final: Callable[[Any], Any]) -> float:
    """The slope by reverse mode alone, which is compiled in half the time."""
    return float(jax.jit(jax.grad(final))(jnp.asarray(META)) @ jnp.asarray(DIRECTION))


# A threshold that follows from earlier norms, a factor of the update and the rate, and norms with a
# derivative of their own. AGC, with norms of units, is compared with optax; the others are combinations.
SOME = ["ZClip", "update RMS by rate", "exact norms"]


@pytest.mark.parametrize("name", only(SOME, RULES))
def test_reverse_mode_is_forward_mode_and_the_slope(name: str) -> None:
    # Elements that come to their bound between the points bend the loss: some do within 2e-3.
    size = 5e-4 if name == "value" else 2e-3
    with jax.enable_x64():
        run = along(trained(functools.partial(guarded, RULES[name])))
        value, backward, forward = run(jnp.asarray(META))
        near = [jnp.asarray(META) + k * size * jnp.asarray(DIRECTION) for k in (-2, -1, 1, 2)]
        at = [float(run(meta)[0]) for meta in near]
    np.testing.assert_allclose(backward, forward, rtol=1e-5)
    # Central differences of the fourth order. Norms and the rate are float32, off by 6e-8, so that the value
    # is off by about as much of itself; the differences weigh that with 18 / 12 at the most.
    difference = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * size)
    rounding = 6e-8 * abs(float(value)) * 1.5 / size
    np.testing.assert_allclose(backward, difference, rtol=1e-3, atol=rounding)


PEERS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "global norm": (RULES["global norm"], lambda sgd: optax.chain(optax.clip_by_global_norm(0.5), sgd)),
    "value": (RULES["value"], lambda sgd: optax.chain(optax.clip(0.05), sgd)),
    "AGC": (RULES["AGC"], lambda sgd: optax.chain(optax.adaptive_grad_clip(0.2), sgd)),
    "update RMS": (RULES["update RMS"], lambda sgd: optax.chain(sgd, optax.clip_by_block_rms(0.02))),
}


@pytest.mark.parametrize("name", only(["AGC"], PEERS))
def test_the_derivative_is_that_of_optax(name: str) -> None:
    rules, peer = PEERS[name]
    # The derivative of optax's norm of zeros is NaN, and its clip by norm has no 1e-6 in the divisor.
    ours = slope(trained(functools.partial(guarded, rules), still=False))
    theirs = slope(trained(lambda rate: peer(optax.sgd(rate, momentum=0.9)), by_update, still=False))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


FORMS: dict[str, tuple[Any, Any]] = {
    "step": (guarded, by_step),
    "wrapper": (wrapped, by_update),
    "chain alone": (
        lambda rules, rate: optax.chain(stablenum_jax.guard(**rules), optax.sgd(rate)),
        by_update,
    ),
}


@pytest.mark.filterwarnings("ignore::stablenum_jax.NotATrueSkipWarning")
@pytest.mark.parametrize("bad", only([np.inf], [np.inf, np.nan]))
@pytest.mark.parametrize("form", only(["chain alone"], FORMS))
def test_the_derivative_through_a_skipped_step_is_that_of_the_others(form: str, bad: float) -> None:
    make, advance = FORMS[form]
    final = trained(functools.partial(make, {"clip": [stablenum.AdaGC(warmup_steps=2), 0.5]}), advance)
    meta, direction = jnp.asarray(META), jnp.asarray(DIRECTION)
    backward = jax.jit(jax.grad(final))
    without = backward(meta, 0.0) @ direction
    np.testing.assert_allclose(backward(meta, bad) @ direction, without, rtol=1e-5)
    if form == "step":
        _, forward = jax.jit(lambda x: jax.jvp(lambda x: final(x, bad), (x,), (direction,)))(meta)
        np.testing.assert_allclose(forward, without, rtol=1e-5)


def once(rules: dict[str, Any], grads: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What a step makes of the weights 1 and 2, with gradients that are a function of a number."""

    def after(x: Any) -> Any:
        tx = optax.chain(stablenum_jax.guard(**rules), optax.sgd(1.0))
        params = {"w": jnp.asarray([1.0, 2.0])}
        params, _ = stablenum_jax.step(tx, params, tx.init(params), {"w": grads(x)})
        return params["w"]

    return jax.jit(after)


@pytest.mark.parametrize("name", ["global norm", "AGC", "update RMS"])
def test_a_zero_gradient_is_not_clipped_and_so_is_its_derivative(name: str) -> None:
    found = jax.jacrev(once(RULES[name], lambda x: x * jnp.asarray([3.0, 4.0])))(0.0)
    np.testing.assert_array_equal(found, [-3.0, -4.0])


def test_a_derivative_of_second_order_is_that_of_optax() -> None:
    def curvature(tx: Any) -> Any:
        def final(x: Any) -> Any:
            params = {"w": jnp.asarray([1.0, 2.0])}
            grads = {"w": jnp.stack([x, 3.0 + x**2])}
            if tx is OPTAX:
                updates, _ = tx.update(grads, tx.init(params), params)
                return jnp.sum(optax.apply_updates(params, updates)["w"] ** 3)
            return jnp.sum(stablenum_jax.step(tx, params, tx.init(params), grads)[0]["w"] ** 3)

        return jax.jit(jax.grad(jax.grad(final)))(0.7)

    ours = optax.chain(stablenum_jax.guard(clip=1.0), optax.sgd(0.5))
    np.testing.assert_allclose(curvature(ours), curvature(OPTAX), rtol=1e-4)


@pytest.mark.parametrize("shape", only([(3,)], [(3,), (3, 2), ()]))
@pytest.mark.parametrize("name", only(["AGC", "static scale"], RULES))
def test_a_derivative_of_second_order_is_the_same_in_every_mode(name: str, shape: tuple[int, ...]) -> None:
    tx = guarded(RULES[name], 0.05)

    def final(x: Any) -> Any:
        params = {"w": jnp.full(shape, 0.5) * x}
        state = tx.init(params)
        grads = {"w": 2.0 * x * (params["w"] - 3.0 * x) * stablenum_jax.loss_scale(state)}
        return jnp.sum(stablenum_jax.step(tx, params, state, grads, value=x)[0]["w"] ** 2)

    slope = jax.grad(final)
    backward, forward = jax.jit(lambda x: (jax.grad(slope)(x), jax.jacfwd(slope)(x)))(1.3)
    np.testing.assert_allclose(backward, forward, rtol=1e-4)


OPTAX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5))


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_where_float32_does_not_hold_the_derivative_it_is_nan_and_never_wrong(size: float) -> None:
    shrinking = once({"clip": size / 8}, lambda x: size * jnp.stack([x, 3.0]))
    assert np.isnan(jax.jacrev(shrinking)(4.0)).any()
    assert np.isnan(jax.jacfwd(shrinking)(4.0)).any()


ON_A_MESH = """
import functools
import jax, jax.numpy as jnp, numpy as np, optax, stablenum, stablenum_jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from stablenum import AdaptiveGradClip, ClipByNorm

W, B = (np.random.default_rng(i).standard_normal(s) for i, s in enumerate([(8, 4), (4,)]))
specs = {"w": P("a", None), "b": P()}

def after(tx, meta, w, b):
    params = {"w": meta * w, "b": b}
    def step(carry, _):
        params, state = carry
        grads = {"w": jnp.sin(meta * params["w"]), "b": jnp.cos(meta + params["b"])}
        return stablenum_jax.step(tx, params, state, grads), None
    return jax.lax.scan(step, (params, tx.init(params)), length=2)[0][0]

def total(params):
    return jnp.sum(params["w"] ** 3) + jnp.sum(params["b"] ** 3)

def slopes(final):
    run = lambda meta: (jax.grad(final)(meta), jax.jvp(final, (meta,), (jnp.ones_like(meta),))[1])
    with jax.set_mesh(mesh):
        return np.asarray(jax.jit(run)(jax.device_put(0.8, NamedSharding(mesh, P()))))

def guarded(rules, **where):
    return optax.chain(stablenum_jax.guard(**rules, **where), optax.sgd(0.1))

w, b = W.astype(np.float32), B.astype(np.float32)
mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,))
placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((w, P("a", None)), (b, P()))]

def over_axes(rules):
    tx = guarded(rules, axis_name="a", specs=specs)
    def final(meta):
        run = jax.shard_map(
            lambda meta, w, b: after(tx, meta, w, b), mesh=mesh,
            in_specs=(P(), specs["w"], specs["b"]), out_specs=specs)
        return total(run(meta, *placed))
    return slopes(final)


def agree(**rules):
    alone = slopes(lambda meta: total(after(guarded(rules), meta, w, b)))
    assert np.isfinite(alone).all()
    explicit = slopes(lambda meta: total(after(guarded(rules), meta, *placed)))
    for found in (explicit, over_axes(rules)):
        np.testing.assert_allclose(found, alone[0], rtol=1e-4)

def refused(**rules):
    try:
        over_axes(rules)
    except TypeError as error:
        assert "exact_norms=False" in str(error), error
    else:
        raise AssertionError("not refused")
"""
ON_MESHES = [
    "agree(clip=0.5, loss_scale=4.0)",
    "agree(clip=[AdaptiveGradClip(clipping=0.1), ClipByNorm(0.3)])",
    "agree(clip=0.5, exact_norms=True)",
    "refused(clip=ClipByNorm(0.3), exact_norms=True)",
]


# The joint norm is what all rules take; the units and exact sums are differentiated in more of the same.
@pytest.mark.parametrize("rules", only([ON_MESHES[0], ON_MESHES[3]], ON_MESHES))
def test_on_a_mesh_it_is_the_derivative_of_one_device_or_refused(rules: str) -> None:
    run_on_four_devices(ON_A_MESH + rules)
