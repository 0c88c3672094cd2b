"""Runs of scenarios: on every backend with the guard, on every framework without it, and then the verdict."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from stablenum.commands.compare.agreement import Comparison, StepRow, Trace, compare_traces
from stablenum.commands.compare.backends import REFERENCE, Backend, Run, Setup
from stablenum.commands.compare.backends.numpy_models import evaluate
from stablenum.commands.compare.scenarios import Goal, Outcome, Scenario, Stream, Training
from stablenum.commands.compare.scenarios.stream_data import scaled_gradients, stream_params, stream_step
from stablenum.commands.compare.scenarios.training_data import batch_at, data_of, initial_params
from stablenum.errors import NonFiniteError, RecoveryStopped

__all__ = [
    "Result",
    "distances",
    "moved",
    "outcome_of",
    "run_guarded",
    "run_plain",
    "run_scenario",
    "steps_of",
    "why_left_out",
]

Array: TypeAlias = "np.ndarray[Any, Any]"
Tick: TypeAlias = Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Result:
    """The results of a scenario on all chosen backends.

    Attributes:
        scenario: what was run.
        guarded: a trace per backend, NumPy first.
        plain, clean: a trace per framework, by the name of its backend. The runs in ``plain`` have no guard;
            the runs in ``clean`` have neither guard nor faults, and exist if the goal is relative to clean
            training.
        left_out: the backends that do not run the scenario, and why.
        comparisons: one per backend other than NumPy.
        surprises: descriptions of unexpected outcomes.
    """

    scenario: Scenario
    guarded: dict[str, Trace] = field(default_factory=dict)
    plain: dict[str, Trace] = field(default_factory=dict)
    clean: dict[str, Trace] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    surprises: list[str] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        """Whether all backends agree with NumPy."""
        return all(c.disagreement is None for c in self.comparisons.values())

    @property
    def ok(self) -> bool:
        """Whether all backends agree and the outcome is as expected."""
        return self.agree and not self.surprises

    def outcome(self, trace: Trace) -> Outcome:
        """Return the outcome of one of this result's runs."""
        return outcome_of(self.scenario, trace, self._clean_score(trace.backend))

    def _clean_score(self, backend: str) -> float | None:
        trace = self.clean.get(backend) or next(iter(self.clean.values()), None)
        return trace.score if trace else None


def steps_of(scenario: Scenario, backends: Sequence[Backend], *, brief: bool = False) -> int:
    """Return how many runs :func:`run_scenario` makes, which is how often it calls ``tick``."""
    able = [b for b in backends if why_left_out(scenario, b, backends, brief=brief) is None]
    frameworks = len({b.framework for b in able})
    return len(able) + frameworks * (2 if _needs_clean(scenario) else 1)


def run_scenario(
    scenario: Scenario,
    backends: Sequence[Backend],
    *,
    check_expected: bool = True,
    brief: bool = False,
    tick: Tick = lambda: None,
) -> Result:
    """Run a scenario and compare the backends.

    Args:
        scenario: what to run.
        backends: the backends, of which NumPy is one.
        check_expected: whether to compare the outcome with ``scenario.expected``; pass False if the guard's
            settings are not the scenario's own.
        brief: whether backends leave out a scenario if another scenario covers the same rules.
        tick: called after every run.
    """
    result = Result(scenario=scenario)
    seen: set[str] = set()
    for backend in backends:
        reason = why_left_out(scenario, backend, backends, brief=brief)
        if reason is not None:
            result.left_out[backend.name] = reason
            continue
        result.guarded[backend.name] = run_guarded(scenario, backend)
        tick()
        if backend.framework in seen:
            continue
        seen.add(backend.framework)
        result.plain[backend.name] = run_plain(scenario, backend)
        tick()
        if _needs_clean(scenario):
            result.clean[backend.name] = run_plain(scenario, backend, faults=False)
            tick()
    _spread_clean(result, backends)
    reference = result.guarded[REFERENCE]
    for name, trace in result.guarded.items():
        if name != REFERENCE:
            result.comparisons[name] = compare_traces(scenario.name, reference, trace, scenario.tolerance)
    if check_expected:
        result.surprises = list(_surprises(result))
    for step, i in reference.changed.items():  # on other backends, changes are disagreements with NumPy
        result.surprises.append(
            f"{scenario.name}, {REFERENCE}, step {step}: params[{i}] changed in a skipped step"
        )
    return result


def why_left_out(
    scenario: Scenario, backend: Backend, backends: Sequence[Backend], *, brief: bool
) -> str | None:
    """Return why a backend does not run a scenario; None if it does.

    A brief run does not make the steps that one backend of a framework compiles on another without compiling.
    """
    reason = backend.why_not(scenario, brief=brief)
    if reason is None and brief and backend.mode == "eager":
        others = (b for b in backends if b.framework == backend.framework and b is not backend)
        twin = next((b for b in others if b.why_not(scenario, brief=True) is None), None)
        return None if twin is None else f"{twin.name} runs the same"
    return reason


def _spread_clean(result: Result, backends: Sequence[Backend]) -> None:
    """Use a framework's clean run for all its backends."""
    of_framework = {b.framework: result.clean[b.name] for b in backends if b.name in result.clean}
    for backend in backends:
        if backend.framework in of_framework and backend.name in result.guarded:
            result.clean.setdefault(backend.name, of_framework[backend.framework])


def _needs_clean(scenario: Scenario) -> bool:
    return isinstance(scenario, Training) and scenario.goal.below_clean is not None


# ---------------------------------------------------------------------------------------- runs


def run_guarded(scenario: Scenario, backend: Backend) -> Trace:
    """Run a scenario with its guard."""
    return _run(scenario, backend, plain=False, faults=True)


def run_plain(scenario: Scenario, backend: Backend, *, faults: bool = True) -> Trace:
    """Run a scenario without a guard, with the framework's bare optimizer."""
    return _run(scenario, backend, plain=True, faults=faults)


def _run(scenario: Scenario, backend: Backend, *, plain: bool, faults: bool) -> Trace:
    """Run once; the adapter's warnings go into the trace, and other warnings are issued as usual."""
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        trace = _train(scenario, backend, plain=plain, faults=faults)
    for warning in caught:
        if warning.category.__module__.startswith("stablenum"):
            trace.warnings.append(f"{warning.category.__name__}: {warning.message}")
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    trace.seconds = time.perf_counter() - begin
    return trace


def _train(scenario: Scenario, backend: Backend, *, plain: bool, faults: bool) -> Trace:
    training = scenario if isinstance(scenario, Training) else None
    start = initial_params(scenario) if isinstance(scenario, Training) else stream_params(scenario)
    recovery = scenario.recovery if isinstance(scenario, Stream) and not plain else None
    run = backend.start(
        Setup(
            params=start,
            optimizer=scenario.optimizer,
            guard=None if plain else scenario.guard,
            plain_clip=scenario.plain_clip if isinstance(scenario, Stream) else None,
            training=training,
            recovery=recovery,
        )
    )
    trace = Trace(backend=backend.name, start=start, params=start)
    numbers = iter(range(scenario.steps)) if recovery is None else run.batches(scenario.steps)
    before = start
    for step in itertools.count():
        try:
            number = next(numbers)
            if recovery is not None:  # the run may have gone back
                before = run.params()
            _one_step(scenario, run, number, faults=faults)
        except StopIteration:
            break
        except RecoveryStopped as stopped:
            trace.stopped = str(stopped)
            break
        except NonFiniteError as error:
            trace.stopped = str(error)
        last = run.last
        if plain:
            trace.losses.append(float(last.get("loss", math.nan)))
            if training is None and backend.name == REFERENCE:
                trace.path.append(run.params())
        else:
            trace.rows.append(_row(last))
            if run.norms is not None:
                trace.norms.append(run.norms)
            trace.skipped = int(last["skipped_total"])
            now = run.params()  # copied at every step, because a skip is known only after the step
            changed = None if last["applied"] else _first_change(before, now)
            if changed is not None:
                trace.changed[step] = changed
            before = now
            if training is None:  # with a model, gradients depend on the parameters, and differences grow
                trace.path.append(now)
        if trace.stopped is not None:
            break
    if recovery is not None:
        trace.rewinds = run.rewinds
    trace.final_loss_scale = run.loss_scale
    trace.params = run.params()
    trace.guard = run.guard_state_dict()
    if training is not None:
        trace.score = evaluate(training, trace.params, data_of(training), training.goal.measure)
    return trace


def _one_step(scenario: Scenario, run: Run, step: int, *, faults: bool) -> None:
    if isinstance(scenario, Training):
        run.train(batch_at(scenario, step, faults=faults))
        return
    gradients, loss = stream_step(scenario, step)
    run.step(scaled_gradients(scenario, gradients, run.loss_scale), float(loss))


def _first_change(before: Sequence[Array], after: Sequence[Array]) -> int | None:
    """Return the index of the first parameter that changed in any bit; None if no parameter changed."""
    pairs = enumerate(zip(before, after, strict=True))
    return next((i for i, (p, q) in pairs if p.tobytes() != q.tobytes()), None)


def _row(last: Mapping[str, Any]) -> StepRow:
    return StepRow(
        applied=bool(last["applied"]),
        reason=last["reason"],
        worst=int(last["worst"].index),
        loss_scale=float(last["loss_scale"]),
        grad_norm=float(last["grad_norm"]),
        clip_coefficient=float(last["clip_coefficient"]),
        loss=float(last["loss"]),
        precision_level=int(last["precision_level"]),
    )


# ------------------------------------------------------------------------------------- verdict


def outcome_of(scenario: Scenario, trace: Trace, clean_score: float | None = None) -> Outcome:
    """Return the outcome of a run. See :class:`Outcome`."""
    if not all(np.isfinite(p.astype(np.float32)).all() for p in trace.params):
        return Outcome.DIES
    if trace.stopped is not None:
        return Outcome.STOPS
    pairs = zip(trace.start, trace.params, strict=True)
    if all(p.tobytes() == q.tobytes() for p, q in pairs) and _had_gradient(scenario):
        return Outcome.STALLS
    if isinstance(scenario, Training) and not _reached(scenario, trace, clean_score):
        return Outcome.FAILS
    if isinstance(scenario, Stream) and scenario.most_moved is not None:
        return Outcome.FAILS if _moved(trace) > scenario.most_moved else Outcome.SURVIVES
    return Outcome.SURVIVES


def _had_gradient(scenario: Scenario) -> bool:
    """Return whether there was anything to learn from: a finite, nonzero gradient of the unscaled loss."""
    if isinstance(scenario, Training):
        return True
    steps = (stream_step(scenario, step).gradients for step in range(scenario.steps))
    return any(np.isfinite(g).all() and np.any(g != 0) for gradients in steps for g in gradients)


def moved(trace: Trace) -> list[float]:
    """Return how far each tensor is from its start, as a root mean square; 0 for an empty tensor."""
    pairs = zip(trace.start, trace.params, strict=True)
    away = [q.astype(np.float64) - p.astype(np.float64) for p, q in pairs]
    return [float(np.sqrt(np.mean(a * a))) if a.size else 0.0 for a in away]


def distances(trace: Trace) -> list[float]:
    """Return how far the parameters are from their start after each step, as a root mean square."""
    start = _flat(trace.start)
    if not start.size:
        return [0.0] * len(trace.path)
    with np.errstate(invalid="ignore", over="ignore"):
        return [float(np.sqrt(np.mean((_flat(params) - start) ** 2))) for params in trace.path]


def _flat(params: Sequence[Array]) -> Array:
    return np.concatenate([np.zeros(0), *(p.astype(np.float64).ravel() for p in params)])


def _moved(trace: Trace) -> float:
    """Return the distance from its start of the tensor that moved furthest."""
    return max(moved(trace), default=0.0)


def _reached(training: Training, trace: Trace, clean_score: float | None) -> bool:
    goal, score = training.goal, trace.score
    if score is None or not math.isfinite(score):
        return False
    if goal.at_least is not None:
        return score >= goal.at_least
    if goal.below_clean is not None:
        return clean_score is not None and score >= clean_score - goal.below_clean
    return score <= _score_at_start(training, goal) * (goal.of_start or 1.0)


def _score_at_start(training: Training, goal: Goal) -> float:
    return evaluate(training, initial_params(training), data_of(training), goal.measure)


def _surprises(result: Result) -> Iterator[str]:
    """Yield a description of each outcome that is not as expected."""
    expected, name = result.scenario.expected, result.scenario.name
    for kind, traces, wanted in (
        ("plain", result.plain, expected.plain),
        ("guarded", result.guarded, expected.guarded),
    ):
        for backend, trace in traces.items():
            got = result.outcome(trace)
            if wanted is not None and got != wanted:
                yield f"{name}, {backend}, {kind}: expected that it {wanted}, but it {got}{_score(trace)}"
    for backend, trace in result.guarded.items():
        if expected.skips is not None and trace.skipped != expected.skips:
            yield f"{name}, {backend}: expected {expected.skips} skipped steps, got {trace.skipped}"
        if expected.rewinds is not None and len(trace.rewinds) != expected.rewinds:
            yield f"{name}, {backend}: expected {expected.rewinds} rewinds, got {len(trace.rewinds)}"
        if expected.final_loss_scale is not None and trace.final_loss_scale != expected.final_loss_scale:
            yield (
                f"{name}, {backend}: expected a loss scale of {expected.final_loss_scale:g} at the end, "
                f"got {trace.final_loss_scale:g}"
            )
        distances = moved(trace)
        if expected.moved is not None and not _as_far(distances, expected.moved):
            yield (
                f"{name}, {backend}: expected that the tensors move by {_listed(expected.moved)}, "
                f"got {_listed(distances)}"
            )


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _as_far(distances: Sequence[float], expected: Sequence[float]) -> bool:
    """Return whether tensors moved as far as expected, within a thousandth."""
    pairs = zip(distances, expected, strict=True)
    return all(math.isclose(got, wanted, rel_tol=1e-3) for got, wanted in pairs)


def _score(trace: Trace) -> str:
    return "" if trace.score is None else f" (score {trace.score:.4g})"
