"""Every built-in scenario on every backend: equal decisions, close numbers, outcomes as stated."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from stablenum.commands.compare.agreement import Disagreement, Trace, compare_traces
from stablenum.commands.compare.backends import (
    BACKENDS,
    Setup,
    find_backends,
    jax_models,
    numpy_models,
    numpy_run,
    torch_models,
)
from stablenum.commands.compare.builtin import SCENARIOS
from stablenum.commands.compare.builtin.rule_streams import RULE_STREAMS
from stablenum.commands.compare.builtin.streams import STREAMS
from stablenum.commands.compare.differences import tensor_difference, update_difference
from stablenum.commands.compare.runner import moved, outcome_of, run_guarded, run_scenario
from stablenum.commands.compare.scenarios import Expected, Fault, Goal, Outcome, Stream, Training
from stablenum.commands.compare.scenarios.stream_data import stream_params
from stablenum.commands.compare.scenarios.training_data import Batch, batch_at, data_of, initial_params
from stablenum.guard.config import GuardConfig
from stablenum.guard.reasons import Reason
from stablenum.reference import guarded as reference
from stablenum.rules.clipping import CLIP_RULES
from stablenum.rules.escalation import EscalatePrecision
from stablenum.rules.loss_scale import LOSS_SCALES
from stablenum.rules.spikes import MeanStdSpikeGuard, SpikeGuard
from tests.selection import REPEATS, one_in_three, only, slow_unless

FRAMEWORKS = {
    framework: [b.name for b in BACKENDS.values() if b.framework == framework]
    for framework in ("torch", "jax")
}


# The backends in common use. Every run takes the course of each scenario in NumPy (below), and compares a
# fixed third and all rules together with torch, and a few with JAX, which compiles for seconds. The other
# backends trace each guard for seconds or run it operation by operation: every run compares them on one
# scenario, ``make test-all`` on all.
MOST_USED = ["torch", "jax-jit"]
IN_JAX = (
    "adagc-late",
    "bf16-leaves",
    "hysteresis",
    "loss-1e10-clipped",
    "log-max",
    "spike-clip",
    "tiny-1e-30",
)
ON_EVERY_BACKEND = ("first-step-bad",)
ALWAYS = {(name, "jax-jit") for name in IN_JAX}
ALWAYS |= {
    (name, "torch") for name in SCENARIOS if name in ("all-rules", "escalate-fp16") or one_in_three(name)
}


@pytest.mark.parametrize(
    ("name", "backend"),
    # The convolution takes 40 s, and is trained and guarded as the other networks are.
    slow_unless(
        lambda name, backend: name != "digits-conv" and (name, backend) in ALWAYS,
        itertools.product(SCENARIOS, MOST_USED),
    ),
)
def test_scenario(name: str, backend: str) -> None:
    _run(name, [backend])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", only(ON_EVERY_BACKEND, SCENARIOS))
def test_a_scenario_on_every_other_backend(name: str, framework: str) -> None:
    _run(name, [b for b in FRAMEWORKS[framework] if b not in MOST_USED])


def _run(name: str, backends: list[str]) -> None:
    result = run_scenario(SCENARIOS[name], find_backends(backends)[0])
    assert [str(c.disagreement) for c in result.comparisons.values() if c.disagreement] == []
    assert result.surprises == []
    # The comparison took place, unless the backend gave a reason.
    assert result.comparisons.keys() | result.left_out.keys() == set(backends)


TRAININGS = [name for name, scenario in SCENARIOS.items() if isinstance(scenario, Training)]


@pytest.mark.parametrize("name", {SCENARIOS[name].model: name for name in reversed(TRAININGS)}.values())
def test_every_model_has_the_same_loss_and_gradients_in_every_framework(name: str) -> None:
    """The gradients in NumPy are written by hand."""
    scenario, rng = SCENARIOS[name], np.random.default_rng(7)
    params = [p + rng.normal(size=p.shape).astype(np.float32) / 8 for p in initial_params(scenario)]
    x, y, _ = batch_at(scenario, 0, faults=False)
    x, y, weight = x[:3], y[:3], np.float32(0.5)
    loss, gradients = numpy_models.loss_and_gradients(scenario, params, Batch(x, y, weight), 4.0, "float32")

    torch_leaves = [torch.tensor(p, requires_grad=True) for p in params]
    in_torch = torch_models.loss_function(scenario, "float32")(
        torch_leaves, torch.tensor(x), torch.tensor(y), torch.tensor(weight)
    )
    jax_loss = jax_models.loss_function(scenario, "float32")
    in_jax, jax_gradients = jax.jit(jax.value_and_grad(jax_loss))(params, x, y, weight)

    by_framework = {
        "torch": (in_torch.item(), [g.numpy() for g in torch.autograd.grad(in_torch, torch_leaves)]),
        "jax": (float(in_jax), [np.asarray(g) for g in jax_gradients]),
    }
    for theirs, their_gradients in by_framework.values():
        assert loss == pytest.approx(theirs, rel=1e-5)
        for ours, expected in zip(gradients, their_gradients, strict=True):
            wanted = 4.0 * expected.astype(np.float64)
            np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5 * np.max(np.abs(wanted)))


# The skipped steps and the last loss scale of the guarded training.
TRAINING_COURSES = {
    "bce-saturated": ([20, 21, 40], 1.0),
    "deep-1-to-10": ([], 1.0),
    "deep-1-to-10-overflow": ([*range(20)], 1.0),
    "loss-1e-7-fp16": ([], 1.0),
    "loss-1e-7-fp16-scaled": ([], 2.0**22),
    "loss-1e10-clipped": ([], 1.0),
    "digits-mlp": ([15, 40, 41, 70, 90], 2.0**13),
    "digits-conv": ([15, 40, 41, 70, 90], 2.0**13),
    "escalate-fp16": ([s for first in (30, 93, 156, 219) for s in range(first, first + 3)], 2.0**13),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_takes_its_course(name: str) -> None:
    trace = on_numpy(name)
    skipped = [step for step, row in enumerate(trace.rows) if not row.applied]
    assert (skipped, trace.rows[-1].loss_scale) == TRAINING_COURSES[name]


def test_tensors_that_differ_in_shape_or_dtype_alone_are_infinitely_far_apart() -> None:
    one = np.ones(2, np.float32)
    assert tensor_difference(one, np.ones(2, np.float32)) == 0.0
    assert tensor_difference(one, np.ones(2, np.float16)) == math.inf
    assert tensor_difference(one, np.ones((2, 1), np.float32)) == math.inf


def test_names_are_unique_and_every_scenario_states_what_it_shows() -> None:
    for name, scenario in SCENARIOS.items():
        assert scenario.name == name
        assert scenario.about
        assert scenario.expected.plain
        assert scenario.expected.guarded


def test_streams_have_the_standard_tolerance_or_state_why_not() -> None:
    for scenario in SCENARIOS.values():
        tolerance = scenario.tolerance
        if (tolerance.norm, tolerance.params) != (1e-6, 1e-5):
            assert tolerance.why, scenario.name


@pytest.mark.parametrize("name", ["digits-mlp", "digits-conv"])
def test_initial_weights_have_the_variance_of_he(name: str) -> None:
    """He et al. 2015, arXiv 1502.01852: 2 divided by the number of inputs of a unit."""
    params = initial_params(SCENARIOS[name])
    for weight, bias in zip(params[::2], params[1::2], strict=True):
        inputs = math.prod(weight.shape[1:]) if weight.ndim == 4 else weight.shape[0]
        assert weight.std() == pytest.approx(math.sqrt(2 / inputs), rel=0.2)
        assert not bias.any()


def test_a_deep_network_learns_ones_from_uniform_inputs() -> None:
    data = data_of(SCENARIOS["deep-1-to-10"])
    assert (data.x >= 0).all()
    assert (data.x < 1).all()
    assert (data.y == 1).all()


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


def test_another_format_at_one_step_is_found() -> None:
    backends, _ = find_backends(["numpy"])
    scenario = SCENARIOS["single-inf"]
    honest, other = (run_guarded(scenario, backends[0]) for _ in range(2))
    other.rows[7] = other.rows[7]._replace(precision_level=1)
    found = compare_traces("x", honest, other, scenario.tolerance).disagreement
    assert found is not None
    assert (found.step, found.field, found.expected, found.got) == (7, "precision_level", 0, 1)


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
    ("name", "factor", "backend"),
    slow_unless(
        lambda name, factor, backend: backend != "jax-jit" or factor == 5.0,
        [
            (*case, backend)
            for case in [("bf16-leaves", 5.0), ("bf16-leaves", 1.3), ("fp16-leaves", 1.3)]
            for backend in ("numpy", "torch-foreach", "jax-jit")
        ],
    ),
)
def test_another_learning_rate_is_found_in_half_precision(name: str, factor: float, backend: str) -> None:
    scenario = SCENARIOS[name]
    honest = run_guarded(scenario, BACKENDS["numpy"])
    faster = dataclasses.replace(scenario.optimizer, lr=scenario.optimizer.lr * factor)
    other = run_guarded(dataclasses.replace(scenario, optimizer=faster), BACKENDS[backend])
    found = compare_traces(name, honest, other, scenario.tolerance)
    assert found.disagreement is not None
    assert found.disagreement.field.startswith(("params[", "update of params["))
    assert found.worst_params > 2 * scenario.tolerance.params


def test_a_numpy_skip_that_changes_parameters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = numpy_run.GuardedRun.step

    def step(self: numpy_run.GuardedRun, gradients: list[np.ndarray], loss: float) -> None:
        honest(self, gradients, loss)
        if not self.last["applied"]:
            self._guarded._params[1] += np.float32(1e-3)

    monkeypatch.setattr(numpy_run.GuardedRun, "step", step)
    result = run_scenario(SCENARIOS["single-inf"], [BACKENDS["numpy"]])
    assert result.surprises == ["single-inf, numpy, step 20: params[1] changed in a skipped step"]
    assert not result.ok


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_a_run_of_a_stream_has_no_model_to_train(name: str, guarded: bool) -> None:
    stream = SCENARIOS["single-inf"]
    setup = Setup(
        params=stream_params(stream), optimizer=stream.optimizer, guard=stream.guard if guarded else None
    )
    run = BACKENDS[name].start(setup)
    with pytest.raises(ValueError, match="this run has no model to train"):
        run.train(Batch(np.zeros((1, 2), np.float32), np.zeros(1, np.int64), np.float32(1.0)))
    if not guarded:
        with pytest.raises(ValueError, match="a plain run has no guard"):
            run.load_guard_state_dict({})


# ------------------------------------------------------------------ what happens in each stream


@functools.cache
def on_numpy(name: str) -> Trace:
    return run_guarded(SCENARIOS[name], BACKENDS["numpy"])


class Course(NamedTuple):
    """What happens in a guarded stream.

    Attributes:
        skipped: the worst parameter of each skipped step.
        clipped: the power of 2 by which clipping shrinks the gradients, summed over the steps.
        scaled: the power of 2 by which the loss is scaled, summed over the steps.
        moved: how far each tensor is from its start at the end, as a root mean square.
    """

    skipped: dict[int, int]
    clipped: float
    scaled: float
    moved: tuple[float, ...]


NAN = math.nan
COURSES = {
    "clean": Course({}, 145.1, 0, (0.01540, 0.01017, 0.01382)),
    "single-inf": Course({20: 1}, 0, 0, (1.355, 1.362, 1.454)),
    "single-nan": Course({20: 2}, 601.6, 2000, (0.01586, 0.01514, 0.01359)),
    "first-step-bad": Course({0: 0, 1: 0}, 0, 0, (0.7018, 0.5138, 0.7731)),
    "nan-loss": Course({10: 0, 11: 2, 12: 0}, 0, 960, (0.05925, 0.09175, 0.05887)),
    "bad-200": Course(dict.fromkeys(range(20, 220), 0), 0, 511, (0.4958, 0.7642, 0.5927)),
    "growth-boundary": Course({9: 0, 20: 0}, 0, 704, (0.06587, 0.05318, 0.06994)),
    "hysteresis": Course({5: 0, 15: 0, 25: 0, 26: 0, 40: 0}, 0, 927, (0.07667, 0.02009, 0.06604)),
    "huge-1e20": Course({}, 4170, 0, (0.008460, 0.008225, 0.007673)),
    "tiny-1e-30": Course({}, 0, 0, (7.029e-32, 9.963e-32, 9.083e-32)),
    "all-zero": Course({}, 0, 960, (0.0, 0.0, 0.0)),
    "clip-rules": Course({7: 0}, 145.0, 480, (0.2509, 0.4871, 0.2786)),
    "fp16-leaves": Course(
        {50: 0, 61: 0, 75: 0, 86: 2, 97: 0, 108: 0, 121: 0, 132: 0, 143: 2, 154: 0, 166: 0, 178: 2, 190: 1},
        0,
        3521,
        (0.3346, 0.3774, 0.3194),
    ),
    "bf16-leaves": Course({11: 0}, 0.03257, 708, (0.2136, 0.2501, 0.2454)),
    "empty-tensors": Course({5: 1}, 55.08, 1026, (0.0, 0.03113, 0.0)),
    "empty-tree": Course({5: -1}, 0, 329, ()),
    "adam-1e-50": Course({}, 0, 0, (0.0, 0.0, 0.0)),
    "adam-1e-50-eps-0": Course({}, 0, 0, (NAN, NAN, NAN)),
    "adam-1e-50-fp16": Course({}, 0, 0, (NAN, NAN, NAN)),
    "fp16-stall": Course({}, 0, 2000, (0.0, 0.0, 0.0)),
    "agc": Course({}, 568.4, 0, (0.2118, 0.04118, 0.06682)),
    "autoclip": Course({90: 2}, 35.66, 0, (0.03161, 0.02742, 0.04038)),
    "zclip": Course({10: 0}, 132.6, 0, (0.2576, 0.2654, 0.2549)),
    "adagc-late": Course({}, 241.7, 0, (0.01929, 0.007040, 0.01756)),
    "stale-second-moment": Course({}, 0, 0, (0.02830, 0.02239, 0.02527)),
    "spike-skip": Course({120: 0, 130: 2, 140: 0, 150: 1, 160: 0, 200: 0}, 0, 0, (0.03594, 0.04660, 0.03217)),
    "spike-clip": Course({150: 1}, 27.40, 0, (0.03717, 0.04932, 0.03168)),
    "spike-mean-std": Course({120: 0, 150: 1, 200: 0}, 0, 0, (0.1660, 0.2774, 0.1883)),
    "level-shift": Course(dict.fromkeys([*range(120, 128), 240], 0), 0, 0, (0.2414, 0.2181, 0.2222)),
    "drift": Course({290: 0}, 28.24, 0, (0.05644, 0.01755, 0.05005)),
    "long-zeros": Course({250: 0}, 244.4, 4744, (0.02202, 0.01996, 0.02079)),
    "log-max": Course(dict.fromkeys(range(120, 128), 0), 0, 3901, (0.9490, 1.363, 1.042)),
    "underflow": Course({}, 0, 2887, (0.1287, 2.375, 0.06885)),
    "no-scale-helps": Course(dict.fromkeys(range(40, 70), 0), 0, 681, (0.07055, 0.04855, 0.06454)),
    "hysteresis-growth": Course({10: 0, 30: 0, 50: 0, 125: 0}, 0, 2221, (0.1179, 0.07284, 0.1384)),
    "all-rules": Course({60: 0}, 357.9, 2223, (0.1592, 0.06150, 0.05380)),
}


def test_every_stream_states_its_course() -> None:
    assert list(COURSES) == [stream.name for stream in (*STREAMS, *RULE_STREAMS)]


@pytest.mark.parametrize("name", COURSES)
def test_a_stream_takes_its_course(name: str) -> None:
    trace, course = on_numpy(name), COURSES[name]
    assert {step: row.worst for step, row in enumerate(trace.rows) if not row.applied} == course.skipped
    close = functools.partial(pytest.approx, rel=1e-3, abs=0.0, nan_ok=True)
    assert -sum(math.log2(row.clip_coefficient) for row in trace.rows) == close(course.clipped)
    assert sum(math.log2(row.loss_scale) for row in trace.rows) == course.scaled
    assert moved(trace) == close(course.moved)


def test_at_the_growth_boundary_one_overflow_prevents_the_growth_and_the_other_undoes_it() -> None:
    stream, trace = SCENARIOS["growth-boundary"], on_numpy("growth-boundary")
    clean = run_guarded(dataclasses.replace(stream, events=()), BACKENDS["numpy"])
    scales, undisturbed = ([row.loss_scale for row in t.rows] for t in (trace, clean))
    assert undisturbed[9:11] == [2.0**16, 2.0**17]
    assert scales[9:11] == [2.0**16, 2.0**15]
    assert scales[19:22] == [2.0**15, 2.0**16, 2.0**15]


# ---------------------------------------------------------------- the streams for each rule


def test_every_rule_has_a_stream() -> None:
    guards = [scenario.guard for scenario in SCENARIOS.values()]
    shown = {
        type(rule)
        for guard in guards
        for rule in (*guard.clip, guard.loss_scale, guard.spike, guard.escalate)
    }
    assert shown >= {*CLIP_RULES, *LOSS_SCALES, SpikeGuard, MeanStdSpikeGuard, EscalatePrecision}


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("autoclip", {Reason.NAN_GRADIENT: 1}),
        ("zclip", {Reason.INF_GRADIENT: 1}),
        ("spike-skip", {Reason.SPIKE_LOSS: 2, Reason.SPIKE_GRAD_NORM: 3, Reason.NAN_GRADIENT: 1}),
        ("spike-clip", {Reason.SPIKE_CLIPPED: 5, Reason.NAN_GRADIENT: 1}),
        ("spike-mean-std", {Reason.SPIKE_LOSS: 2, Reason.NAN_GRADIENT: 1}),
        ("level-shift", {Reason.SPIKE_GRAD_NORM: 9}),
        ("drift", {Reason.SPIKE_GRAD_NORM: 1}),
        ("long-zeros", {Reason.SPIKE_GRAD_NORM: 1}),
        ("log-max", {Reason.INF_GRADIENT: 8}),
        ("no-scale-helps", {Reason.INF_GRADIENT: 7, Reason.NOT_A_SCALE_PROBLEM: 23}),
        ("hysteresis-growth", {Reason.INF_GRADIENT: 4}),
    ],
)
def test_steps_are_skipped_for_the_right_reasons(name: str, reasons: dict[Reason, int]) -> None:
    found = Counter(row.reason for row in on_numpy(name).rows)
    assert {r: n for r, n in found.items() if r not in (Reason.OK, Reason.CLIPPED)} == reasons


def test_the_stream_of_zeros_has_no_gradient_in_the_steps_that_it_names() -> None:
    silent = [step for step, row in enumerate(on_numpy("long-zeros").rows) if row.grad_norm == 0]
    assert silent == [*range(30), *range(120, 200)]


def test_gradients_of_a_huge_loss_are_clipped_to_norm_1() -> None:
    for row in on_numpy("loss-1e10-clipped").rows:
        assert row.grad_norm * row.clip_coefficient == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("stream", RULE_STREAMS, ids=lambda s: s.name)
def test_no_rule_freezes_a_tensor(stream: Stream) -> None:
    """In the last applied steps every tensor still moves, and is clipped only moderately."""
    trace = on_numpy(stream.name)
    last = [t for t, row in enumerate(trace.rows) if row.applied][-10:]
    moved = [[np.any(trace.path[t][i] != trace.path[t - 1][i]) for t in last] for i in range(3)]
    assert all(map(all, moved))
    if stream.most_moved is not None and stream.name != "stale-second-moment":  # clipped on purpose
        typical = np.median([row.clip_coefficient for row in trace.rows[-10:]])
        assert typical > 0.02


def without_one_part(stream: Stream) -> Iterator[tuple[str, GuardConfig]]:
    """The stream's guard without one of its rules, or with a common loss scale instead of its own."""
    guard = stream.guard
    for rule in guard.clip_rules:
        left = tuple(r for r in guard.clip_rules if r is not rule)
        yield type(rule).__name__, dataclasses.replace(guard, clip=left)
    if guard.spike is not None:
        yield "spike", dataclasses.replace(guard, spike=None)
    if guard.loss_scale is not None:
        for scale in (None, float(guard.loss_scale.init_scale), "dynamic"):
            yield f"loss_scale {scale}", dataclasses.replace(guard, loss_scale=scale)


def test_rules_skipped_under_compile_are_compiled_in_another_stream() -> None:
    spared = [s for s in SCENARIOS.values() if s.compiled_in is not None]
    assert len(spared) == 34
    for scenario in spared:
        other = SCENARIOS[scenario.compiled_in]
        for name, backend in BACKENDS.items():
            why = f"{scenario.compiled_in} compiles the same rules"
            whole = name in ("torch-compiled", "jax-jit")
            assert backend.why_not(scenario, brief=True) == (why if whole else None)
            assert backend.why_not(scenario) is None
            assert backend.why_not(other, brief=True) is None
        assert rules_of(scenario) <= rules_of(other), scenario.name
        # The rate and eps are constants of the program, and a momentum of 0 leaves operations out.
        assert other.optimizer.name == scenario.optimizer.name, scenario.name
        assert bool(other.optimizer.momentum) >= bool(scenario.optimizer.momentum), scenario.name


def test_every_rule_is_compiled_in_a_run_of_all_scenarios() -> None:
    compiled = [s for s in SCENARIOS.values() if BACKENDS["torch-compiled"].why_not(s, brief=True) is None]
    all_rules = set().union(*map(rules_of, SCENARIOS.values()))
    assert set().union(*map(rules_of, compiled)) == all_rules
    assert {s.optimizer.name for s in compiled} == {s.optimizer.name for s in SCENARIOS.values()}
    assert dtypes_of(compiled) == dtypes_of(SCENARIOS.values())


def dtypes_of(scenarios: Iterable[Stream | Training]) -> set[str]:
    return {tensor.dtype for s in scenarios if isinstance(s, Stream) for tensor in s.tensors}


def rules_of(scenario: Stream | Training) -> set[type]:
    guard = scenario.guard
    return {type(rule) for rule in (*guard.clip_rules, guard.spike, guard.loss_scale) if rule is not None}


@pytest.mark.parametrize(
    ("stream", "guard"),
    [
        # With all rules at once or over many steps, each run takes a second; others have the same rules.
        pytest.param(
            stream,
            guard,
            id=f"{stream.name} without {part}",
            marks=REPEATS if stream.name in ("all-rules", "long-zeros") else [],
        )
        for stream in RULE_STREAMS
        for part, guard in without_one_part(stream)
    ],
)
def test_without_one_of_its_rules_a_stream_fails(stream: Stream, guard: GuardConfig) -> None:
    """This shows that every rule has an effect in its stream."""
    other = run_scenario(dataclasses.replace(stream, guard=guard), [BACKENDS["numpy"]])
    assert any("numpy, guarded:" in s or "numpy: expected" in s for s in other.surprises)
    if guard.loss_scale == stream.guard.loss_scale:
        bits = [
            [p.tobytes() for p in params]
            for params in (on_numpy(stream.name).params, other.guarded["numpy"].params)
        ]
        assert bits[0] != bits[1]


@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_another_bound_for_tiny_elements_is_found(bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = on_numpy("underflow")
    monkeypatch.setattr(reference, "SMALLEST_FLOAT16", reference.SMALLEST_FLOAT16 * bound)
    assert_finds_another_loss_scale(honest)


@pytest.mark.parametrize("factor", [1 / 1.5, 1.5])
def test_another_largest_element_is_found(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, measure = on_numpy("underflow"), reference.measure_extremes

    def other(gradients: Any) -> Any:
        amax, tiny = measure(gradients)
        return amax * np.float32(factor), tiny

    monkeypatch.setattr(reference, "measure_extremes", other)
    assert_finds_another_loss_scale(honest)


def assert_finds_another_loss_scale(honest: Trace) -> None:
    stream = SCENARIOS["underflow"]
    result = run_scenario(stream, [BACKENDS["numpy"]])
    found = compare_traces("x", honest, result.guarded["numpy"], stream.tolerance).disagreement
    assert found is not None
    assert found.field == "loss_scale"


def test_mean_and_deviation_miss_exactly_the_masked_spikes() -> None:
    skipped, missed = (
        {t for t, row in enumerate(on_numpy(name).rows) if not row.applied}
        for name in ("spike-skip", "spike-mean-std")
    )
    assert missed == {120, 150, 200}
    assert skipped - missed == {130, 140, 160}


def test_hysteresis_refilled_by_good_steps_would_not_lower_the_scale() -> None:
    stream = SCENARIOS["hysteresis-growth"]
    refilled = dataclasses.replace(stream.guard.loss_scale, hysteresis_refill="good_step")
    other = dataclasses.replace(stream, guard=dataclasses.replace(stream.guard, loss_scale=refilled))
    assert on_numpy(stream.name).final_loss_scale == 2.0**15
    assert run_guarded(other, BACKENDS["numpy"]).final_loss_scale == 2.0**17


def test_units_are_clipped_separately_and_the_excluded_tensor_is_unchanged() -> None:
    """The one large unit is clipped; its neighbours are unchanged."""
    stream = SCENARIOS["agc"]
    rules = stream.guard.clip[:1]
    alone = dataclasses.replace(stream, guard=dataclasses.replace(stream.guard, clip=rules))
    clean = dataclasses.replace(alone, events=())
    ours, theirs = (run_guarded(s, BACKENDS["numpy"]) for s in (alone, clean))
    step = next(e.step for e in stream.events if e.value is not None)
    for i, (p, q) in enumerate(zip(ours.path[step], theirs.path[step], strict=True)):
        same = p == q
        assert same.all() or (i == 0 and not same[:, 0].all() and same[:, 1:].all())
    before, after = ours.path[step - 1][0][:, 0], ours.path[step][0][:, 0]
    assert np.linalg.norm(after - before) == pytest.approx(
        stream.optimizer.lr * rules[0].clipping * np.linalg.norm(before), rel=1e-4
    )


# ------------------------------------------------------------------- differences that are found


def test_a_difference_in_one_units_step_is_found() -> None:
    honest, other = (run_guarded(SCENARIOS["agc"], BACKENDS["numpy"]) for _ in range(2))
    tolerance = SCENARIOS["agc"].tolerance
    assert compare_traces("x", honest, other, tolerance).disagreement is None
    step = other.path[50][0] - other.path[49][0]
    for path in other.path[50:60]:  # and ten steps later the paths are equal again
        path[0][:, 1] += np.float32(1e-3) * step[:, 1]
    found = compare_traces("x", honest, other, tolerance).disagreement
    assert found is not None
    assert (found.step, found.field) == (50, "update of params[0]")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_single_updates_are_not_compared_in_half_precision(dtype: Any) -> None:
    before, ours, theirs = (np.full(2, value, dtype) for value in (1.0, 1.5, 1.25))
    found = update_difference(before, ours, before, theirs, tolerance=1e-5)
    assert found == ((0.5, 0.25) if dtype is np.float32 else None)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("adagc-late", ("clip", 0, "gamma", 2)),
        ("zclip", ("clip", 0, "std")),
        ("autoclip", ("clip", 0, "norms", 99)),
        ("spike-skip", ("spike", "grad_norm", 127)),
        ("log-max", ("loss_scale", "statistics", "mean")),
    ],
)
def test_a_difference_in_statistics_is_found(name: str, place: tuple[str | int, ...]) -> None:
    honest, other = (run_guarded(SCENARIOS[name], BACKENDS["numpy"]) for _ in range(2))
    *way, last = place
    part = functools.reduce(lambda tree, key: tree[key], way, other.guard["state"])
    part[last] *= 1.0 + 1e-3
    found = compare_traces("x", honest, other, SCENARIOS[name].tolerance).disagreement
    assert found is not None
    assert (found.step, found.field) == (None, ".".join(map(str, place)))


def test_a_run_that_ends_elsewhere_fails() -> None:
    stream = SCENARIOS["level-shift"]
    trace = on_numpy("level-shift")
    assert outcome_of(stream, trace) == Outcome.SURVIVES
    assert outcome_of(dataclasses.replace(stream, most_moved=0.01), trace) == Outcome.FAILS


def test_wrong_fields_of_a_scenario_are_named() -> None:
    for make, message in (
        (lambda: Fault(step=-1, kind="nan"), "faults.step must be a whole number"),
        (lambda: Fault(step=1, kind="bad"), "faults.kind must be 'nan', 'scale' or 'weight'"),
        (lambda: Fault(step=1, kind="scale", factor=math.inf), "faults.factor must be a finite number"),
        (lambda: Goal(measure="speed"), "goal.measure must be 'accuracy' or 'loss'"),
        (lambda: Goal(measure="loss", of_start="x"), "goal.of_start must be a finite number"),
        (
            lambda: Expected(plain="lives"),
            "expected.plain must be 'survives', 'dies', 'stalls', 'fails' or 'stops'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
