"""Units of gradients that are divided over mesh axes. ``test_divided_units.py`` runs this with eight devices.

The oracle is one process on the gathered gradients, in ``stablenum.reference``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import stablenum
import stablenum_jax
from stablenum import AdaptiveGradClip
from stablenum.reference import guarded

BOTH, STEPS = ("x", "y"), 3
SHAPES = {
    "conv": (3, 3, 4, 8),
    "excluded": (8, 4),
    "few": (4, 3),  # with one row per device: of that shape alone it would be a vector
    "grid": (8, 4),
    "heads": (8, 4, 2),
    "none": (0, 4),
    "scalar": (),
    "vector": (8,),
    "whole": (3, 5),
}
COPIES = dict.fromkeys(SHAPES, P())
LAYOUTS: dict[str, tuple[Any, dict[str, P]]] = {
    "inputs": (
        "x",
        {
            "conv": P(None, None, "x"),
            "excluded": P("x"),
            "few": P("x", None),
            "grid": P("x", None),
            "heads": P("x"),
            "vector": P("x"),
        },
    ),
    "outputs": (
        "x",
        {
            "conv": P(None, None, None, "x"),
            "excluded": P(None, "x"),
            "grid": P(None, "x"),
            "heads": P(None, "x"),
            "vector": P("x"),
        },
    ),
    "two axes": (
        BOTH,
        {
            "conv": P(None, None, "y", "x"),
            "excluded": P("y"),
            "few": P("x"),
            "grid": P("x", "y"),
            "heads": P(None, "x", "y"),
            "vector": P(("y", "x")),
        },
    ),
    "axes in another order": (
        ("y", "x"),
        {
            "conv": P(None, None, None, ("x", "y")),
            "grid": P("y", "x"),
            "heads": P(None, "x"),
            "vector": P("x"),
        },
    ),
}
AGC = AdaptiveGradClip(clipping=0.05, exclude="excluded")
JOINT = {"clip": (AGC, 0.7)}
RULES: dict[str, dict[str, Any]] = {
    "alone": {"clip": AGC},
    "between others, with a loss scale": {
        "clip": (stablenum.ClipByNorm(2.0), AGC, 0.7),
        "loss_scale": stablenum.UnderflowAwareLossScale(init_scale=4.0),
    },
    "of the first axis, with exact norms": {
        "clip": (AdaptiveGradClip(clipping=0.05, output_axis="first"), 0.7),
        "exact_norms": True,
    },
}


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    made["grid"][:, 1] = 0  # as small as eps
    return made


def _healthy(grads: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> None:
    pass


def _zero_units(grads: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> None:
    grads["grid"][:, 2], grads["conv"][..., 5], grads["vector"][:] = 0, 0, 0


def _nan_in_a_unit(grads: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> None:
    grads["grid"][5, 3] = np.nan


def _inf_in_a_unit(grads: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> None:
    grads["conv"][1, 2, 3, 7] = -np.inf


def _weights_too_large_to_be_squared(grads: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> None:
    params["grid"][:, 0] = np.linspace(1e30, 3e30, 8)
    params["heads"][:, 3, 1] = 3e38  # and their norm is no float32
    grads["grid"][:, 0] = 5e29


def _weights_that_are_not_finite(grads: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> None:
    params["grid"][6, 0], params["conv"][0, 0, 0, 3] = np.nan, np.inf


def _gradients_too_large_to_be_squared(grads: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> None:
    grads["grid"] *= 1e30
    grads["heads"][:, 2, 1] = 3e38  # the unit's norm is no float32


def _gradients_too_small_to_be_squared(grads: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> None:
    for name in SHAPES:
        grads[name] *= np.float32(1e-30)


FAULTS: dict[str, Callable[..., None]] = {
    "healthy": _healthy,
    "zero units": _zero_units,
    "NaN in a unit": _nan_in_a_unit,
    "inf in a unit": _inf_in_a_unit,
    "weights too large to be squared": _weights_too_large_to_be_squared,
    "weights that are not finite": _weights_that_are_not_finite,
    "gradients too large to be squared": _gradients_too_large_to_be_squared,
    "gradients too small to be squared": _gradients_too_small_to_be_squared,
}
SKIPPED = {"NaN in a unit", "inf in a unit"}
UNCHANGED = {*SKIPPED, "gradients too small to be squared"}


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(10 + step)
    made = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
    made["grid"] *= np.geomspace(1e-3, 1e3, 8)[:, None]  # of another size on each device
    made["conv"] *= np.geomspace(1e-2, 1e2, 8)
    return {name: np.asarray(g, np.float32) for name, g in made.items()}


def mesh_of(sizes: tuple[int, int] = (4, 2)) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, BOTH, axis_types=(AxisType.Auto,) * 2)


def state_specs(state: Any, specs: dict[str, P]) -> Any:
    """Momentum lies as its parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: specs.get(getattr(path[-1], "key", None), P()), state
    )


class Trained:
    """The guarded training on eight devices, and the same in one process."""

    def __init__(self, layout: str, rules: dict[str, Any], **over: Any) -> None:
        axis_name, divided = LAYOUTS[layout]
        specs = COPIES | divided
        self.tx = optax.chain(
            stablenum_jax.guard(**rules, axis_name=axis_name, specs=specs), optax.sgd(0.1, momentum=0.9)
        )
        self.first = {name: jnp.asarray(w) for name, w in weights().items()}
        self.state = self.tx.init(self.first)
        lies = (specs, state_specs(self.state, specs))

        def step(params: Any, state: Any, grads: Any) -> Any:
            return stablenum_jax.step(self.tx, params, state, grads)

        mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=(*lies, specs), out_specs=lies, **over)
        self.step = jax.jit(mapped)
        self.rules = rules

    def compare(self, fault: str) -> Any:
        """Run a few steps, the second with the fault, in both; compare them, and return what one process
        recorded of the fault."""
        start = weights()
        FAULTS[fault](gradients(0), start)
        alone = guarded.Guarded(start, guarded.SGD(lr=0.1, momentum=0.9), **self.rules)
        params, state = {name: jnp.asarray(w) for name, w in start.items()}, self.state
        found = []
        for i in range(STEPS):
            grads = gradients(i)
            if i == 1:
                FAULTS[fault](grads, weights())
            params, state = self.step(params, state, grads)
            last, expected = stablenum_jax.metrics(state), alone.step(grads)
            for field in ("applied", "reason", "loss_scale"):
                assert last[field] == expected[field], field
            for field in ("grad_norm", "clip_coefficient"):
                np.testing.assert_allclose(last[field], expected[field], rtol=5e-6, err_msg=field)
            for name, whole in alone.params.items():
                np.testing.assert_allclose(params[name], whole, rtol=1e-5, atol=1e-6, err_msg=name)
            found.append(expected)
        return found[1]


@functools.lru_cache(maxsize=1)
def trained(layout: str) -> Trained:
    """The training with units and then the joint norm, compiled once for all faults."""
    return Trained(layout, JOINT)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_are_clipped_as_in_one_process(layout: str, fault: str) -> None:
    found = trained(layout).compare(fault)
    assert found["applied"] == (fault not in SKIPPED)
    assert (found["clip_coefficient"] < 0.9) == (fault not in UNCHANGED)


@pytest.mark.parametrize("rules", RULES)
def test_with_other_rules_around_it(rules: str) -> None:
    program = Trained("two axes", RULES[rules])
    for fault in ("healthy", "gradients too large to be squared", "inf in a unit"):
        program.compare(fault)


def test_specs_say_what_is_copied_without_check_vma() -> None:
    Trained("two axes", JOINT, check_vma=False).compare("healthy")


def test_the_rule_matters() -> None:
    """Otherwise the tests above could not fail."""
    grads, start = gradients(0), weights()
    after = []
    for rules in (JOINT, {"clip": 0.7}):
        alone = guarded.Guarded(start, guarded.SGD(lr=0.1), **rules)
        alone.step(grads)
        after.append(alone.params)
    for name in set(SHAPES) - {"none", "excluded"}:
        assert not np.allclose(after[0][name], after[1][name], rtol=1e-4, atol=0), name


# --- one axis of a mesh of two ---------------------------------------------------------------------


def test_each_position_along_another_axis_is_a_run_of_its_own() -> None:
    """With ``axis_name="x"``, what lies along "y" is decided apart: here each "y" has its own columns."""
    spec, rule = {"w": P("x", "y")}, AdaptiveGradClip(clipping=0.05)
    tx = optax.chain(stablenum_jax.guard(clip=(rule, 1.0), axis_name="x", specs=spec), optax.sgd(0.1))
    params, grads = {"w": jnp.asarray(weights()["grid"])}, {"w": jnp.asarray(gradients(0)["grid"])}

    def step(params: Any, grads: Any) -> Any:
        state = jax.tree.map(lambda x: jax.lax.pcast(x, "y", to="varying"), tx.init(params))
        after, state = stablenum_jax.step(tx, params, state, grads)
        return after, stablenum_jax.guard_state(state).recorder.floats[-1:]

    mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=(spec, spec), out_specs=(spec, P("y")))
    after, rows = jax.jit(mapped)(params, grads)
    for y in range(2):
        columns = slice(2 * y, 2 * y + 2)
        alone = guarded.Guarded(
            {"w": np.asarray(params["w"])[:, columns]}, guarded.SGD(lr=0.1), clip=(rule, 1.0)
        )
        expected = alone.step({"w": np.asarray(grads["w"])[:, columns]})
        np.testing.assert_allclose(after["w"][:, columns], alone.params["w"], rtol=1e-5)
        np.testing.assert_allclose(rows[y, 1], expected["grad_norm"], rtol=1e-6)
        np.testing.assert_allclose(rows[y, 3], expected["clip_coefficient"], rtol=1e-6)


# --- how steps are run -----------------------------------------------------------------------------


def test_micro_batches_inside_multisteps() -> None:
    specs = {"w": P("x", "y"), "b": P("y")}
    params = {"w": jnp.asarray(weights()["grid"]), "b": jnp.asarray(weights()["vector"])}
    batches = [
        {"w": jnp.asarray(gradients(i)["grid"]), "b": jnp.asarray(gradients(i)["vector"])} for i in (0, 1)
    ]

    def after(axis_name: Any, specs_: Any, wrapped: Callable[..., Any]) -> Any:
        guard = stablenum_jax.guard(clip=AdaptiveGradClip(), axis_name=axis_name, specs=specs_)
        tx = optax.MultiSteps(optax.chain(guard, optax.sgd(0.1)), every_k_schedule=2)
        state = tx.init(params)
        step = wrapped(lambda p, s, g: stablenum_jax.step(tx, p, s, g), state_specs(state, specs))
        made = params
        for batch in batches:
            made, state = step(made, state, batch)
        return made

    def on_devices(step: Any, of_state: Any) -> Any:
        lies = (specs, of_state)
        return jax.jit(jax.shard_map(step, mesh=mesh_of(), in_specs=(*lies, specs), out_specs=lies))

    alone, together = after(None, None, lambda step, _: step), after(BOTH, specs, on_devices)
    for name in params:
        assert not np.allclose(alone[name], params[name], rtol=1e-6)
        np.testing.assert_allclose(together[name], alone[name], rtol=1e-6)


@pytest.mark.parametrize("form", ["guard(inner)", "chain"])
def test_callers_of_plain_update(form: str) -> None:
    spec, grads = {"w": P("x", "y")}, {"w": jnp.asarray(gradients(0)["grid"])}
    params = {"w": jnp.asarray(weights()["grid"])}
    sgd, rule = optax.sgd(0.1), AdaptiveGradClip()
    tx = {
        "guard(inner)": stablenum_jax.guard(sgd, clip=rule, axis_name=BOTH, specs=spec),
        "chain": stablenum_jax.chain(stablenum_jax.guard(clip=rule, axis_name=BOTH, specs=spec), sgd),
    }[form]

    def updates(params: Any, grads: Any) -> Any:
        return tx.update(grads, tx.init(params), params)[0]

    mapped = jax.shard_map(updates, mesh=mesh_of(), in_specs=(spec, spec), out_specs=spec)
    alone = stablenum_jax.guard(sgd, clip=rule)
    expected, _ = alone.update(grads, alone.init(params), params)
    np.testing.assert_allclose(jax.jit(mapped)(params, grads)["w"], expected["w"], rtol=1e-5)


def test_a_spec_may_stand_for_a_subtree() -> None:
    params = {"layer": {"w": jnp.ones((8, 4)), "b": jnp.ones(8)}, "head": jnp.ones((4, 4))}
    grads = jax.tree.map(lambda p: 3 * p, params)
    specs = {"layer": P("x"), "head": P()}
    tx = optax.chain(
        stablenum_jax.guard(clip=AdaptiveGradClip(), axis_name=BOTH, specs=specs), optax.sgd(0.1)
    )

    def step(params: Any, grads: Any) -> Any:
        return stablenum_jax.step(tx, params, tx.init(params), grads)[0]

    mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=(specs, specs), out_specs=specs)
    after = jax.jit(mapped)(params, grads)
    alone = optax.chain(stablenum_jax.guard(clip=AdaptiveGradClip()), optax.sgd(0.1))
    expected, _ = stablenum_jax.step(alone, params, alone.init(params), grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), after, expected)


@pytest.mark.parametrize(("spec", "axis"), [(P("d"), 0), (P(None, "d"), 1)])
def test_specs_under_pmap_tell_how_the_parts_lie(spec: P, axis: int) -> None:
    whole, start = gradients(0)["grid"], weights()["grid"]
    tx = optax.chain(
        stablenum_jax.guard(clip=AdaptiveGradClip(), axis_name="d", specs={"w": spec}), optax.sgd(0.1)
    )

    def step(w: Any, g: Any) -> Any:
        return stablenum_jax.step(tx, {"w": w}, tx.init({"w": w}), {"w": g})[0]["w"]

    parts = [np.stack(np.split(array, 4, axis)) for array in (start, whole)]
    after = jax.pmap(step, axis_name="d", devices=jax.devices()[:4])(*parts)
    alone = guarded.Guarded({"w": start}, guarded.SGD(lr=0.1), clip=AdaptiveGradClip())
    alone.step({"w": whole})
    np.testing.assert_allclose(np.concatenate(list(after), axis), alone.params["w"], rtol=1e-5)


# --- wrong specs -----------------------------------------------------------------------------------


def run(specs: Any, *, lies: Any = None, axis_name: Any = BOTH, **over: Any) -> Any:
    """One step with these specs on gradients that lie otherwise, if ``lies`` is given."""
    params = {"b": jnp.ones(8), "w": jnp.ones((8, 4))}
    rule = AdaptiveGradClip()
    tx = optax.chain(stablenum_jax.guard(clip=rule, axis_name=axis_name, specs=specs), optax.sgd(0.1))
    state = optax.chain(stablenum_jax.guard(clip=rule), optax.sgd(0.1)).init(params)
    lies = specs if lies is None else lies
    step = jax.shard_map(
        lambda p, s, g: stablenum_jax.step(tx, p, s, g),
        mesh=mesh_of(),
        in_specs=(lies, P(), lies),
        out_specs=(lies, P()),
        **over,
    )
    return jax.jit(step)(params, state, params)


GOOD = {"b": P(), "w": P("x")}


@pytest.mark.parametrize(
    ("specs", "lies", "message"),
    [
        ({"b": P(), "w": P("z")}, GOOD, r"'w'.*'z'.*not bound"),
        ({"b": P()}, GOOD, r"none for 'w'"),
        ({**GOOD, "v": P()}, GOOD, r"'v'.*no parameter"),
        ([P(), P()], GOOD, r"none for 'b'"),
        ({"b": P(None, "x"), "w": P("x")}, GOOD, r"'b'.*1 dimension"),
        ({"b": P(), "w": P()}, GOOD, r"'w'.*varies over 'x'"),
        ({"b": P(), "w": P("y")}, GOOD, r"'w'.*varies over 'x'"),
    ],
)
def test_wrong_specs_are_errors_that_name_the_parameter(specs: Any, lies: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(specs, lies=lies)


def test_a_unit_must_lie_along_axis_name_alone() -> None:
    """Along other axes devices decide apart, so none of them would have the norm of the whole unit."""
    with pytest.raises(ValueError, match=r"'w'.*'y'.*axis_name"):
        run({"b": P(), "w": P("y", "x")}, axis_name="x", check_vma=False)


def test_weights_must_lie_as_the_specs_say() -> None:
    """A gradient that is constant does not vary over any axis, but its weights may."""
    spec = {"w": P()}
    tx = optax.chain(stablenum_jax.guard(clip=AdaptiveGradClip(), axis_name="x", specs=spec), optax.sgd(0.1))

    def step(params: Any) -> Any:
        grads = {"w": jnp.ones((2, 4))}
        return stablenum_jax.step(tx, params, tx.init(params), grads)[0]

    mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(ValueError, match=r"'w'.*varies over 'x'"):
        mapped({"w": jnp.ones((8, 4))})


def test_a_gradient_that_does_not_vary_is_divided_as_its_spec_says() -> None:
    """As the zeros of a frozen parameter: its type alone would count it as copies."""
    spec = {"w": P("x")}
    tx = optax.chain(stablenum_jax.guard(clip=AdaptiveGradClip(), axis_name="x", specs=spec), optax.sgd(0.1))

    def step(params: Any) -> Any:
        after, state = stablenum_jax.step(tx, params, tx.init(params), {"w": jnp.ones((2, 4))})
        return after, stablenum_jax.guard_state(state).recorder.floats[-1, 1]

    mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=(spec,), out_specs=(spec, P()))
    _, norm = jax.jit(mapped)({"w": jnp.ones((8, 4))})
    np.testing.assert_allclose(norm, 32**0.5, rtol=1e-6)


def test_every_combination_of_two_axes_for_a_matrix() -> None:
    """All in one program, a parameter for each."""
    places = [(), ("x",), ("y",), ("x", "y"), ("y", "x")]
    specs = {
        f"{one}, {other}": P(one or None, other or None)
        for one, other in itertools.product(places, places)
        if not set(one) & set(other)
    }
    assert len(specs) == 11
    params = dict.fromkeys(specs, weights()["heads"].reshape(8, 8))
    grads = dict.fromkeys(specs, gradients(0)["heads"].reshape(8, 8))
    rule = AdaptiveGradClip(clipping=0.05)
    tx = optax.chain(stablenum_jax.guard(clip=(rule, 1.0), axis_name=BOTH, specs=specs), optax.sgd(0.1))

    def step(params: Any, grads: Any) -> Any:
        return stablenum_jax.step(tx, params, tx.init(params), grads)[0]

    mapped = jax.shard_map(step, mesh=mesh_of(), in_specs=(specs, specs), out_specs=specs)
    after = jax.jit(mapped)(params, grads)
    alone = guarded.Guarded(params, guarded.SGD(lr=0.1), clip=(rule, 1.0))
    alone.step(grads)
    for name, expected in alone.params.items():
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, err_msg=name)
