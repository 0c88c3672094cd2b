"""Other code that clips the gradients before the guard's step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import stablenum_jax
from stablenum.guard.clip_log import ClipLog
from tests.selection import REPEATS, only


@pytest.fixture(autouse=True)
def _fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stablenum_jax._step.readout._clips", ClipLog())


def train(tx: optax.GradientTransformation, clip: optax.GradientTransformation, steps: int = 20) -> Any:
    """Train a small model in a scan, its gradients clipped by hand; return how far it moved and its state."""
    start = {"w": jnp.ones(4)}

    def one(carry: Any, key: jax.Array) -> Any:
        params, opt_state = carry
        x = jax.random.normal(key, (8, 4))
        loss = lambda params: jnp.sum((3 * x @ params["w"] - x[:, 0]) ** 2)  # noqa: E731
        value, grads = stablenum_jax.value_and_grad(loss, opt_state)(params)
        grads, _ = clip.update(grads, clip.init(params))
        return stablenum_jax.step(tx, params, opt_state, grads, value=value), None

    keys = jax.random.split(jax.random.key(0), steps)
    (params, opt_state), _ = jax.jit(lambda carry: jax.lax.scan(one, carry, keys))((start, tx.init(start)))
    return float(jnp.abs(params["w"] - start["w"]).max()), opt_state


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "stablenum"]


@pytest.mark.parametrize("steps", only([20], [20, 600]))
def test_clipping_of_scaled_gradients_is_logged_when_the_state_is_read(
    caplog: pytest.LogCaptureFixture, steps: int
) -> None:
    tx = optax.chain(stablenum_jax.guard(loss_scale=1024.0), optax.sgd(0.001))
    moved, opt_state = train(tx, optax.clip_by_global_norm(1.0), steps)
    assert moved < 2e-6 * steps
    assert not messages(caplog)
    stablenum_jax.metrics(opt_state)
    stablenum_jax.metrics(opt_state)
    (message,) = messages(caplog)
    assert "the joint norm 1, " in message
    assert "multiplied by the loss scale 1024. Divided by it, the norm is 9.77e-04" in message
    assert "put the clipping after the guard" in message


REMEDIES = {
    "clip=": (stablenum_jax.guard(clip=1.0, loss_scale=1024.0),),
    "after": (stablenum_jax.guard(loss_scale=1024.0), optax.clip_by_global_norm(1.0)),
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_the_remedies_work_and_are_not_logged(caplog: pytest.LogCaptureFixture, remedy: str) -> None:
    moved, opt_state = train(optax.chain(*REMEDIES[remedy], optax.sgd(0.001)), optax.identity(), 100)
    assert moved > 1e-2
    assert stablenum_jax.metrics(opt_state)["applied"]
    assert not messages(caplog)


def test_clipping_without_a_scale_is_logged_for_a_rule_that_compares_norms(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for settings, count in (({}, 0), ({"spike": "skip"}, 1)):
        tx = optax.chain(stablenum_jax.guard(**settings), optax.sgd(0.001))
        stablenum_jax.metrics(train(tx, optax.clip_by_global_norm(1.0), 64)[1])
        assert len(messages(caplog)) == count
    assert "SpikeGuard can notice no gradient that is larger than usual" in messages(caplog)[0]


@pytest.mark.parametrize(
    "clip", [optax.clip_by_global_norm(1.0), pytest.param(optax.clip(1.0), marks=REPEATS)]
)
def test_a_chain_in_which_a_clip_comes_first_is_reported_at_once_and_stays_sound(
    clip: optax.GradientTransformation,
) -> None:
    """The clip gets unscaled gradients, so only the guard's norms are those after clipping."""
    tx = optax.chain(clip, stablenum_jax.guard(loss_scale=1024.0), optax.sgd(0.001))
    with pytest.warns(stablenum_jax.GuardPlacementWarning, match="put the guard first"):
        moved, _ = train(tx, optax.identity(), 100)
    assert moved > 1e-2
    with pytest.raises(ValueError, match="in its first transformation"):
        stablenum_jax.chain(clip, stablenum_jax.guard(), optax.sgd(0.1)).init({"w": jnp.ones(2)})
