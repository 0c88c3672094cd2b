"""Failures are distinguished from legitimate values that look like them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import stablenum
import stablenum_jax
from stablenum_jax import replay
from tests.jax.replaying import check
from tests.selection import only

HALF = jnp.float16


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("where", jnp.tril(jnp.ones((3, 3), bool))),
        ("bias", jnp.triu(jnp.full((3, 3), -jnp.inf), 1)),
        ("bfloat16", jnp.triu(jnp.full((3, 3), -jnp.inf, jnp.bfloat16), 1)),
    ],
)
def test_masks_are_legitimate(name: str, mask: jax.Array) -> None:
    def loss(q: jax.Array) -> jax.Array:
        scores = q @ q.T
        scores = jnp.where(mask, scores, -jnp.inf) if name == "where" else scores + mask
        return (jax.nn.softmax(scores) @ q).sum()

    report = replay(loss, jnp.eye(3))
    assert report.ok
    assert not report.findings


def test_row_of_masks() -> None:
    def loss(x: jax.Array, mask: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.where(mask, x, -jnp.inf)).sum()  # BAD

    report = replay(loss, jnp.ones((2, 3)), jnp.array([[True, True, False], [False] * 3]))
    check(report, test_row_of_masks, "mask", "softmax")


@pytest.mark.parametrize("operation", ["mul", "matmul", "sum", "exp", "cast"])
def test_half_precision_overflow(operation: str) -> None:
    runs: dict[str, Any] = {
        "mul": lambda x: x * x,
        "matmul": lambda x: x @ x.T,
        "sum": lambda x: jnp.sum(jnp.tile(x, (40, 40))),
        "exp": lambda x: jnp.exp(x / 20),
        "cast": lambda x: (x.astype(jnp.float32) * 1e4).astype(HALF),
    }
    x = jnp.full((4, 4), 300.0, HALF)
    report = replay(lambda x: runs[operation](x).astype(jnp.float32).sum(), x)
    first = report.findings[0]
    assert (report.verdict.cause.value, first.operation) == ("low_precision_overflow", operation)
    assert first.wide_finite is True


def test_overflow_in_float32_too() -> None:
    report = replay(lambda x: (x * 1e30).sum().astype(jnp.float32), jnp.full(3, 1e30, jnp.bfloat16))
    assert report.verdict.cause.value == "overflow"
    assert report.findings[0].wide_finite is False


def test_scale_too_high() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (x.astype(HALF) * 2).sum().astype(jnp.float32)

    x = jnp.ones(4)
    assert replay(loss, x, loss_scale=2.0**16).verdict.cause.value == "loss_scale"
    assert replay(loss, x, loss_scale=2.0**8).ok
    assert replay(loss, x).ok


def test_scale_of_the_guard() -> None:
    tx = optax.chain(stablenum_jax.guard(loss_scale=2.0**16), optax.sgd(0.1))
    params = {"w": jnp.ones(4)}
    report = replay(
        lambda p: (p["w"].astype(HALF) * 2).sum().astype(jnp.float32), params, opt_state=tx.init(params)
    )
    assert report.evidence.loss_scale == 2.0**16
    assert report.evidence.unscaled_finite is True
    assert report.verdict.cause.value == "loss_scale"


def test_failure_that_the_scale_does_not_explain() -> None:
    report = replay(lambda x: jnp.sqrt(x).sum(), jnp.zeros(3), loss_scale=1024.0)
    assert report.evidence.unscaled_finite is False
    assert report.verdict.cause.value == "boundary_derivative"


def test_batch_and_parameters() -> None:
    def loss(params: Any, batch: Any) -> jax.Array:
        return (params["w"] * batch["x"]).sum()

    bad, good = jnp.array([1.0, jnp.nan]), jnp.ones(2)
    report = replay(loss, {"w": good}, {"x": bad})
    assert (report.verdict.cause.value, report.findings[0].name) == ("batch", "args[1]['x']")
    report = replay(loss, {"w": bad}, {"x": good})
    assert (report.verdict.cause.value, report.findings[0].name) == ("parameters", "['w']")
    report = replay(lambda p: loss(p, {"x": bad}), {"w": good})
    assert (report.verdict.cause.value, report.findings[0].name) == ("batch", "captured float32[2]")


def test_an_infinity_in_a_step_that_goes_well_is_a_bound() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        return {"best": jnp.minimum(state["best"], (x**2).sum()), "x": 0.9 * x}

    assert replay(step, {"best": jnp.float32(jnp.inf)}, jnp.ones(3)).ok
    mask = {"w": jnp.ones(3), "mask": jnp.array([0.0, -jnp.inf, 0.0])}
    assert replay(lambda p: (jax.nn.softmax(p["w"] + p["mask"]) ** 2).sum(), mask).ok
    unused = {"w": jnp.ones(3), "b": jnp.full(2, jnp.nan)}
    assert replay(lambda p: p["w"].sum(), unused).verdict.cause.value == "parameters"


def test_singular_matrix() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.linalg.slogdet(w)[1]  # BAD

    check(replay(loss, jnp.ones((3, 3))), test_singular_matrix, "domain", "slogdet")


def test_keyword_argument_is_named() -> None:
    report = replay(
        lambda w, *, batch: (w * batch["x"]).sum(), jnp.ones(2), batch={"x": jnp.full(2, jnp.nan)}
    )
    assert report.findings[0].name == "kwargs['batch']['x']"


@pytest.mark.parametrize("label", [7, -5])
def test_label_out_of_range(label: int) -> None:
    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logp, labels[:, None], -1).mean()  # BAD

    report = replay(loss, jnp.ones((2, 4)), jnp.array([1, label]))
    check(report, test_label_out_of_range, "labels", "gather")
    assert "0..3" in report.evidence.labels


def test_nothing_to_average() -> None:
    def loss(x: jax.Array, valid: jax.Array) -> jax.Array:
        return jnp.sum(x * valid) / jnp.sum(valid)  # BAD

    check(replay(loss, jnp.ones(3), jnp.zeros(3)), test_nothing_to_average, "domain", "div")


def test_norm_overflow() -> None:
    report = replay(lambda x: (x * 1e20).sum(), jnp.ones(3))
    assert report.verdict.cause.value == "norm_overflow"


def test_transient() -> None:
    report = replay(lambda x: x.sum(), jnp.ones(3), known_bad=True)
    assert report.verdict.cause.value == "transient"
    assert report.evidence.reproduced is False


def test_only_under_xla() -> None:
    """a / (x / a) becomes a * a / x, which overflows; one equation at a time it is finite."""

    def run(x: jax.Array, a: jax.Array) -> jax.Array:
        return (a / (x / a)).sum()  # BAD

    x, a = jnp.full(3, 2e30), jnp.float32(1e30)
    assert jnp.isfinite(run(x, a))
    assert not jnp.isfinite(jax.jit(run)(x, a))
    report = replay(run, x, a, gradients=False)
    check(report, test_only_under_xla, "overflow", "div")
    assert any("compiled by XLA, which fuses and reorders, it is not" in note for note in report.notes)


def test_whole_training_step() -> None:
    tx = optax.chain(stablenum_jax.guard(), optax.adam(1e-3))

    @jax.jit
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.sqrt(p["w"] * x).sum()  # BAD

        value, grads = stablenum_jax.value_and_grad(loss, opt_state)(params)
        params, opt_state = stablenum_jax.step(tx, params, opt_state, grads, value=value)
        return params, opt_state, value, grads

    params = {"w": jnp.zeros(3)}
    report = replay(step, params, tx.init(params), jnp.ones(3))
    check(report, test_whole_training_step, "boundary_derivative", "sqrt", "backward")
    assert replay(step, {"w": jnp.ones(3)}, tx.init(params), jnp.ones(3)).ok


def _guarded_step(config: Any, loss: Any) -> Any:
    """A whole step that returns neither the loss nor the gradients, and its optimizer."""
    tx = optax.chain(stablenum_jax.guard(**config), optax.adam(1e-3))

    @jax.jit
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        value, grads = stablenum_jax.value_and_grad(loss, opt_state)(params, x)
        return stablenum_jax.step(tx, params, opt_state, grads, value=value)

    return step, tx


@pytest.mark.parametrize("config", only([{"clip": 1.0}], [{}, {"clip": 1.0}, {"loss_scale": "dynamic"}]))
def test_failure_that_a_guard_hides(config: dict[str, Any]) -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sqrt(p["w"] * x).sum()  # BAD

    step, tx = _guarded_step(config, loss)
    params = {"w": jnp.zeros(3)}
    after, state = step(params, tx.init(params), jnp.ones(3))
    assert jnp.isfinite(after["w"]).all()
    report = replay(step, params, tx.init(params), jnp.ones(3))
    check(report, loss, "boundary_derivative", "sqrt", "backward")
    assert any("a guard skipped the step" in note for note in report.notes)
    assert replay(step, {"w": jnp.ones(3)}, tx.init(params), jnp.ones(3)).ok
    # What the guard has recorded of the skipped step is not a failure of the next.
    assert replay(step, {"w": jnp.ones(3)}, state, jnp.ones(3)).ok


def test_empty_windows_of_a_guard_that_the_step_creates_are_legitimate() -> None:
    """A spike rule's windows are no argument here."""
    tx = optax.chain(stablenum_jax.guard(spike=stablenum.SpikeGuard()), optax.sgd(0.1))

    def step(params: jax.Array, grads: jax.Array) -> Any:
        return stablenum_jax.step(tx, params, tx.init(params), grads)[0]

    params = jnp.ones(3)
    report = replay(step, params, jnp.ones(3))
    assert report.ok, str(report)


def test_step_of_a_loop_that_a_guard_hides() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.abs(p["w"] * x)).sum()  # BAD

    step, tx = _guarded_step({}, loss)

    def train(params: Any, opt_state: Any, xs: jax.Array) -> Any:
        return jax.lax.scan(lambda c, x: (step(*c, x), None), (params, opt_state), xs)[0]

    params = {"w": jnp.ones(3)}
    report = replay(train, params, tx.init(params), jnp.ones((4, 3)).at[2, 1].set(0.0))
    check(report, loss, "boundary_derivative", "sqrt", "backward")
    assert report.findings[0].where == "iteration 2 of scan"
    assert len(report.findings) == 1


def test_loss_that_a_guard_hides() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return (p["w"] * x).sum() + jax.lax.stop_gradient(jnp.log(x).sum())  # BAD

    step, tx = _guarded_step({}, loss)
    params = {"w": jnp.ones(3)}
    check(replay(step, params, tx.init(params), jnp.zeros(3)), loss, "domain", "log")


def test_scale_too_high_inside_a_whole_step() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return (p["w"].astype(HALF) * x.astype(HALF) * 2).sum().astype(jnp.float32)

    step, tx = _guarded_step({"loss_scale": 2.0**16}, loss)
    params = {"w": jnp.ones(3)}
    report = replay(step, params, tx.init(params), jnp.ones(3))
    assert report.verdict.cause.value == "loss_scale"
    assert (report.evidence.loss_scale, report.evidence.unscaled_finite) == (2.0**16, True)


def test_poisoned_state() -> None:
    tx = optax.adam(1e-3)
    params = {"w": jnp.ones(2)}
    adam, rest = tx.init(params)
    state = (adam._replace(nu={"w": jnp.array([1.0, jnp.nan])}), rest)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: (p["w"] * x).sum())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    report = replay(step, params, state, jnp.ones(2))
    assert report.verdict.cause.value == "optimizer_state"
    assert report.findings[0].name == "args[1][0].nu['w']"
    report = replay(lambda p, x: (p["w"] * x).sum(), params, jnp.ones(2), opt_state=state)
    assert report.verdict.cause.value == "optimizer_state"


def test_eps_that_is_lost_is_an_update() -> None:
    tx = optax.adam(1e-3, eps=0.0)
    params = jnp.ones(2)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: (p * x).sum())(params)
        updates, state = tx.update(grads, state, params)  # BAD
        return optax.apply_updates(params, updates), state

    report = replay(step, params, tx.init(params), jnp.array([1.0, 0.0]))
    check(report, test_eps_that_is_lost_is_an_update, "optimizer_state", "div", "update")


def test_update_of_a_parameter_that_the_loss_does_not_use() -> None:
    """Its gradient is a constant 0 that comes from no differentiated equation."""
    tx = optax.adam(1e-3, eps=0.0)
    params = {"used": jnp.ones(2), "unused": jnp.ones(2)}

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(lambda p: (p["used"] * x).sum())(params)
        updates, state = tx.update(grads, state, params)  # BAD
        return optax.apply_updates(params, updates), state

    report = replay(step, params, tx.init(params), jnp.ones(2))
    check(report, test_update_of_a_parameter_that_the_loss_does_not_use, "optimizer_state", "div", "update")


def test_row_of_masks_in_logsumexp() -> None:
    def loss(x: jax.Array, mask: jax.Array) -> jax.Array:
        scores = jnp.where(mask, x, -jnp.inf)
        return jax.nn.logsumexp(scores, axis=-1).mean()  # BAD

    report = replay(loss, jnp.ones((2, 3)), jnp.array([[True, True, False], [False] * 3]))
    check(report, test_row_of_masks_in_logsumexp, "mask", "logsumexp")
    assert report.verdict.safe_function == "stablenum_jax.numerics.logsumexp"


def test_aux_is_not_judged() -> None:
    def loss(w: jax.Array) -> Any:
        logits = jnp.where(w > 0, w, -jnp.inf)
        return w.sum(), {"logits": logits, "name": "a", "none": None}

    assert replay(loss, jnp.zeros(2), has_aux=True).ok


def test_second_argument_is_differentiated() -> None:
    report = replay(lambda x, w: (x * jnp.sqrt(w)).sum(), jnp.ones(2), jnp.zeros(2), argnums=1)
    assert report.evidence.bad_gradients == ("args[1]",)


@pytest.mark.parametrize(("gradients", "names"), [(True, ("args[0]",)), (False, ())])
def test_a_bad_result_is_not_listed_among_the_gradients(gradients: bool, names: tuple[str, ...]) -> None:
    report = replay(lambda w: jnp.log(w).sum(), jnp.zeros(2), gradients=gradients)
    assert report.evidence.loss_finite is False
    assert report.evidence.bad_gradients == names


def test_arguments_are_named_in_the_statistics_and_constants_are_not() -> None:
    first = replay(lambda w: (1.0 / w).sum(), jnp.zeros(2)).findings[0]
    assert first.operation == "div"
    assert [x.name for x in first.inputs] == ["", "args[0]"]


def test_inside_a_transformation() -> None:
    with pytest.raises(TypeError, match="Call it eagerly"):
        jax.jit(lambda w: replay(lambda v: v.sum(), w))(jnp.ones(3))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="argnums must name positional arguments"):
        replay(lambda w: w.sum(), jnp.ones(3), argnums=1)
    with pytest.raises(TypeError, match="floating-point scalar"):
        replay(lambda w: w, jnp.ones(3), gradients=True)


def test_an_error_of_the_function_is_raised() -> None:
    def loss(w: jax.Array) -> jax.Array:
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        replay(loss, jnp.ones(3))
