"""Every built-in scenario on every backend: decisions equal, numbers close, outcomes as stated."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from stablenum.compare import BACKENDS, SCENARIOS, backend_numpy, find_backends, run_scenario
from stablenum.compare.agreement import Disagreement, compare_traces
from stablenum.compare.runner import run_guarded
from stablenum.compare.spec import Expected, Fault, Goal

FRAMEWORKS = {
    framework: [b.name for b in BACKENDS.values() if b.framework == framework]
    for framework in ("torch", "jax")
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, framework: str) -> None:
    """NumPy and all backends of a framework, eager and compiled."""
    backends, _ = find_backends(FRAMEWORKS[framework])
    result = run_scenario(SCENARIOS[name], backends)
    assert [str(c.disagreement) for c in result.comparisons.values() if c.disagreement] == []
    assert result.surprises == []
    # The comparison took place, unless the backend said why not.
    assert result.comparisons.keys() | result.left_out.keys() == set(FRAMEWORKS[framework])


def test_names_are_unique_and_every_scenario_states_what_it_shows() -> None:
    for name, scenario in SCENARIOS.items():
        assert scenario.name == name
        assert scenario.about
        assert scenario.expected.plain
        assert scenario.expected.guarded


def test_streams_keep_to_the_standard_tolerance_unless_they_say_why() -> None:
    for scenario in SCENARIOS.values():
        tolerance = scenario.tolerance
        if (tolerance.norm, tolerance.params) != (1e-6, 1e-5):
            assert tolerance.why, scenario.name


def test_a_scenario_is_the_same_every_time() -> None:
    backends, _ = find_backends(["numpy"])
    one, two = (run_guarded(SCENARIOS["fp16-leaves"], backends[0]) for _ in range(2))
    assert one.rows == two.rows
    assert [p.tobytes() for p in one.params] == [p.tobytes() for p in two.params]


def test_a_planted_difference_is_found_at_its_step() -> None:
    backends, _ = find_backends(["numpy"])
    scenario = SCENARIOS["single-inf"]
    honest, other = (run_guarded(scenario, backends[0]) for _ in range(2))
    other.backend = "torch"
    assert compare_traces("x", honest, other, scenario.tolerance).disagreement is None
    other.rows[7] = other.rows[7]._replace(loss_scale=2.0)
    other.rows[9] = other.rows[9]._replace(applied=False)
    found = compare_traces("x", honest, other, scenario.tolerance).disagreement
    assert found == Disagreement("x", "torch", 7, "loss_scale", 1.0, 2.0)
    assert str(found) == "x, torch, step 7, loss_scale: numpy has 1, torch has 2"


def test_a_difference_in_the_parameters_is_found_at_the_end() -> None:
    backends, _ = find_backends(["numpy"])
    scenario = SCENARIOS["single-inf"]
    honest, other = (run_guarded(scenario, backends[0]) for _ in range(2))
    other.params[1] = other.params[1] * 1.001
    found = compare_traces("x", honest, other, scenario.tolerance)
    assert found.disagreement is not None
    assert found.disagreement.step is None
    assert found.disagreement.field.startswith("params[1]")
    assert found.worst_params == pytest.approx(1e-3, rel=0.01)


def test_a_nan_where_numpy_has_none_is_a_difference() -> None:
    backends, _ = find_backends(["numpy"])
    scenario = SCENARIOS["single-inf"]
    honest, other = (run_guarded(scenario, backends[0]) for _ in range(2))
    other.rows[3] = other.rows[3]._replace(grad_norm=float("nan"))
    found = compare_traces("x", honest, other, scenario.tolerance).disagreement
    assert found is not None
    assert (found.step, found.field) == (3, "grad_norm")


@pytest.mark.parametrize(
    ("name", "factor"), [("bf16-leaves", 5.0), ("bf16-leaves", 1.3), ("fp16-leaves", 1.3)]
)
@pytest.mark.parametrize("backend", ["numpy", "torch-foreach", "jax-jit"])
def test_another_learning_rate_is_found_in_half_precision(name: str, factor: float, backend: str) -> None:
    scenario = SCENARIOS[name]
    honest = run_guarded(scenario, BACKENDS["numpy"])
    faster = dataclasses.replace(scenario.optimizer, lr=scenario.optimizer.lr * factor)
    other = run_guarded(dataclasses.replace(scenario, optimizer=faster), BACKENDS[backend])
    found = compare_traces(name, honest, other, scenario.tolerance)
    assert found.disagreement is not None
    assert found.disagreement.field.startswith("params[")
    assert found.worst_params > 2 * scenario.tolerance.params


def test_numpy_itself_is_held_to_a_true_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = backend_numpy.GuardedRun.step

    def step(self: backend_numpy.GuardedRun, gradients: list[np.ndarray], loss: float) -> None:
        honest(self, gradients, loss)
        if not self.last["applied"]:
            self._guarded._params[1] += np.float32(1e-3)

    monkeypatch.setattr(backend_numpy.GuardedRun, "step", step)
    result = run_scenario(SCENARIOS["single-inf"], [BACKENDS["numpy"]])
    assert result.surprises == ["single-inf, numpy, step 20: params[1] changed in a skip"]
    assert not result.ok


def test_wrong_fields_of_a_scenario_are_named() -> None:
    for make, message in (
        (lambda: Fault(step=-1, kind="nan"), "faults.step must be a whole number"),
        (lambda: Fault(step=1, kind="bad"), "faults.kind must be 'nan' or 'scale'"),
        (lambda: Fault(step=1, kind="scale", factor=math.inf), "faults.factor must be a finite number"),
        (lambda: Goal(measure="speed"), "goal.measure must be 'accuracy' or 'loss'"),
        (lambda: Goal(measure="loss", of_start="x"), "goal.of_start must be a finite number"),
        (lambda: Expected(plain="lives"), "expected.plain must be 'survives' or 'dies'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
