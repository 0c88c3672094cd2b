"""``checkup`` of one batch: the same model with the same fault gets the same findings in both frameworks."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import stablenum_jax
import stablenum_torch
from stablenum.diagnosis import Checkup

SIZES = [8, 16, 16, 16, 1]


class Case(NamedTuple):
    """A network of four layers with ReLU, trained on 64 rows, and what is wrong with it."""

    gain: float = 1.0
    bias: float = 0.0
    x: float = 1.0
    y: float = 1.0
    rate: float = 1e-2
    narrow: bool = False
    column: bool = True
    detached: bool = False
    constant: bool = False


CASES = {
    "": Case(),
    "exploding_activations": Case(gain=30.0),
    "vanishing_activations": Case(gain=0.01),
    "unscaled_input": Case(x=1000.0, rate=1e-9),
    "unscaled_target": Case(y=1000.0),
    "alike_units": Case(constant=True),
    "dead_units": Case(bias=-50.0),
    "steps_too_large": Case(rate=5.0),
    "lost_updates": Case(narrow=True, rate=1e-6),
    "broadcast_loss": Case(column=False),
    "no_gradient": Case(detached=True),
}


def arrays(case: Case) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    weights = {}
    for i, (a, b) in enumerate(itertools.pairwise(SIZES)):
        weights[f"w{i}"] = (case.gain * rng.normal(size=(a, b)) * (2 / a) ** 0.5).astype(np.float32)
        if case.constant:
            weights[f"w{i}"][:] = 0.1
        weights[f"b{i}"] = np.full(b, case.bias if i < 3 else 0.0, np.float32)
    x = rng.normal(size=(64, 8))
    y = case.y * x @ rng.normal(size=(8, 1))
    return weights, (case.x * x).astype(np.float32), (y if case.column else y[:, 0]).astype(np.float32)


class Net(torch.nn.Module):
    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        super().__init__()
        for name, w in weights.items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(w.copy())))


def loss_in(xp: Any, detach: Any, case: Case) -> Any:
    def loss_fn(p: Any, x: Any, y: Any) -> Any:
        for i in range(4):
            w, b = (detach(p[f"{k}{i}"]) if case.detached and i == 0 else p[f"{k}{i}"] for k in "wb")
            x = x @ w + b
            if i < 3:
                x = torch.relu(x) if xp is torch else jax.nn.relu(x)
        return xp.mean((x - y) ** 2)

    return loss_fn


def in_torch(case: Case, **options: Any) -> tuple[Checkup, Net]:
    weights, x, y = arrays(case)
    kind = torch.bfloat16 if case.narrow else torch.float32
    net = Net(weights).to(kind)
    inner = loss_in(torch, lambda t: t.detach(), case)
    optimizer = torch.optim.Adam(net.parameters(), lr=case.rate)

    def loss_fn(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return inner(dict(model.named_parameters()), x, y)

    batch = [torch.from_numpy(a).to(kind) for a in (x, y)]
    return stablenum_torch.checkup(net, loss_fn, *batch, **{"optimizer": optimizer, **options}), net


def in_jax(case: Case, **options: Any) -> Checkup:
    weights, x, y = arrays(case)
    kind = jnp.bfloat16 if case.narrow else jnp.float32
    params = {k: jnp.asarray(w, kind) for k, w in weights.items()}
    loss_fn = loss_in(jnp, jax.lax.stop_gradient, case)
    tx = optax.adam(case.rate)
    return stablenum_jax.checkup(
        loss_fn, params, *(jnp.asarray(a, kind) for a in (x, y)), **{"tx": tx, **options}
    )


@pytest.mark.parametrize("symptom", CASES)
def test_both_frameworks_give_the_same_findings(symptom: str) -> None:
    ours, theirs = in_torch(CASES[symptom])[0], in_jax(CASES[symptom])
    for report in (ours, theirs):
        assert [c.symptom.value for c in report.complaints][:1] == ([symptom] if symptom else []), report
        assert report.ok is not bool(symptom), report
    assert [(c.symptom, c.level) for c in ours.complaints] == [
        (c.symptom, c.level) for c in theirs.complaints
    ]
    assert ours.losses == pytest.approx(theirs.losses, rel=0.02)


@pytest.mark.parametrize("symptom", ["exploding_activations", "vanishing_activations"])
@pytest.mark.parametrize("run", [lambda case: in_torch(case)[0], in_jax], ids=["torch", "jax"])
def test_the_initialisation_is_tried(run: Any, symptom: str) -> None:
    (tried,) = {c.tried for c in run(CASES[symptom]).complaints}
    words = [part.partition(": ")[2] for part in tried.split("; ")]
    outputs, gradients = ([float(x) for x in part.split(", ")] for part in words)
    assert len(outputs) == len(gradients) == 4
    assert all(0.3 < x < 5 for x in outputs), tried
    assert 0.1 < gradients[0] / gradients[-1] < 10, tried
    assert max(gradients) < 10 * min(gradients), tried


@pytest.mark.parametrize("run", [lambda case: in_torch(case)[0], in_jax], ids=["torch", "jax"])
def test_a_lower_rate_is_tried(run: Any) -> None:
    (first,) = run(CASES["steps_too_large"]).complaints
    lower, rate = run(Case()), float(first.tried.split()[1])
    assert rate * 5.0 < 0.02
    assert f"takes the loss from {lower.losses[0]:.4g} to " in first.tried
    assert float(first.tried.split(" to ")[1].split(",")[0]) < lower.losses[0]


@pytest.mark.parametrize("report", [in_torch(Case(), optimizer=None)[0], in_jax(Case(), tx=None)])
def test_without_an_optimizer_there_is_one_pass(report: Checkup) -> None:
    assert (report.steps, report.measured) == (0, 1)
    assert (
        str(report) == f"Nothing found in one forward and backward pass. The loss is {report.losses[0]:.4g}."
    )


def test_a_report_comes_back_from_its_plain_values() -> None:
    for report in (in_torch(CASES["steps_too_large"])[0], in_jax(CASES["steps_too_large"])):
        assert Checkup.from_dict(report.to_dict()) == report
        assert "steps_too_large" in report.to_html()
