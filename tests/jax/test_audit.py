"""The audit of optax states: moments are found wherever they are, and a repair changes only bad elements."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum_jax
from stablenum.diagnosis import Cause
from stablenum_jax._diagnosis.audit import audit, repair, state_problems

NUMBERS = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}


def parameters(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Three parameters in a nested tree."""
    rng = np.random.default_rng(0)
    shapes = {"a": (4, 3), "b": (7,), "c": {"d": (2, 2, 2)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def gradients(params: Any, seed: int) -> Any:
    """Seeded normal gradients."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


def trained(tx: Any, params: Any | None = None, steps: int = 8) -> tuple[Any, Any, Any, Any]:
    """State, parameters, last gradients and last updates after some steps."""
    params = parameters() if params is None else params
    state, grads, updates = tx.init(params), None, None
    for i in range(steps):
        grads = gradients(params, i)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return state, params, grads, updates


def by_name(report: Any) -> dict[str, Any]:
    """Name -> row."""
    return {row.name: row for row in report.rows}


def poison(state: Any, field: str, value: float, parameter: str = "b") -> Any:
    """Set one element of a field, wherever it is in the state."""

    def put(path: Any, leaf: Any) -> Any:
        if f".{field}" in (shown := jax.tree_util.keystr(path)) and f"'{parameter}'" in shown:
            return leaf.reshape(-1).at[2].set(value).reshape(leaf.shape)
        return leaf

    return jax.tree_util.tree_map_with_path(put, state)


LABELS = {"a": "x", "b": "y", "c": {"d": "y"}}
WRAPPED: dict[str, Any] = {
    "adam": optax.adam(1e-2),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2), optax.scale(1.0)),
    "guard in a chain": optax.chain(stablenum_jax.guard(), optax.adam(1e-2)),
    "guard around": stablenum_jax.guard(optax.adam(1e-2)),
    "masked": optax.masked(optax.adam(1e-2), {"a": False, "b": True, "c": {"d": True}}),
    "partition": optax.partition({"x": optax.sgd(0.1), "y": optax.adam(1e-2)}, LABELS),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "several steps": optax.MultiSteps(optax.adam(1e-2), 2),
    "if finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "all at once": optax.MultiSteps(
        optax.partition(
            {"x": optax.sgd(0.1), "y": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)}, LABELS
        ),
        2,
    ),
}


@pytest.mark.filterwarnings("ignore::stablenum_jax.NotATrueSkipWarning")
@pytest.mark.parametrize("kind", list(WRAPPED))
def test_moments_are_found_in_every_wrapper_and_repaired_there(kind: str) -> None:
    state, params, grads, _ = trained(WRAPPED[kind], steps=2)
    report = audit(state, params, grads, **NUMBERS)
    assert report.ok, str(report)
    row = by_name(report)["b"]
    assert (row.measured.second_inf, row.vanished, row.below_eps) == (0, 0.0, 0.0)
    assert row.measured.gradient_ratio is not None
    assert row.eps_lost is False
    bad = poison(state, "nu", math.inf)
    report = audit(bad, params)
    assert report.poisoned == {"b": 1}
    assert state_problems(bad, params)[0].startswith("b: state of 1 of 7 elements is poisoned")
    mended = repair(bad, report)
    assert jax.tree.structure(mended) == jax.tree.structure(bad)
    assert audit(mended, params).poisoned == {}
    expected = poison(poison(state, "nu", 0.0), "mu", 0.0)
    assert _bits(mended) == _bits(expected)
    assert _bits(bad) == _bits(poison(state, "nu", math.inf))  # the argument is unchanged


def _bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


FIELDS = {
    "adam": (optax.adam(1e-2), ("mu", "nu")),
    "amsgrad": (optax.amsgrad(1e-2), ("mu", "nu", "nu_max")),
    "adabelief": (optax.adabelief(1e-2), ("mu", "nu")),
    "rmsprop": (optax.rmsprop(1e-2, momentum=0.9), ("nu", "trace")),
    "rmsprop, centred": (optax.rmsprop(1e-2, centered=True), ("mu", "nu")),
    "adagrad": (optax.adagrad(1e-2), ("sum_of_squares",)),
    "adadelta": (optax.adadelta(1.0), ("e_g", "e_x")),
    "sgd": (optax.sgd(1e-2, momentum=0.9), ("trace",)),
    "lion": (optax.lion(1e-3), ("mu",)),
    "adan": (optax.adan(1e-2), ("m", "v", "n", "g")),
}


@pytest.mark.parametrize("kind", list(FIELDS))
def test_every_moment_of_every_optimizer(kind: str) -> None:
    tx, fields = FIELDS[kind]
    state, params, _, _ = trained(tx, steps=2)
    assert audit(state, params).ok
    assert set(by_name(audit(state, params))["b"].state_dtypes) == set(fields)
    for field in fields:
        report = audit(bad := poison(state, field, math.nan), params)
        assert report.poisoned == {"b": 1}
        mended = repair(bad, report)
        for other in fields:
            state_of_other = poison(mended, other, 0.0)
            assert _bits(state_of_other) == _bits(mended)
        updates, _ = tx.update(gradients(params, 99), mended, params)
        assert all(bool(jnp.isfinite(u).all()) for u in jax.tree.leaves(updates))


def test_the_first_update_after_a_late_repair_is_three_learning_rates() -> None:
    tx = optax.adam(0.01)
    params = {"w": jnp.zeros(2)}
    state = tx.init(params)
    late = state[0]._replace(
        count=jnp.asarray(100_000, jnp.int32),
        mu={"w": jnp.ones(2)},
        nu={"w": jnp.asarray([1.0, jnp.inf])},
    )
    mended = repair((late, *state[1:]), audit((late, *state[1:]), params))
    updates, _ = tx.update({"w": jnp.ones(2)}, mended, params)
    np.testing.assert_allclose(updates["w"], [-0.01, -0.01 * 0.1 / math.sqrt(0.001)], rtol=1e-3)


def test_given_and_computed_updates_agree() -> None:
    state, params, grads, updates = trained(optax.adam(1e-2))
    given = by_name(audit(state, params, grads, updates))
    worked = by_name(audit(state, params, grads, learning_rate=1e-2, **NUMBERS))
    for name, leaf in {"a": updates["a"], "b": updates["b"], "c.d": updates["c"]["d"]}.items():
        rms = float(np.sqrt(np.mean(np.asarray(leaf, np.float64) ** 2)))
        assert given[name].update_rms == pytest.approx(rms, rel=1e-12)
        assert worked[name].update_rms == pytest.approx(rms, rel=1e-5)


def test_statistics_of_the_state_against_float64() -> None:
    state, params, grads, updates = trained(optax.adam(1e-2, eps=0.5))
    found = by_name(audit(state, params, grads, updates, b2=0.999, eps=0.5))["a"]
    v = np.asarray(state[0].nu["a"], np.float64) / (1 - 0.999**8)
    g, w, dw = (np.asarray(tree["a"], np.float64) for tree in (grads, params, updates))
    assert found.below_eps == np.mean(np.sqrt(v) < 0.5)
    ratio = np.sqrt(np.mean(g**2 / np.maximum(v, 0.25)))
    assert found.measured.gradient_ratio == pytest.approx(ratio, rel=1e-12)
    assert found.measured.update_relative == pytest.approx(np.abs(dw / w).max(), rel=1e-12)
    assert found.measured.parameter_rms == pytest.approx(np.sqrt(np.mean(w**2)), rel=1e-12)


def test_values_missing_from_the_state_are_none() -> None:
    state, params, grads, _ = trained(optax.adam(1e-2))
    report = audit(state, params, grads)
    row = report.rows[0]
    assert row.update_rms is None
    assert row.below_eps is None
    assert row.eps_lost is None
    assert row.measured.gradient_ratio is None
    assert any("b2" in note for note in report.notes)


def test_injected_hyperparameters_are_read_and_adamax_is_not_mistaken_for_adam() -> None:
    state, params, grads, _ = trained(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2, b2=0.9))
    row = audit(state, params, grads).rows[0]
    assert row.law.beta2 == pytest.approx(0.9)
    assert row.law.eps == pytest.approx(1e-8)
    assert row.measured.gradient_ratio is not None
    state, params, grads, _ = trained(optax.inject_hyperparams(optax.adamax)(learning_rate=1e-2))
    row = audit(state, params, grads).rows[0]
    assert row.law.eps is None
    assert row.measured.gradient_ratio is None


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_states(dtype: Any) -> None:
    state, params, grads, updates = trained(optax.adam(1e-4), parameters(dtype))
    report = audit(state, params, grads, updates, **NUMBERS)
    causes = {risk.cause for risk in report.risks}
    row = report.rows[0]
    if dtype == jnp.float16:
        assert row.eps_lost
        assert Cause.OPTIMIZER_STATE in causes
        assert "eps=1e-08 is 0 in float16" in report.problems()[0]
    else:
        assert not row.eps_lost
        assert causes == {Cause.STALL, Cause.STALE_SECOND_MOMENT}
    b = by_name(report)["b"]
    same = np.asarray(params["b"] + updates["b"]) == np.asarray(params["b"])
    moved = np.asarray(updates["b"]) != 0
    assert b.stalled == same[moved].mean()


def test_float16_and_a_zero_gradient() -> None:
    """The audit reports in advance that the next step divides 0 by 0."""
    tx = optax.adam(1e-2)
    params = {"w": jnp.ones(3, jnp.float16)}
    state = tx.init(params)
    updates, state = tx.update({"w": jnp.asarray([1.0, 1.0, 0.0], jnp.float16)}, state, params)
    assert bool(jnp.isnan(updates["w"][2]))
    report = audit(state, params, learning_rate=1e-2, **NUMBERS)
    assert report.rows[0].measured.update_bad == 1
    given = audit(state, params, updates=updates)
    assert given.rows[0].measured.update_bad == 1
    assert report.risks[0].cause is given.risks[0].cause is Cause.OPTIMIZER_STATE


def test_flax_train_state_and_nnx_optimizer() -> None:
    from flax import nnx
    from flax.training import train_state

    params = parameters()
    whole = train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))
    whole = whole.apply_gradients(grads=gradients(params, 0))
    assert by_name(audit(whole, whole.params))["b"].vanished == 0.0
    bad = poison(whole, "nu", -1.0)
    report = audit(bad, bad.params)
    assert report.poisoned == {"b": 1}
    assert _bits(repair(bad, report)) == _bits(poison(poison(whole, "nu", 0.0), "mu", 0.0))

    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    weights = nnx.state(model, nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, weights))
    assert {row.name for row in audit(optimizer, nnx.state(model, nnx.Param)).rows} == {"kernel", "bias"}
    assert audit(optimizer, nnx.state(model, nnx.Param)).rows[0].vanished == 0.0
    opt_state = optimizer.opt_state
    assert audit(opt_state, weights).rows[0].vanished == 0.0
    spoilt = jax.tree.map(lambda x: x.at[0].set(jnp.nan) if x.shape == (3,) else x, opt_state)
    report = audit(spoilt, weights)
    assert report.poisoned == {"bias": 1}
    assert audit(repair(spoilt, report), weights).ok


def test_equinox_modules() -> None:
    import equinox as eqx

    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    tx = optax.adam(1e-2)
    _, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    report = audit(state, params)
    assert report.ok
    assert all(row.vanished == 0.0 for row in report.rows)
    assert len(report.rows) == 4


def test_factored_and_unknown_moments_are_checked_but_not_repaired() -> None:
    params = {"w": jnp.ones((256, 256)), "b": jnp.ones(3)}
    state, params, _, _ = trained(optax.adafactor(1e-2), params, steps=2)
    assert audit(state, params).ok
    bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan) if x.shape == (256,) else x, state)
    report = audit(bad, params)
    assert by_name(report)["w"].others == {"v_row": 1, "v_col": 1, "v": 0}
    assert "unknown meaning" in state_problems(bad, params)[0]
    assert _bits(repair(bad, report)) == _bits(bad)
    state, params, _, _ = trained(optax.sm3(1e-2), steps=2)
    assert set(by_name(audit(state, params))["a"].others) == {"mu", "nu"}


def test_a_repair_leaves_factored_moments_beside_a_poisoned_one_as_they_are() -> None:
    """A row's or a column's moment belongs to many elements, most of which are not poisoned."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9)
    params = {"b": jnp.ones((4, 4))}
    state = jax.tree.map(jnp.ones_like, tx.init(params))
    bad = poison(state, "ema", math.nan)
    report = audit(bad, params)
    assert report.poisoned == {"b": 1}
    mended = repair(bad, report)
    assert jax.tree.map(jnp.shape, mended) == jax.tree.map(jnp.shape, state)
    assert _bits(mended) == _bits(poison(state, "ema", 0.0))


def test_the_accumulated_gradients_of_several_steps_are_checked() -> None:
    tx = optax.MultiSteps(optax.adam(1e-2), 4)
    params = parameters()
    bad = gradients(params, 0)
    bad["b"] = bad["b"].at[0].set(jnp.nan)
    _, state = tx.update(bad, tx.init(params), params)
    report = audit(state, params)
    assert by_name(report)["b"].others == {"acc_grads": 1}
    assert report.risks[0].cause is Cause.OPTIMIZER_STATE


def test_the_state_of_a_schedule_or_a_plateau_is_not_a_moment() -> None:
    tx = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau())
    params = parameters()
    state = tx.init(params)  # its best value is inf
    assert audit(state, params).ok
    assert audit(tx.init(jnp.ones(3)), jnp.ones(3)).ok


def test_single_arrays_empty_ones_and_integers() -> None:
    params = {"one": jnp.asarray(2.0), "none": jnp.zeros((0, 3)), "n": jnp.arange(3)}
    tx = optax.masked(optax.adam(0.1), {"one": True, "none": True, "n": False})
    grads = {"one": jnp.asarray(1.0), "none": jnp.zeros((0, 3)), "n": jnp.zeros(3)}
    updates, state = tx.update(grads, tx.init(params), params)
    report = audit(state, params, updates={"one": updates["one"]})
    assert {row.name for row in report.rows} == {"one", "none"}
    assert by_name(report)["one"].update_rms == pytest.approx(0.1, rel=1e-4)
    assert by_name(report)["none"].measured.size == 0
    json.loads(report.to_json(), parse_constant=pytest.fail)
    leaf = jnp.ones(3)
    state = optax.adam(0.1).init(leaf)
    assert by_name(audit(state, leaf))["param"].vanished == 0.0


def test_complex_parameters_count_as_one() -> None:
    params = {"w": jnp.asarray([1 + 1j, 2.0, 3.0], jnp.complex64)}
    tx = optax.adam(1e-2)
    updates, state = tx.update({"w": jnp.asarray([3 + 4j, 1.0, 1.0], jnp.complex64)}, tx.init(params), params)
    row = audit(state, params, updates=updates).rows[0]
    assert row.measured.size == 3
    assert row.update_rms == pytest.approx(0.01, rel=1e-3)
    bad = (state[0]._replace(mu={"w": state[0].mu["w"].at[0].set(jnp.nan)}), *state[1:])
    mended = repair(bad, audit(bad, params))
    assert mended[0].mu["w"][0] == mended[0].nu["w"][0] == 0
    assert _bits(mended[0].mu["w"][1:]) == _bits(state[0].mu["w"][1:])


def test_bad_parameters_are_reported_but_not_replaced() -> None:
    state, params, _, _ = trained(optax.adam(1e-2))
    params["b"] = params["b"].at[0].set(jnp.inf)
    report = audit(state, params)
    assert report.risks[0].cause is Cause.PARAMETERS
    assert state_problems(state, params) == ()
    assert _bits(repair(state, report)) == _bits(state)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_compensation_is_read_and_repaired(dtype: Any) -> None:
    """Integers cannot be bad, but are reset with their element; with them, steps of 1e-4 do not stall."""
    params = jax.tree.map(jnp.ones_like, parameters(dtype))
    tx = optax.chain(optax.adamw(1e-4), stablenum_jax.kahan())
    state, params, _, _ = trained(tx, params, steps=3)
    report = audit(state, params, learning_rate=1e-4, **NUMBERS)
    for row in report.rows:
        assert row.stalled == 0.0
        assert row.others == {}
        assert row.state_dtypes["compensation"] == ("int16" if dtype == jnp.bfloat16 else "float32")
    assert not [risk for risk in report.risks if risk.cause is Cause.STALL]
    bad = poison(state, "nu", math.inf)
    report = audit(bad, params)
    assert report.poisoned == {"b": 1}
    mended = repair(bad, report)
    assert audit(mended, params).poisoned == {}
    expected = poison(poison(poison(state, "nu", 0.0), "mu", 0.0), "compensation", 0)
    assert _bits(mended) == _bits(expected)
    assert _bits(mended) != _bits(poison(poison(state, "nu", 0.0), "mu", 0.0))


def test_two_optimizers_of_one_parameter() -> None:
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_adam(), optax.scale(-1e-2))
    state, params, _, _ = trained(tx)
    report = audit(state, params)
    assert {row.name for row in report.rows} == {"a", "b", "c.d", "a (2)", "b (2)", "c.d (2)"}
    bad = (state[0], poison(state[1], "nu", math.nan), state[2])
    report = audit(bad, params)
    assert report.poisoned == {"b (2)": 1}
    mended = repair(bad, report)
    assert _bits(mended[0]) == _bits(state[0])
    assert audit(mended, params).ok


def test_wrong_arguments() -> None:
    state, params, grads, _ = trained(optax.adam(1e-2))
    with pytest.raises(TypeError, match="call them outside jit"):
        jax.jit(lambda s, p: audit(s, p) and p)(state, params)
    with pytest.raises(ValueError, match="which has moments of 'a', but params have 'x'"):
        audit(state, {"x": jnp.ones(3)})
    with pytest.raises(ValueError, match="grads must be a tree like params; it has 'x'"):
        audit(state, params, {"x": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"updates must have the shapes of params; 'b' has shape \(2,\)"):
        audit(state, params, grads, {**grads, "b": jnp.ones(2)})
    with pytest.raises(TypeError, match="audit must be what"):
        repair(state, state)
    report = audit(poison(state, "nu", math.nan), params)
    with pytest.raises(ValueError, match="must be of this opt_state; it names 'b'"):
        repair(state, report)


def test_one_block_and_many_blocks_give_the_same_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    state, params, grads, updates = trained(optax.adam(1e-2))
    whole = audit(state, params, grads, updates, **NUMBERS).to_dict()
    monkeypatch.setattr("stablenum_jax._diagnosis.audit._AT_A_TIME", 5)
    many = audit(state, params, grads, updates, **NUMBERS).to_dict()
    for one, other in zip(whole["rows"], many["rows"], strict=True):
        for key, value in one.items():
            assert other[key] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), key
