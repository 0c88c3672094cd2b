"""States, settings and pickles that were written before the modules were renamed still load.

The files in ``saved/`` were written by the code before that: after 12 steps (a NaN in the 5th, an inf in
the 8th) the optimizer and its guard were saved; 6 more steps were taken, and their results were written to
``*-after.json``.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import serialization

import stablenum
import stablenum.diagnosis
import stablenum_jax
import stablenum_torch
from tests.selection import only

SAVED = Path(__file__).parent / "saved"
CONFIGS = ("plain", "common", "statistics", "units", "escalating")
# JAX compiles each of them for seconds; these have what the others have.
IN_JAX = ("statistics", "escalating")


def load(name: str) -> Any:
    return pickle.loads((SAVED / name).read_bytes())


def read(name: str) -> Any:
    return json.loads((SAVED / name).read_text(encoding="utf-8"))


def grads(step: int) -> list[np.ndarray]:
    """The gradients of a step, the same as when the files were written."""
    rng = np.random.default_rng(step)
    wide = rng.normal(size=(3, 2)).astype(np.float32) * 10.0 ** (step % 3 - 1)
    return [wide, rng.normal(size=(2,)).astype(np.float32)]


def assert_same_record(ours: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    assert len(ours) == len(saved) == 18
    for row, before in zip(ours, saved, strict=True):
        assert (row["reason"].name, row["worst"].name) == (before["reason"], before["worst"])
        numbers = {key: value for key, value in before.items() if key not in ("reason", "worst")}
        assert {key: row[key] for key in numbers} == pytest.approx(numbers, rel=1e-6, nan_ok=True)


def torch_goes_on(opt: Any, name: str) -> None:
    parameters = [p for group in opt.param_groups for p in group["params"]]
    for step in range(12, 18):
        for p, g in zip(parameters, grads(step), strict=True):
            p.grad = torch.tensor(g) * opt.scale()
        opt.step()
    after = read(f"torch-{name}-after.json")
    assert_same_record(opt.history(), after["history"])
    for p, expected in zip(parameters, after["after"], strict=True):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-6)


def jax_goes_on(params: Any, state: Any, name: str) -> None:
    tx = jax_optimizer(name)
    for step in range(12, 18):
        scale = stablenum_jax.loss_scale(state)
        given = {key: jnp.asarray(g) * scale for key, g in zip("wb", grads(step), strict=True)}
        params, state = stablenum_jax.step(tx, params, state, given)
    after = read(f"jax-{name}-after.json")
    assert_same_record(stablenum_jax.history(state), after["history"])
    for key, expected in after["after"].items():
        np.testing.assert_allclose(np.asarray(params[key]), expected, rtol=1e-6)


def jax_optimizer(name: str) -> optax.GradientTransformation:
    return optax.chain(stablenum_jax.guard(config=load(f"config-{name}.pickle")), optax.adamw(0.1))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pickled_config(name):
    config = load(f"config-{name}.pickle")
    assert type(config) is stablenum.GuardConfig
    assert config == stablenum.GuardConfig.from_dict(read(f"config-{name}.json"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pickled_torch_optimizer_continues(name):
    opt = load(f"torch-{name}.pickle")
    assert type(opt) is stablenum_torch.GuardedOptimizer
    torch_goes_on(opt, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_torch_state_dict_continues(name):
    weights = read(f"torch-{name}-after.json")["weights"]
    named = {key: torch.nn.Parameter(torch.tensor(w)) for key, w in zip("wb", weights, strict=True)}
    opt = stablenum_torch.wrap(
        torch.optim.AdamW(list(named.values()), lr=0.1), load(f"config-{name}.pickle"), names=named
    )
    opt.load_state_dict(torch.load(SAVED / f"torch-{name}.pt", weights_only=True))
    torch_goes_on(opt, name)


@pytest.mark.parametrize("name", only(IN_JAX, CONFIGS))
def test_a_pickled_jax_state_continues(name):
    params, state = load(f"jax-{name}.pickle")
    assert type(state[0]) is stablenum_jax.typing.GuardOptState
    jax_goes_on(params, state, name)


@pytest.mark.parametrize("name", only(IN_JAX, CONFIGS))
def test_a_jax_state_in_msgpack_continues(name):
    params, _ = load(f"jax-{name}.pickle")
    fresh = jax_optimizer(name).init(params)
    state = serialization.from_bytes(fresh, (SAVED / f"jax-{name}.msgpack").read_bytes())
    jax_goes_on(params, state, name)


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_guard_state_dict_of_either_framework_loads_in_both(name, framework):
    saved = read(f"{framework}-{name}.json")
    config = load(f"config-{name}.pickle")
    named = {"w": torch.nn.Parameter(torch.zeros(3, 2)), "b": torch.nn.Parameter(torch.zeros(2))}
    opt = stablenum_torch.wrap(torch.optim.AdamW(list(named.values())), config, names=named)
    state = jax_optimizer(name).init({"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)})
    opt.load_guard_state_dict(saved)
    state = stablenum_jax.load_guard_state_dict(state, saved)
    records = read(f"{framework}-{name}-after.json")["history"][:12]
    for history in (opt.history(), stablenum_jax.history(state)):
        assert [row["reason"].name for row in history] == [row["reason"] for row in records]


@pytest.mark.parametrize(
    ("file", "cls"),
    [
        ("policy", stablenum.Policy),
        ("delayed-scaling", stablenum.DelayedScaling),
        ("fp8-state", stablenum_jax.typing.Fp8State),
        ("jmp-policy", stablenum_jax.policy.Policy),
        ("jmp-loss-scale", stablenum_jax.policy.DynamicLossScale),
        ("error", stablenum.NonFiniteError),
        ("policy-handle", stablenum_torch.typing.PolicyHandle),
        ("report", stablenum.diagnosis.Report),
        ("torch-KahanUpdate", stablenum_torch.KahanUpdate),
        ("torch-MasterWeights", stablenum_torch.MasterWeights),
        ("torch-StochasticRounding", stablenum_torch.StochasticRounding),
        ("units", stablenum.typing.Units),
    ],
)
def test_pickles_of_other_public_classes(file, cls):
    assert type(load(f"{file}.pickle")) is cls


def test_a_pickled_report_says_what_it_said():
    report = load("report.pickle")
    assert report.verdict.code in str(report)
    assert [(f.operation, f.phase, f.wide_finite) for f in report.findings] == [
        ("log", "forward", None),
        ("log", "backward", None),
    ]
    assert [f.derivative for f in report.findings] == [False, True]
    assert report.evidence.reproduced is True
    assert not report.evidence.other_rank
    assert report.evidence.poisoned == ()
    assert report.to_html()
    assert stablenum.diagnosis.Report.from_dict(report.to_dict()) == report
    assert pickle.loads(pickle.dumps(report)) == report


def test_pickled_history_rows_and_optax_states():
    (row,) = load("history.pickle")
    assert row["reason"] is stablenum.Reason.NAN_GRADIENT
    assert type(row["worst"]) is stablenum.typing.Worst
    state = load("jax-master_weights.pickle")
    assert type(state).__module__.startswith("stablenum_jax.")


@pytest.mark.parametrize("package", [stablenum, stablenum_torch, stablenum_jax], ids=lambda p: p.__name__)
def test_public_classes_are_pickled_under_the_public_name(package):
    for name in package.__all__:
        public = getattr(package, name)
        if isinstance(public, type):
            assert (public.__module__, public.__qualname__) == (package.__name__, name)
            assert pickle.loads(pickle.dumps(public)) is public


def test_an_unknown_module_stays_unknown():
    with pytest.raises(ModuleNotFoundError, match=r"stablenum\.nowhere"):
        __import__("stablenum.nowhere")
