"""An operation that one side is said to lack is one that it does not have there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn import functional

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.differences import Cause

RANDOM = np.random.default_rng(0)
W = {
    "inner": RANDOM.normal(size=(4, 4)).astype(np.float32),
    "outer": RANDOM.normal(size=(4, 4)).astype(np.float32),
    "bias": RANDOM.normal(size=4).astype(np.float32),
}
X = RANDOM.normal(size=(6, 4)).astype(np.float32)


def cause_of(left: Any, right: Any) -> Cause:
    model = torch.nn.ParameterDict({k: torch.nn.Parameter(torch.from_numpy(v.copy())) for k, v in W.items()})
    mine = stablenum_torch.program(lambda x: left(model, x), torch.from_numpy(X), model=model)
    theirs = stablenum_jax.program(right, {k: jnp.asarray(v) for k, v in W.items()}, jnp.asarray(X))
    return stablenum.diff(mine, theirs).causes[0]


def torch_reset(p: Any, x: Any) -> Any:
    state, gate = torch.zeros_like(x) + 0 * p["outer"].sum(), torch.sigmoid(x @ p["inner"])
    return torch.tanh(x + gate * (state @ p["outer"] + p["bias"])).square().mean()


def jax_reset(p: Any, x: Any) -> Any:
    state, gate = jnp.zeros_like(x) + 0 * jnp.sum(p["outer"]), jax.nn.sigmoid(x @ p["inner"])
    return jnp.mean(jnp.tanh(x + ((gate * state) @ p["outer"] + p["bias"])) ** 2)


def jax_not_reset(p: Any, x: Any) -> Any:
    state = jnp.zeros_like(x) + 0 * jnp.sum(p["outer"])
    loss = jnp.mean(jnp.tanh(x + (state @ p["outer"] + p["bias"])) ** 2)
    return loss + 0 * jnp.sum(jax.nn.sigmoid(x @ p["inner"]))


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        (torch_reset, jax_reset, None),  # a gate of zeros: the same bias, which only one side multiplies
        (torch_reset, jax_not_reset, "no mul here"),
    ],
)
def test_a_line_that_uses_an_operation_for_another_value_does_not_lack_it(
    left: Any, right: Any, said: str | None
) -> None:
    cause = cause_of(left, right)

    assert (said is not None) == ("has no" in cause.sentence)
    assert said is None or (said in cause.sentence and cause.confirmed)


def test_a_part_of_a_call_is_named_where_both_sides_have_the_rest() -> None:
    labels, lengths = RANDOM.integers(1, 4, size=(6, 2)), np.array([1, 2, 2, 1, 2, 1])

    def of_torch(p: Any, x: Any) -> Any:
        steps = torch.stack([x @ p["inner"], x @ p["outer"], torch.tanh(x @ p["inner"]) + p["bias"]])
        return functional.ctc_loss(
            functional.log_softmax(steps, -1),
            torch.from_numpy(labels),
            torch.full((6,), 3),
            torch.from_numpy(lengths),
        )

    def of_jax(p: Any, x: Any) -> Any:
        steps = jnp.stack([x @ p["inner"], x @ p["outer"], jnp.tanh(x @ p["inner"]) + p["bias"]], 1)
        padding = jnp.asarray(np.arange(2) >= lengths[:, None], jnp.float32)
        return jnp.mean(optax.ctc_loss(steps, jnp.zeros((6, 3)), jnp.asarray(labels), padding))

    cause = cause_of(of_torch, of_jax)

    assert cause.sentence == "the right program has no div here."
