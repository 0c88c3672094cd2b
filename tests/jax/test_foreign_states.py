"""States that were saved under other settings of the guard: restored as they are, they harm no step."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stablenum
import stablenum_jax
from stablenum import AdaGC, AutoClip, DynamicLossScale, LogMaxLossScale, SpikeGuard, ZClip
from tests.jax.helpers import every_mode, reason

TARGET = np.asarray([1.0, -2.0], np.float32)


def _loss(params: Any) -> Any:
    return jnp.sum((params["w"] - TARGET) ** 2)


def _with_flax(saved: Any, into: Any) -> Any:
    import flax

    return flax.serialization.from_bytes(into, flax.serialization.to_bytes(saved))


def _with_orbax(saved: Any, into: Any, folder: Any) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", into)


def _with_pickle(saved: Any, into: Any) -> Any:
    return pickle.loads(pickle.dumps(saved))


def _optimizer(form: str, **settings: Any) -> Any:
    inner = optax.sgd(0.125)
    if form == "wrapper":
        return stablenum_jax.guard(inner, **settings)
    if form == "multisteps":
        return optax.MultiSteps(optax.chain(stablenum_jax.guard(**settings), inner), 1)
    return optax.chain(stablenum_jax.guard(**settings), inner)


def _train(tx: Any, params: Any, opt_state: Any, steps: int, mode: str = "jit") -> tuple[Any, Any]:
    def one(params: Any, opt_state: Any) -> Any:
        loss, grads = stablenum_jax.value_and_grad(_loss, opt_state)(params)
        return stablenum_jax.step(tx, params, opt_state, grads, value=loss)

    stepper = jax.jit(one) if mode == "jit" else one
    for _ in range(steps):
        params, opt_state = stepper(params, opt_state)
    return params, opt_state


def _params() -> Any:
    return {"w": jnp.asarray([3.0, 5.0])}


def _assert_one_step_is_skipped(plain: Any, opt_state: Any) -> None:
    """The gradients may be multiplied by the foreign scale or not, so a first step is skipped."""
    params, after = _train(plain, _params(), opt_state, 1)
    np.testing.assert_array_equal(params["w"], _params()["w"])
    assert reason(after) == "FOUND_INF"
    params, after = _train(plain, params, after, 2)
    expected, _ = _train(plain, _params(), plain.init(_params()), 2)
    np.testing.assert_array_equal(params["w"], expected["w"])
    assert stablenum_jax.loss_scale(after) == 1.0
    seen = stablenum_jax.metrics(after)
    assert (seen["reason"].name, seen["loss_scale"], seen["skipped_total"]) == ("OK", 1.0, 1)


@pytest.mark.sampled
@pytest.mark.parametrize("restore", [_with_flax, _with_pickle], ids=["msgpack", "pickle"])
@pytest.mark.parametrize("form", ["chain", "wrapper", "multisteps"])
def test_a_scale_restored_into_a_guard_without_one_reaches_no_parameter(form: str, restore: Any) -> None:
    scaling, plain = _optimizer(form, loss_scale="dynamic"), _optimizer(form)
    _assert_one_step_is_skipped(plain, restore(scaling.init(_params()), plain.init(_params())))


def test_a_scale_restored_by_orbax_into_a_guard_without_one_reaches_no_parameter(tmp_path: Any) -> None:
    scaling, plain = _optimizer("chain", loss_scale="dynamic"), _optimizer("chain")
    _assert_one_step_is_skipped(plain, _with_orbax(scaling.init(_params()), plain.init(_params()), tmp_path))


@pytest.mark.sampled
@every_mode
@pytest.mark.parametrize("stop", [{"on_nonfinite": "raise"}, {"max_skips_in_a_row": 1}])
def test_a_restored_scale_does_not_stop_a_strict_guard(stop: Any, mode: str) -> None:
    scaling, plain = _optimizer("chain", loss_scale=8.0), _optimizer("chain", **stop)
    opt_state = _with_flax(scaling.init(_params()), plain.init(_params()))
    _, after = _train(plain, _params(), opt_state, 2, mode)
    seen = stablenum_jax.metrics(after)
    assert (seen["applied"], seen["skipped_total"]) == (True, 1)


def test_a_step_that_was_skipped_for_a_restored_scale_escalates_nothing() -> None:
    escalate = stablenum.EscalatePrecision(after=1)
    scaling = _optimizer("chain", loss_scale=8.0, escalate=escalate)
    plain = _optimizer("chain", escalate=escalate)
    opt_state = _with_flax(scaling.init(_params()), plain.init(_params()))
    params = _params()
    _, after = stablenum_jax.step(plain, params, opt_state, params)
    assert reason(after) == "FOUND_INF"
    assert int(stablenum_jax.guard_state(after).escalation.level) == 0
    _, after = stablenum_jax.step(plain, params, after, {"w": jnp.full(2, jnp.nan)})
    assert int(stablenum_jax.guard_state(after).escalation.level) == 1


@pytest.mark.sampled
@every_mode
@pytest.mark.parametrize(
    ("saved", "now", "scale"),
    [
        ("dynamic", 512.0, 512.0),
        (1024.0, 512.0, 512.0),
        (None, "dynamic", 65536.0),
        (1024.0, DynamicLossScale(init_scale=2.0**12), 2.0**12),
        ("dynamic", DynamicLossScale(init_scale=2.0**8, max_scale=2.0**10), 2.0**10),
        (DynamicLossScale(init_scale=2.0**12), "dynamic", 2.0**12),
    ],
)
def test_a_scale_that_is_another_setting_is_replaced_after_an_exact_step(
    saved: Any, now: Any, scale: float, mode: str
) -> None:
    tx = _optimizer("chain", loss_scale=now)
    opt_state = _with_flax(_optimizer("chain", loss_scale=saved).init(_params()), tx.init(_params()))
    params, after = _train(tx, _params(), opt_state, 2, mode)
    expected, _ = _train(tx, _params(), tx.init(_params()), 2, mode)
    np.testing.assert_array_equal(params["w"], expected["w"])
    assert stablenum_jax.loss_scale(after) == scale


@every_mode
@pytest.mark.parametrize(
    ("setting", "saved", "now"),
    [
        ("clip", ZClip(), AutoClip()),
        ("clip", None, ZClip()),
        ("clip", [ZClip(), 1.0], [1.0, ZClip()]),
        ("clip", AutoClip(window=20), AutoClip(window=30)),
        ("clip", AdaGC(), ZClip()),
        ("spike", SpikeGuard(window=100), SpikeGuard(window=70)),
        ("spike", None, "skip"),
        ("spike", "skip", None),
        ("loss_scale", "dynamic", LogMaxLossScale()),
        ("loss_scale", LogMaxLossScale(), None),
    ],
)
def test_statistics_of_another_setting_are_refused_by_name(
    setting: str, saved: Any, now: Any, mode: str
) -> None:
    tx = _optimizer("chain", **{setting: now})
    opt_state = _with_pickle(_optimizer("chain", **{setting: saved}).init(_params()), None)
    with pytest.raises(ValueError, match=rf"opt_state .*{setting}=.*load_guard_state_dict"):
        _train(tx, _params(), opt_state, 1, mode)


@pytest.mark.filterwarnings("ignore::stablenum_jax.NotATrueSkipWarning")
def test_statistics_of_another_setting_are_refused_through_plain_update_too() -> None:
    tx, other = stablenum_jax.guard(spike=SpikeGuard(window=70)), stablenum_jax.guard(spike="skip")
    with pytest.raises(ValueError, match=r"opt_state .*spike="):
        tx.update(_params(), other.init(_params()), _params())


def test_what_fits_is_carried_over_as_the_refusal_says() -> None:
    old, new = _optimizer("chain", spike="skip"), _optimizer("chain", spike="skip", clip=ZClip())
    params, opt_state = _train(old, _params(), old.init(_params()), 3)
    fresh = (new.init(params)[0], *opt_state[1:])
    with pytest.warns(UserWarning, match="ZClip"):
        opt_state = stablenum_jax.load_guard_state_dict(fresh, stablenum_jax.guard_state_dict(opt_state))
    assert np.isfinite(stablenum_jax.guard_state(opt_state).spike.loss).sum() == 3
    assert stablenum_jax.metrics(_train(new, params, opt_state, 1)[1])["step"] == 3


@every_mode
def test_a_guard_without_a_limit_is_not_halted_by_a_restored_state(mode: str) -> None:
    strict, lenient = _optimizer("chain", max_skips_in_a_row=1), _optimizer("chain")
    bad = {"w": jnp.asarray([jnp.nan, 1.0])}
    _, opt_state = jax.jit(lambda *args: stablenum_jax.step(strict, *args))(
        _params(), strict.init(_params()), bad
    )
    opt_state = _with_flax(opt_state, lenient.init(_params()))
    _, opt_state = _train(lenient, _params(), opt_state, 1, mode)
    assert stablenum_jax.metrics(opt_state)["applied"]
    assert reason(opt_state) == "OK"
