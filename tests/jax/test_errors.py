"""Every wrong use raises a clear exception and changes nothing."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from stablenum import GuardConfig
from tests.jax.helpers import every_mode, make_grads, make_params


@pytest.mark.parametrize("inner", [1.0, "adam", GuardConfig(), optax.adam, lambda g: g])
def test_inner_must_be_a_transformation(inner: Any) -> None:
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation"):
        stablenum_jax.guard(inner)


def test_config_must_be_a_config() -> None:
    with pytest.raises(TypeError, match="config must be a GuardConfig or None; got dict"):
        stablenum_jax.guard(None, {"clip": 1.0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"clip": -1.0}, ValueError, "clip must be a finite number above 0"),
        ({"clip": float("nan")}, ValueError, "clip must be"),
        ({"loss_scale": "huge"}, ValueError, "loss_scale must be"),
        ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite must be 'skip' or 'raise'"),
        ({"max_skips_in_a_row": 0}, ValueError, "max_skips_in_a_row must be"),
        ({"max_norm": 1.0}, TypeError, "unknown setting 'max_norm'"),
    ],
)
def test_wrong_settings(settings: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        stablenum_jax.guard(**settings)
    with pytest.raises(error, match=match):
        stablenum_jax.guard(optax.adam(1e-3), **settings)


def test_overrides_take_precedence_over_the_config() -> None:
    tx = stablenum_jax.guard(None, GuardConfig(clip=1.0, loss_scale=8.0), loss_scale=4.0)
    assert stablenum_jax.loss_scale(tx.init(jnp.ones(2))) == 4.0


@every_mode
def test_settings_must_not_be_traced(mode: str) -> None:
    factory = optax.inject_hyperparams(
        lambda learning_rate, max_norm: optax.chain(
            stablenum_jax.guard(clip=max_norm), optax.sgd(learning_rate)
        )
    )
    tx = factory(learning_rate=0.1, max_norm=1.0)
    init = tx.init if mode == "eager" else jax.jit(tx.init)
    with pytest.raises(TypeError, match=r"known before tracing.*inject_hyperparams.*static_args"):
        init(make_params())


@every_mode
def test_no_guard_in_the_optimizer(stepper: Any) -> None:
    params, tx = make_params(), optax.adam(1e-3)
    for use in (
        lambda: stepper(tx)(params, tx.init(params), make_grads(0)),
        lambda: stablenum_jax.metrics(tx.init(params)),
        lambda: stablenum_jax.loss_scale(tx.init(params)),
        lambda: stablenum_jax.value_and_grad(jnp.sum, tx.init(params)),
    ):
        with pytest.raises(ValueError, match=r"exactly one guard's state; got none. Put one guard"):
            use()


@every_mode
def test_two_guards_in_the_optimizer(stepper: Any) -> None:
    params = make_params()
    tx = optax.chain(stablenum_jax.guard(), stablenum_jax.guard(optax.adam(1e-3)))
    with pytest.raises(ValueError, match="exactly one guard's state; got 2"):
        stepper(tx)(params, tx.init(params), make_grads(0))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: stablenum_jax.chain(optax.adam(1e-3)), r"got 0 guard\(s\)"),
        (lambda: stablenum_jax.chain(stablenum_jax.guard(), stablenum_jax.guard()), r"got 2 guard\(s\)"),
        (
            lambda: stablenum_jax.chain(optax.adam(1e-3), stablenum_jax.guard()),
            r"in the transformations \[1\]",
        ),
        (lambda: stablenum_jax.guard(stablenum_jax.guard(optax.sgd(0.1))), r"without another guard"),
    ],
)
def test_chain_requires_exactly_one_guard_in_the_first_place(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make().init(make_params())


def test_chain_of_nothing_or_of_something_else() -> None:
    with pytest.raises(ValueError, match="at least one transformation"):
        stablenum_jax.chain()
    with pytest.raises(TypeError, match=r"transforms\[1\] must be an optax\.GradientTransformation"):
        stablenum_jax.chain(stablenum_jax.guard(), 0.1)  # type: ignore[arg-type]


@every_mode
def test_a_loss_that_is_not_a_scalar(stepper: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-3))
    params = make_params()
    with pytest.raises(ValueError, match=r"value must be the scalar loss of the step; got shape \(3,\)"):
        stepper(tx)(params, tx.init(params), make_grads(0), value=jnp.ones(3))


@every_mode
def test_a_state_of_another_optimizer(stepper: Any) -> None:
    params = make_params()
    state = stablenum_jax.guard().init(params)
    with pytest.raises(ValueError, match="tx never calls the guard"):
        stepper(optax.identity())(params, state, make_grads(0))


@pytest.mark.parametrize("inner", [optax.adamw(1e-3), optax.sgd(0.1, momentum=0.9)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_state_that_still_holds_that_of_the_clip(inner: Any, compiled: bool) -> None:
    params, grads = make_params(), make_grads(0)
    old = optax.chain(optax.clip_by_global_norm(1.0), inner).init(params)
    tx = stablenum_jax.guard(inner, clip=1.0)
    update = jax.jit(tx.update) if compiled else tx.update
    message = r"opt_state must be that of this optimizer, \(GuardOptState, .*; got .*EmptyState, \("
    with pytest.raises(ValueError, match=message):
        update(grads, (tx.init(params)[0], old), params)
    update(grads, (tx.init(params)[0], old[1]), params)


@every_mode
def test_a_transformation_that_changes_a_shape(stepper: Any) -> None:
    grow = optax.GradientTransformation(
        lambda params: jnp.zeros(1), lambda g, s, p=None: (g, jnp.concatenate([s, s]))
    )
    tx = optax.chain(stablenum_jax.guard(), grow)
    params = make_params()
    with pytest.raises(ValueError, match=r"opt_state\[1\] had shape \(1,\) and came back with shape \(2,\)"):
        stepper(tx)(params, tx.init(params), make_grads(0))


def test_public_names_are_sorted_and_exist() -> None:
    names = stablenum_jax.__all__
    assert names == sorted(names)
    assert all(hasattr(stablenum_jax, name) for name in names)


def test_a_wrong_call_changes_nothing() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-3))
    params = make_params()
    opt_state = tx.init(params)
    with pytest.raises(ValueError, match="value must be"):
        stablenum_jax.step(tx, params, opt_state, make_grads(0), value=jnp.ones(3))
    after, state_after = stablenum_jax.step(tx, params, opt_state, make_grads(0))
    assert stablenum_jax.metrics(state_after)["step"] == 0
    assert (after["out"] != params["out"]).any()


@every_mode
@pytest.mark.parametrize("value", [1j, jnp.ones(()) + 0j, "1.0", object(), np.asarray("x")])
def test_a_value_that_is_not_a_real_number(stepper: Any, value: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-3))
    params = make_params()
    with pytest.raises(TypeError, match="value must be the loss, a real number; got") as caught:
        stablenum_jax.step(tx, params, tx.init(params), make_grads(0), value=value)
    assert type(value).__name__ in str(caught.value) or "dtype complex64. Take its real part" in str(
        caught.value
    )
    wrapped = stablenum_jax.guard(optax.adam(1e-3))
    with pytest.raises(TypeError, match="value must be the loss"):
        wrapped.update(make_grads(0), wrapped.init(params), params, value=value)


@every_mode
@pytest.mark.parametrize("form", [jnp.int32, jnp.bool_, jnp.complex64])
def test_gradients_of_another_kind_than_the_parameters(stepper: Any, form: Any) -> None:
    tx = optax.chain(stablenum_jax.guard(clip=1.0), optax.adam(1e-3))
    params = make_params()
    grads = jax.tree.map(lambda g: g.astype(form), make_grads(0))
    message = rf"grads\[.*\] must hold floating-point numbers, .* float32 .*; got {jnp.dtype(form)}\. Pass"
    with pytest.raises(TypeError, match=message):
        stepper(tx)(params, tx.init(params), grads)


def test_gradients_that_jax_makes_of_other_kinds_are_accepted() -> None:
    params = {"n": jnp.arange(2), "w": jnp.ones(2), "z": jnp.ones(2) + 1j}
    grads = jax.grad(lambda p: jnp.sum(p["w"]) + jnp.sum(jnp.abs(p["z"])), allow_int=True)(params)
    assert grads["n"].dtype == jax.dtypes.float0
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    grads = {"n": None, **{k: v for k, v in grads.items() if k != "n"}}
    after, _ = stablenum_jax.step(tx, params, tx.init(params), grads)
    assert (after["w"] < 1).all()
    assert (after["n"] == params["n"]).all()


@every_mode
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: None, "grads must be a tree like params"),
        (lambda g: 3.0, "grads must be a tree like params"),
        (lambda g: list(g.values()), "grads must be a tree like params"),
        (lambda g: {}, "grads must be a tree like params"),
        (lambda g: {**g, "more": jnp.ones(2)}, "grads must be a tree like params.*Nothing was changed"),
        (lambda g: {**g, "out": jnp.ones((7, 7))}, r"grads\['out'\] must have its parameter's shape"),
        (lambda g: {**g, "out": jnp.ones(())}, r"grads\['out'\] must have its parameter's shape"),
    ],
)
def test_gradients_that_do_not_fit_the_parameters(stepper: Any, change: Any, message: str) -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-3))
    params = make_params()
    with pytest.raises(ValueError, match=message):
        stepper(tx)(params, tx.init(params), change(make_grads(0)))


def test_a_step_with_other_arguments_that_are_wrong() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-3))
    params = {"w": jnp.ones(2)}
    for wrong in (3, None, optax.adam):
        with pytest.raises(TypeError, match=r"tx must be an optax\.GradientTransformation"):
            stablenum_jax.step(wrong, params, tx.init(params), params)
    with pytest.raises(TypeError, match="params must be the parameters; got NoneType"):
        stablenum_jax.step(tx, None, tx.init(params), params)
    other = tx.init({"w": jnp.ones(3)})
    with pytest.raises(
        ValueError, match=r"opt_state must be the state of tx for these params.*\(2,\).*\(3,\)"
    ):
        stablenum_jax.step(tx, params, other, params)


@pytest.mark.parametrize("name", [3, "", ["data"], math.nan, ("data", 3), True])
def test_an_axis_name_that_names_no_axis(name: Any) -> None:
    with pytest.raises(TypeError, match="axis_name must be the name of an axis"):
        stablenum_jax.guard(axis_name=name)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (3, "loss must be of a floating-point format; got int32"),
        (jnp.arange(1)[0], "loss must be of a floating-point format; got int32"),
        (1j, "loss must be the loss, a real number; got dtype complex64"),
        (None, "loss must be the loss, a real number; got NoneType"),
        ("x", "loss must be the loss, a real number; got str"),
    ],
)
def test_scale_loss_of_something_that_is_not_a_loss(loss: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        stablenum_jax.scale_loss(loss, stablenum_jax.guard(loss_scale=4.0).init(jnp.ones(2)))


@pytest.mark.parametrize(
    ("fun", "has_aux", "message"),
    [
        (3, False, "fun must be a function that returns the loss; got int"),
        (jnp.sum, "yes", "has_aux must be True or False; got str"),
        (lambda w: w, False, r"the loss that fun returns must be .* scalar; got float32 of shape \(2,\)"),
        (lambda w: None, False, "the loss that fun returns must be .*; got NoneType"),
        (lambda w: (jnp.sum(w), w), False, "got tuple. Give has_aux=True if fun returns"),
        (lambda w: jnp.sum(w) + 0j, False, "the loss that fun returns must be .*; got complex64"),
        (jnp.sum, True, r"the result of fun with has_aux=True must be \(loss, aux\)"),
    ],
)
def test_value_and_grad_of_something_without_a_loss(fun: Any, has_aux: Any, message: str) -> None:
    opt_state = stablenum_jax.guard(loss_scale=4.0).init(jnp.ones(2))
    with pytest.raises(TypeError, match=message):
        stablenum_jax.value_and_grad(fun, opt_state, has_aux=has_aux)(jnp.ones(2))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 0.0, True, "2", 1j, [1.0], jnp.ones(2)])
def test_a_replay_with_a_wrong_loss_scale(scale: Any) -> None:
    with pytest.raises(
        ValueError, match=r"loss_scale must be a finite number above 0; got .* or leave it out"
    ):
        stablenum_jax.replay(jnp.sum, jnp.ones(2), loss_scale=scale)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"argnums": "0"},
            ValueError,
            "argnums must be the number of a positional argument, or several; got '0'",
        ),
        ({"argnums": 1.0}, ValueError, "argnums must be the number .*; got 1.0"),
        ({"argnums": True}, ValueError, "argnums must be the number .*; got True"),
        ({"argnums": ()}, ValueError, r"argnums must be the number .*; got \(\)"),
        ({"argnums": (0, "x")}, ValueError, "argnums must be the number"),
        ({"argnums": 4}, ValueError, "argnums must name positional arguments, here 0 to 0; got 4"),
        ({"has_aux": "x"}, TypeError, "has_aux must be True or False; got str"),
        ({"gradients": 1}, TypeError, "gradients must be True or False; got int"),
        ({"known_bad": "x"}, TypeError, "known_bad must be True or False; got str"),
        ({"opt_state": 3}, TypeError, "opt_state must be the state of an optax transformation; got int"),
        ({"opt_state": optax.adam(0.1)}, TypeError, "opt_state must be the state .* Pass what tx.init or"),
    ],
)
def test_a_replay_with_wrong_options(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stablenum_jax.replay(jnp.sum, jnp.ones(2), **options)


@pytest.mark.parametrize("fun", [3, None, jnp.ones(2)])
def test_a_replay_of_something_that_is_not_a_function(fun: Any) -> None:
    with pytest.raises(TypeError, match="fun must be a function that runs the step; got"):
        stablenum_jax.replay(fun, jnp.ones(2))


WEIGHT = {"w": jnp.ones(2)}
STATE = optax.adam(0.1).init(WEIGHT)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((5, 5), {}, TypeError, "opt_state must be the state of an optax transformation; got int"),
        ((optax.adam(0.1), WEIGHT), {}, TypeError, r"opt_state must be .* Pass what tx\.init or tx\.update"),
        ((WEIGHT, STATE), {}, ValueError, "opt_state must come before params.* Swap the two"),
        (
            (STATE, {"w": jnp.ones(3)}),
            {},
            ValueError,
            r"whose moment of 'w' has shape \(2,\); got shape \(3,\)",
        ),
        ((STATE, WEIGHT), {"learning_rate": math.nan}, ValueError, "learning_rate must be a finite number"),
        (
            (STATE, WEIGHT),
            {"learning_rate": -1.0},
            ValueError,
            "learning_rate must be .* at least 0; got -1.0",
        ),
        ((STATE, WEIGHT), {"learning_rate": "x"}, ValueError, "learning_rate must be .*; got 'x'"),
        (
            (STATE, WEIGHT),
            {"b1": math.nan},
            ValueError,
            "b1 must be a finite number at least 0 and at most 1",
        ),
        (
            (STATE, WEIGHT),
            {"b2": 2},
            ValueError,
            "b2 must be a finite number at least 0 and at most 1; got 2",
        ),
        ((STATE, WEIGHT), {"eps": -1e-8}, ValueError, "eps must be a finite number at least 0; got -1e-08"),
        ((STATE, WEIGHT), {"grads": 5}, ValueError, "grads must be a tree like params, or None"),
        ((STATE, WEIGHT), {"updates": {}}, ValueError, "updates must be a tree like params, or None"),
        ((STATE, WEIGHT), {"grads": {"w": jnp.arange(2)}}, TypeError, "grads must hold .*; 'w' is int32"),
    ],
)
def test_an_audit_of_wrong_arguments(arguments: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        stablenum_jax.audit(*arguments, **options)


@pytest.mark.parametrize("state", [5, "x", optax.adam(0.1)])
def test_a_repair_of_something_that_is_not_a_state(state: Any) -> None:
    with pytest.raises(TypeError, match="opt_state must be the state of an optax transformation"):
        stablenum_jax.repair(state, stablenum_jax.audit(STATE, WEIGHT))


@pytest.mark.parametrize("inner", [3, None, optax.adam, GuardConfig()])
def test_master_weights_of_something_that_is_not_a_transformation(inner: Any) -> None:
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation"):
        stablenum_jax.master_weights(inner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": jnp.ones((2, 3), jnp.int32)}, "x must be an array of a floating-point dtype; got int32"),
        ({"w": jnp.ones((3, 4)) + 0j}, "w must be an array of a floating-point dtype; got complex64"),
        ({"x": [[1.0, 2.0, 3.0]]}, "x must be an array of a floating-point dtype; got list"),
        ({"state": None}, r"state must be what init_fp8\(\) returned, .*; got NoneType"),
        ({"native": "no"}, "native must be True or False; got str"),
    ],
)
def test_a_product_in_8_bits_of_wrong_arguments(change: Any, message: str) -> None:
    good = {"x": jnp.ones((2, 3)), "w": jnp.ones((3, 4)), "state": stablenum_jax.init_fp8()}
    with pytest.raises(TypeError, match=message):
        stablenum_jax.fp8_dot(**{**good, **change})


@pytest.mark.parametrize(
    ("fun", "options", "message"),
    [
        (3, {}, "fun must be a function .*; got int"),
        (jnp.sum, {"has_aux": 1}, "has_aux must be True or False; got int"),
        (jnp.sum, {"optimizer": 3}, r"optimizer must be an optax\.GradientTransformation"),
        (jnp.sum, {"opt_state": 3}, "opt_state must be the state of an optax transformation"),
        (jnp.sum, {"formats": 3}, "formats must be a sequence of names"),
    ],
)
def test_a_range_report_of_wrong_arguments(fun: Any, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        stablenum_jax.range_report(fun, jnp.ones(2), **options)


@pytest.mark.parametrize("argnums", ["x", 1.0, True, (), (0, "x"), 1, -2])
def test_value_and_grad_of_arguments_that_do_not_exist(argnums: Any) -> None:
    opt_state = stablenum_jax.guard().init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"argnums must (be the number|name positional arguments).*; got"):
        stablenum_jax.value_and_grad(jnp.sum, opt_state, argnums=argnums)(jnp.ones(2))


@every_mode
@pytest.mark.parametrize("name", ["loss", "vlaue", "loss_value"])
@pytest.mark.parametrize("form", ["step", "chain"])
def test_a_loss_under_another_name(stepper: Any, name: str, form: str, mode: str) -> None:
    params = make_params()
    tx = stablenum_jax.chain(stablenum_jax.guard(), optax.adam(1e-3))
    opt_state = tx.init(params)

    def act(params: Any, opt_state: Any) -> Any:
        given = {name: jnp.asarray(2.0)}
        if form == "step":
            return stablenum_jax.step(tx, params, opt_state, make_grads(0), **given)
        return tx.update(make_grads(0), opt_state, params, **given)

    with pytest.raises(
        TypeError, match=rf"{name} must be .*; got one that.* write value= in place of {name}="
    ):
        (jax.jit(act) if mode == "jit" else act)(params, opt_state)


def test_arguments_that_the_optimizer_uses_or_that_are_no_loss() -> None:
    def scaled(updates: Any, state: Any, params: Any = None, *, factor: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda g: g * factor, updates), state

    by_factor = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), scaled)
    tx = optax.chain(stablenum_jax.guard(), by_factor)
    params = {"w": jnp.ones(2)}
    more = {"epoch": 3, "name": "x", "mask": jnp.ones(3), "flag": True}
    after, _ = stablenum_jax.step(tx, params, tx.init(params), params, factor=0.5, **more)
    np.testing.assert_array_equal(after["w"], 1.5)
    stablenum_jax.step(tx, params, tx.init(params), params, factor=0.5, value=1.0, temperature=2.0)


NARROW = {"v": jnp.ones(3, jnp.bfloat16), "w": jnp.ones((2, 3), jnp.bfloat16)}
KEEPERS = {
    "kahan": stablenum_jax.kahan,
    "master_weights": lambda: stablenum_jax.master_weights(optax.adam(0.1)),
    "stochastic_rounding": stablenum_jax.stochastic_rounding,
}


@pytest.mark.parametrize("name", KEEPERS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params": None}, "params must be given to the update of"),
        ({"updates": {"w": NARROW["w"]}}, "updates must be a tree like params, .*; got"),
        ({"updates": list(NARROW.values())}, "updates must be a tree like params"),
        (
            {"updates": {**NARROW, "v": jnp.ones(4)}},
            r"updates\['v'\] must be of its parameter's shape \(3,\); got",
        ),
        ({"updates": {**NARROW, "v": jnp.ones(3, int)}}, r"updates\['v'\] must hold floating-point numbers"),
        ({"state": 5}, "state must be a .*State, as init.*; got int"),
        ({"state": None}, "state must be a .*State, as init.*; got NoneType"),
        ({"state": optax.adam(0.1).init(NARROW)}, "state must be a .*State, as init.*; got tuple"),
    ],
)
def test_an_update_for_16_bit_parameters_with_wrong_arguments(name: str, change: Any, message: str) -> None:
    tx = KEEPERS[name]()
    given = {"updates": NARROW, "state": tx.init(NARROW), "params": NARROW} | change
    with pytest.raises((TypeError, ValueError), match=message):
        tx.update(given["updates"], given["state"], given["params"])


@pytest.mark.parametrize("name", ["kahan", "master_weights"])
@pytest.mark.parametrize(
    "other",
    [{"u": NARROW["v"], "w": NARROW["w"]}, {"w": NARROW["w"]}, {**NARROW, "v": jnp.ones(4, jnp.bfloat16)}],
)
def test_an_update_of_other_parameters_than_the_state_was_made_for(name: str, other: Any) -> None:
    tx = KEEPERS[name]()
    with pytest.raises(
        ValueError, match=r"state\.(compensation|master).* must be .*; got .*Make it with init"
    ):
        tx.update(other, tx.init(NARROW), other)


def test_reading_with_wrong_arguments() -> None:
    opt_state = stablenum_jax.guard().init(NARROW)
    with pytest.raises(TypeError, match=r"raise_if_halted must be True or False; got str"):
        stablenum_jax.metrics(opt_state, raise_if_halted="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"new must be a tree like old, .*; got"):
        stablenum_jax.unless_skipped(opt_state, {"a": 1}, {"b": 1})
    for wrong in (5, None, "x", optax.adam(0.1), NARROW):
        for read in (
            stablenum_jax.metrics,
            stablenum_jax.history,
            stablenum_jax.loss_scale,
            stablenum_jax.clear_halt,
        ):
            with pytest.raises(ValueError, match="opt_state must hold exactly one guard's state; got none"):
                read(wrong)


@pytest.mark.parametrize("how", ["eager", "jit", "plain update", "another mesh axis"])
def test_an_axis_that_is_not_bound(how: str) -> None:
    tx = stablenum_jax.guard(optax.sgd(0.1), axis_name="data", clip=1.0)
    params = {"w": jnp.ones(2)}
    run: Any = functools.partial(stablenum_jax.step, tx)
    if how == "plain update":
        run = lambda p, s, g: tx.update(g, s, p)  # noqa: E731
    elif how == "jit":
        run = jax.jit(run)
    elif how == "another mesh axis":
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    with pytest.raises(
        ValueError, match=r"axis_name must name axes that shard_map or pmap binds.*got 'data'"
    ):
        run(params, tx.init(params), params)


def test_an_axis_that_is_named_twice() -> None:
    with pytest.raises(ValueError, match=r"axis_name must name each axis once; got \('x', 'x'\)"):
        stablenum_jax.guard(axis_name=("x", "x"))


def test_more_devices_than_a_record_tells_apart() -> None:
    tx = stablenum_jax.guard(optax.sgd(0.1), axis_name="data")
    params = {"w": jnp.ones(2)}
    many = jax.ShapeDtypeStruct((8192, 2), jnp.float32)
    update = lambda g: tx.update({"w": g}, tx.init(params), params)[0]  # noqa: E731
    with pytest.raises(ValueError, match="axis_name must span at most 8191 devices; got 'data', 8192"):
        jax.eval_shape(jax.vmap(update, axis_name="data"), many)
