"""Settings and parameters that are not finite are told, each with a reason of its own."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import stablenum_jax
from stablenum import NonFiniteError, Reason
from tests.selection import only, slow_but_for

PARAMS = {"w": jnp.ones(3), "b": jnp.zeros(2)}
GRADS = {"w": jnp.full(3, 0.5), "b": jnp.ones(2)}


def _inject(**settings):
    return optax.inject_hyperparams(optax.adamw)(**{"learning_rate": 0.1, "weight_decay": 0.01} | settings)


FORMS = {
    "in a chain": lambda: optax.chain(stablenum_jax.guard(loss_scale=8.0), _inject()),
    "around": lambda: stablenum_jax.guard(_inject(), loss_scale=8.0),
    "under another": lambda: optax.chain(
        stablenum_jax.guard(loss_scale=8.0),
        optax.inject_hyperparams(lambda scale: optax.chain(_inject(), optax.scale(scale)))(scale=1.0),
    ),
}


def _with(opt_state, name, value):
    def put(path, leaf):
        return jnp.asarray(value, leaf.dtype) if jax.tree_util.keystr(path).endswith(f"[{name!r}]") else leaf

    return jax.tree_util.tree_map_with_path(put, opt_state)


SETTINGS = ["learning_rate", "weight_decay", "b1", "eps"]
SPOILT = [(form, name, bad) for bad in (math.nan, math.inf) for name in SETTINGS for form in FORMS]
# Each form, each kind of setting and each value; a setting is looked at in the same way in all forms.
SOME = [
    ("in a chain", "learning_rate", math.nan),
    ("around", "b1", math.inf),
    ("under another", "eps", math.nan),
]


@pytest.mark.parametrize(("form", "name", "bad"), slow_but_for(SOME, SPOILT))
def test_a_setting_that_is_not_finite_is_skipped(form, name, bad):
    tx = FORMS[form]()
    step = jax.jit(lambda params, state: stablenum_jax.step(tx, params, state, GRADS))
    params, state = step(PARAMS, tx.init(PARAMS))
    sound = next(
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if jax.tree_util.keystr(path).endswith(f"[{name!r}]")
    )
    after, state = step(params, _with(state, name, bad))
    last = stablenum_jax.metrics(state)
    assert (last["reason"], last["loss_scale"]) == (Reason.NONFINITE_SETTING, 8.0)
    assert all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(params)))
    moved, state = step(after, _with(state, name, sound))
    assert stablenum_jax.metrics(state)["applied"]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(moved))


def test_a_bound_may_be_infinite():
    inner = optax.inject_hyperparams(lambda bound: optax.chain(optax.clip(bound), optax.sgd(0.1)))
    tx = optax.chain(stablenum_jax.guard(), inner(bound=jnp.inf))
    _, state = stablenum_jax.step(tx, PARAMS, tx.init(PARAMS), GRADS)
    assert stablenum_jax.metrics(state)["applied"]


def _spoiling():
    """Optimizers that make NaN or inf of finite gradients, at a parameter whose gradient is zero, and those
    that do so at every parameter."""
    return {
        "adam, eps 0": (optax.adam(0.1, eps=0.0), "dead"),
        "adamw, eps 0": (optax.adamw(0.1, eps=0.0), "dead"),
        "rmsprop, eps 0": (optax.rmsprop(0.1, eps=0.0), "dead"),
        "an overflow": (optax.chain(optax.trace(0.9), optax.scale(-3e38)), "alive"),
        "a square that overflows": (
            optax.stateless(lambda g, p: jax.tree.map(lambda x: x * x * 3e38, g)),
            "alive",
        ),
    }


# Each form and each way to spoil a parameter at least once.
MADE_NAN = [
    ("in a chain", "adam, eps 0"),
    ("around", "an overflow"),
    ("with a loss scale", "a square that overflows"),
]


@pytest.mark.parametrize(
    ("form", "case"),
    slow_but_for(
        MADE_NAN, [(f, c) for f in ("in a chain", "around", "with a loss scale") for c in _spoiling()]
    ),
)
def test_the_step_after_names_the_parameter_that_the_optimizer_made_nan(form, case):
    inner, spoilt = _spoiling()[case]
    scale = 8.0 if form == "with a loss scale" else None
    tx = (
        stablenum_jax.guard(inner)
        if form == "around"
        else optax.chain(stablenum_jax.guard(loss_scale=scale), inner)
    )

    @jax.jit
    def step(params, state):
        def loss_fn(params):
            return 3.0 * params["alive"].sum() + (0.0 * params["dead"]).sum()

        loss, grads = stablenum_jax.value_and_grad(loss_fn, state)(params)
        if form == "around":
            updates, state = tx.update(grads, state, params, value=loss)
            return optax.apply_updates(params, updates), state
        return stablenum_jax.step(tx, params, state, grads, value=loss)

    params = {"alive": jnp.ones(2), "dead": jnp.ones(3)}
    state = tx.init(params)
    for _ in range(4):
        params, state = step(params, state)
    first, *rest = stablenum_jax.history(state)
    assert first["applied"]
    for row in rest:
        assert (row["reason"], row["worst"].name) == (Reason.NONFINITE_UPDATE, spoilt)
        assert row["loss_scale"] == (scale or 1.0)


def _guarded(**settings):
    tx = optax.chain(stablenum_jax.guard(**settings), optax.sgd(0.1))
    step = jax.jit(lambda params, state, grads: stablenum_jax.step(tx, params, state, grads))
    return step, tx.init(PARAMS)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sound_parameters_are_not_blamed(bad):
    step, state = _guarded()
    huge = {"w": jnp.asarray([3e38, -3e38, 3e38]), "b": jnp.full(2, -3e38)}
    spoilt = {**GRADS, "b": jnp.asarray([1.0, bad])}
    for i in range(3):
        step_grads = spoilt if i == 1 else jax.tree.map(jnp.zeros_like, GRADS)
        huge, state = step(huge, state, step_grads)
    reason = "NAN_GRADIENT" if math.isnan(bad) else "INF_GRADIENT"
    assert [row["reason"].name for row in stablenum_jax.history(state)] == ["OK", reason, "OK"]


def test_parameters_that_were_never_trained_are_none_of_the_optimizer():
    step, state = _guarded()
    bad = {**PARAMS, "b": jnp.full(2, jnp.nan)}
    for _ in range(2):
        _, state = step(bad, state, {**GRADS, "b": jnp.full(2, jnp.nan)})
    assert [row["reason"].name for row in stablenum_jax.history(state)] == ["NAN_GRADIENT"] * 2


MASKS = {"a": jnp.asarray([-jnp.inf, 0.0, 0.0]), "b": jnp.asarray([jnp.nan, 0.0, 0.0])}


def _grad_of_mask(kind, bad):
    """Return the gradient of a mask: zeros for one that is frozen, or that of softmax(x + mask)."""
    return {"none": None, "zero": jnp.zeros(3), "trained": jnp.where(bad, jnp.nan, jnp.ones(3))}[kind]


@pytest.mark.parametrize(
    ("kind", "loss_scale"),
    slow_but_for(
        [("none", "dynamic"), ("zero", None), ("trained", "dynamic")],
        [(kind, scale) for kind in ("none", "zero", "trained") for scale in (None, 8.0, "dynamic")],
    ),
)
def test_a_mask_is_never_blamed_and_the_scale_goes_down(kind, loss_scale):
    tx = optax.chain(stablenum_jax.guard(loss_scale=loss_scale), optax.sgd(0.1))
    params = {**MASKS, "w": jnp.ones(3)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, bad):
        mask = _grad_of_mask(kind, bad)
        grads = {"a": mask, "b": mask, "w": jnp.where(bad, jnp.inf, jnp.ones(3))}
        return stablenum_jax.step(tx, params, state, grads)

    scale = stablenum_jax.metrics(state)["loss_scale"]
    for i in range(6):
        params, state = step(params, state, i in (1, 4))
    reasons = [row["reason"] for row in stablenum_jax.history(state)]
    bad = Reason.NAN_GRADIENT if kind == "trained" else Reason.INF_GRADIENT
    assert reasons == [bad if i in (1, 4) else Reason.OK for i in range(6)]
    factor = 0.25 if loss_scale == "dynamic" else 1.0
    assert stablenum_jax.loss_scale(state) == scale * factor


def test_a_parameter_beside_a_mask_is_named():
    tx = optax.chain(stablenum_jax.guard(loss_scale="dynamic"), optax.adam(0.1, eps=0.0))
    params = {**MASKS, "dead": jnp.ones(3), "w": jnp.ones(3)}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = {"a": jnp.zeros(3), "b": jnp.zeros(3), "dead": 0.0 * params["dead"], "w": jnp.ones(3)}
        return stablenum_jax.step(tx, params, state, grads)

    for _ in range(3):
        params, state = step(params, state)
    rows = stablenum_jax.history(state)
    assert [row["reason"] for row in rows] == [Reason.OK, *[Reason.NONFINITE_UPDATE] * 2]
    assert {row["worst"].name for row in rows[1:]} == {"dead"}
    assert [row["loss_scale"] for row in rows] == [65536.0, 65536.0, 32768.0]  # its gradient is NaN


@pytest.mark.parametrize("by", [lambda init: init, jax.jit, jax.vmap])
def test_the_state_knows_the_masks_however_it_was_made(by):
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(0.1))
    params = jax.tree.map(lambda x: jnp.stack([x, jnp.ones(3)]), {**MASKS, "w": jnp.ones(3)})
    found = by(tx.init)(params)[0].bad_at_init
    assert found.dtype == bool
    each = [[True, True, False], [False, False, False]]
    assert found.tolist() == (each if by is jax.vmap else each[0])
    assert jax.eval_shape(tx.init, params)[0].bad_at_init.shape == (3,)


def test_a_halt_names_the_parameter_too():
    tx = optax.chain(stablenum_jax.guard(max_skips_in_a_row=2), optax.adam(0.1, eps=0.0))
    state, params = tx.init(PARAMS), PARAMS
    step = jax.jit(
        lambda params, state: stablenum_jax.step(tx, params, state, {**GRADS, "b": 0.0 * params["b"]})
    )
    for _ in range(5):
        params, state = step(params, state)
    with pytest.raises(NonFiniteError, match="First non-finite parameter: b") as caught:
        stablenum_jax.metrics(state)
    assert caught.value.metrics["reason"] is Reason.NONFINITE_UPDATE


def _until_three(count):
    return jnp.where(count >= 3, jnp.nan, 0.1)


# Constants and schedules inside of optimizers: nothing but the program of the update knows them.
INSIDE = {
    "sgd, lr nan": lambda: optax.sgd(math.nan),
    "sgd, lr inf": lambda: optax.sgd(math.inf),
    "sgd, momentum nan": lambda: optax.sgd(0.1, momentum=math.nan),
    "adam, b1 nan": lambda: optax.adam(0.1, b1=math.nan),
    "adam, eps nan": lambda: optax.adam(0.1, eps=math.nan),
    "adamw, weight decay inf": lambda: optax.adamw(0.1, weight_decay=math.inf),
    "lion, lr nan": lambda: optax.lion(math.nan),
    "rmsprop, lr nan": lambda: optax.rmsprop(math.nan),
    "radam, lr nan": lambda: optax.radam(math.nan),
    "adafactor, lr nan": lambda: optax.adafactor(math.nan),
    "lion, b1 nan": lambda: optax.lion(0.1, b1=math.nan),
    "clip by norm, nan": lambda: optax.chain(optax.clip_by_global_norm(math.nan), optax.sgd(0.1)),
    "AGC, nan": lambda: optax.chain(optax.adaptive_grad_clip(math.nan), optax.sgd(0.1)),
    "a part": lambda: optax.partition(
        {"good": optax.sgd(0.1), "bad": optax.sgd(math.nan)}, {"w": "good", "b": "bad"}
    ),
}
SCHEDULES = {name: getattr(optax, name) for name in ("sgd", "adam", "adamw", "lion", "rmsprop")}
LATER = {
    "table": lambda n: jnp.asarray([0.1, 0.1, 0.1, math.nan])[n],
    "select": lambda n: jnp.select([n < 3, n >= 3], [0.1, math.nan]),
    "interp": lambda n: jnp.interp(n, jnp.asarray([0.0, 3.0, 4.0]), jnp.asarray([0.1, 0.1, math.nan])),
}


def _trained(tx, steps, *, wrapper=False):
    guarded = stablenum_jax.guard(tx) if wrapper else optax.chain(stablenum_jax.guard(), tx)

    @jax.jit
    def step(params, state):
        if wrapper:
            updates, state = guarded.update(GRADS, state, params)
            return optax.apply_updates(params, updates), state
        return stablenum_jax.step(guarded, params, state, GRADS)

    params, state = PARAMS, guarded.init(PARAMS)
    seen = []
    for _ in range(steps):
        params, state = step(params, state)
        seen.append((params, stablenum_jax.metrics(state)["reason"]))
    return seen


# A factor, a moment, a decay in another program, a clip and a part of the parameters.
@pytest.mark.parametrize(
    "name",
    only({"sgd, lr nan", "adam, b1 nan", "adamw, weight decay inf", "clip by norm, nan", "a part"}, INSIDE),
)
def test_a_constant_inside_that_is_not_finite_is_skipped(name):
    for params, reason in _trained(INSIDE[name](), 2, wrapper=name.startswith("adam")):
        assert reason is Reason.NONFINITE_SETTING
        assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(PARAMS)))


@pytest.mark.parametrize("name", only({"sgd", "adamw"}, SCHEDULES))
def test_a_schedule_inside_is_skipped_from_the_step_at_which_it_is_not_finite(name):
    seen = _trained(SCHEDULES[name](_until_three), 5)
    assert [reason.name for _, reason in seen] == ["OK"] * 3 + ["NONFINITE_SETTING"] * 2
    assert all(map(np.array_equal, jax.tree.leaves(seen[2][0]), jax.tree.leaves(seen[4][0])))


@pytest.mark.parametrize("name", LATER)
def test_a_schedule_from_a_table_is_skipped_from_the_step_at_which_it_is_not_finite(name):
    seen = _trained(optax.sgd(LATER[name]), 5)
    assert [reason.name for _, reason in seen] == ["OK"] * 3 + ["NONFINITE_SETTING"] * 2


SOUND = {
    "a table with a NaN that is not reached": lambda: optax.sgd(
        lambda n: jnp.asarray([0.1] * 6 + [math.nan])[n]
    ),
    "a comparison with NaN": lambda: optax.sgd(lambda n: jnp.where(n > math.nan, math.nan, 0.1)),
    "a table of factors": lambda: optax.chain(
        optax.stateless(
            lambda g, _: jax.tree.map(lambda x: x * jnp.asarray([1.0] * x.size).reshape(x.shape), g)
        ),
        optax.sgd(0.1),
    ),
    "radam": lambda: optax.radam(0.1),  # the root of a negative number in the first steps
    "bounds of inf": lambda: optax.chain(
        optax.clip(math.inf), optax.clip_by_global_norm(math.inf), optax.sgd(0.1)
    ),
    "prodigy": optax.contrib.prodigy,
    "adafactor": lambda: optax.adafactor(0.1),
    "schedule-free": optax.contrib.schedule_free_adamw,
    "no warmup": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 4)),
    "a bad branch that is not taken": lambda: optax.sgd(lambda n: jnp.where(n >= 0, 0.1, math.nan)),
    "a bad branch of a cond": lambda: optax.sgd(
        lambda n: jax.lax.cond(n >= 0, lambda: 0.1, lambda: math.inf)
    ),
    "eps 0": lambda: optax.adam(0.1, eps=0.0),
}


# The optimizers are there for what they compute with; these are there for themselves.
@pytest.mark.parametrize(
    "name", only({*SOUND} - {"prodigy", "adafactor", "schedule-free", "no warmup"}, SOUND)
)
def test_sound_settings_inside_skip_nothing(name):
    assert [reason.name for _, reason in _trained(SOUND[name](), 5)] == ["OK"] * 5


def test_a_loss_that_the_optimizer_uses_is_no_setting():
    tx = optax.chain(stablenum_jax.guard(), optax.polyak_sgd())
    step = jax.jit(lambda state, loss: stablenum_jax.step(tx, PARAMS, state, GRADS, value=loss)[1])
    state = step(tx.init(PARAMS), jnp.nan)
    assert stablenum_jax.metrics(state)["reason"] is Reason.NONFINITE_LOSS


@pytest.mark.parametrize("of_params", only([P("d")], [P(), P("d")]))
def test_under_shard_map_a_skip_is_the_same_on_all_devices(of_params):
    tx = optax.chain(stablenum_jax.guard(), optax.adam(optax.constant_schedule(0.1)))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def step(params, state, grads):
        grads = jax.lax.pmean(grads, "d")
        return stablenum_jax.step(tx, params, state, grads)

    def of_state(path, leaf):
        return of_params if leaf.ndim and "mu" in str(path) else P()

    state = tx.init(PARAMS)
    specs = jax.tree_util.tree_map_with_path(of_state, state)
    run = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(of_params, specs, P("d")), out_specs=(of_params, specs))
    )
    params, state = run(PARAMS, state, GRADS)
    kept, state = run(params, state, {**GRADS, "b": jnp.full(2, jnp.nan)})
    assert all(map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(params)))
    assert stablenum_jax.metrics(state)["reason"] is Reason.NAN_GRADIENT
