"""Buffers that a recovery watches: the same courses give the same rewinds in PyTorch and JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import stablenum_jax
import stablenum_torch
from stablenum import RecoveryEvent, RecoveryPolicy
from tests.selection import only

POLICY = RecoveryPolicy(every=20, good_after=10, check_every=5, runaway_steps=None)
STEPS = 80
# By the step: the factor on a batch; and what is added to it.
BATCHES = {
    "healthy": {},
    "scale": {53: (1e3, 0.0)},
    "offset": {47: (1.0, 1e3)},
    "twice": {41: (1e3, 0.0), 66: (1e6, 0.0)},
    "moderate": dict.fromkeys(range(50, STEPS + 1), (2.0, 0.5)),  # another resolution
    "too early": {4: (1e3, 0.0)},
}


def batch_at(kind: str, number: int) -> np.ndarray:
    factor, offset = BATCHES[kind].get(number + 1, (1.0, 0.0))
    drawn = np.random.default_rng(number).normal(size=(16, 3)).astype(np.float32)
    return (drawn * np.float32(factor) + np.float32(offset)).astype(np.float32)


def statistics(kept: Any, batch: Any) -> dict[str, Any]:
    """Flax and PyTorch divide by other numbers; here both have the same."""
    return {"mean": 0.9 * kept["mean"] + 0.1 * batch.mean(0), "var": 0.9 * kept["var"] + 0.1 * batch.var(0)}


def in_torch(kind: str) -> Any:
    norm = torch.nn.BatchNorm1d(3)
    model = torch.nn.ModuleDict({"norm": norm, "rest": torch.nn.Linear(3, 1)})
    model.register_buffer("table", torch.ones(3))
    opt = stablenum_torch.wrap(torch.optim.SGD(model["rest"].parameters(), lr=1e-3), names=model)
    recovery = stablenum_torch.Recovery(model, opt, POLICY, data=lambda n: batch_at(kind, n))
    for batch in recovery.batches(STEPS):
        kept = {"mean": norm.running_mean.numpy(), "var": norm.running_var.numpy()}
        new = statistics(kept, batch)
        norm.running_mean.copy_(torch.tensor(new["mean"]))
        norm.running_var.copy_(torch.tensor(new["var"]))
        model.table.copy_(torch.tensor(np.cos(batch[0])))
        opt.zero_grad()
        opt.backward(model["rest"](torch.ones(2, 3)).square().mean())
        opt.step()
    return recovery


def in_jax(kind: str) -> Any:
    tx = optax.chain(stablenum_jax.guard(), optax.sgd(1e-3))
    params = {"rest": jnp.ones(3)}
    kept = {"norm": {"mean": jnp.zeros(3), "var": jnp.ones(3)}}
    state = {"params": params, "opt": tx.init(params), "batch_stats": kept, "table": jnp.ones(3)}

    @jax.jit
    def train_step(state: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: p["rest"].sum() ** 2)(state["params"])
        params, opt = stablenum_jax.step(tx, state["params"], state["opt"], grads, value=loss)
        return state | {"params": params, "opt": opt}

    recovery = stablenum_jax.Recovery(state, POLICY, data=lambda n: batch_at(kind, n))
    for batch in recovery.batches(STEPS):
        new = statistics(jax.tree.map(np.asarray, recovery.state["batch_stats"]["norm"]), batch)
        made = {"batch_stats": {"norm": jax.tree.map(jnp.asarray, new)}, "table": jnp.cos(batch[0])}
        recovery.state = train_step(recovery.state) | made
    return recovery


def told(event: RecoveryEvent) -> tuple[Any, ...]:
    symptom = event.symptom
    names = tuple(name.replace("batch_stats.", "") for name in symptom.names)
    return str(symptom.code), symptom.step, symptom.origin, symptom.detail, names, event.to_step


@pytest.mark.parametrize("kind", only({*BATCHES} - {"scale"}, BATCHES))  # found as an offset is
def test_the_same_batches_give_the_same_rewinds(kind: str) -> None:
    events = [told(event) for event in in_torch(kind).events]
    assert events == [told(event) for event in in_jax(kind).events]
    bad = {step for step in BATCHES[kind] if kind not in ("moderate", "too early")}
    first = [min(bad)] if bad else []  # the data after a rewind are others
    assert [origin for _, _, origin, *_ in events][:1] == first
    assert all(names == ("running statistics of norm",) for *_, names, _ in events)
