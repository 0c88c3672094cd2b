"""The planted faults: the trainings learn, the faults harm, and the ways of running are judged as stated."""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from benchmarks.recovery import run as benchmark
from benchmarks.recovery.data import QUIET, STREAMS
from benchmarks.recovery.faults import DELAYS, FAULTS, SHOWS, STRETCH, flipped, nothing
from benchmarks.recovery.judge import WITHIN, shown_after, verdict
from benchmarks.recovery.once import CLEAN, OURS, PLAIN, Training, rows
from benchmarks.recovery.runs import EVALUATE_AT, PROGRAMS, STEPS, first_weights
from benchmarks.recovery.ways import MOST_LOADS, WAYS, Outcome
from benchmarks.steps.errors import BenchmarkError
from tests.selection import only, slow_but_for

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "recovery.json"
OF_THE_DATA = ("shuffled labels", "values x 1e4")


@functools.cache
def training(framework: str, program: str = "digits") -> Training:
    return Training(framework, program, 0)


@functools.cache
def clean(framework: str) -> Outcome:
    """The clean run on the digits; a module's worth of tests compares with it."""
    of = training(framework)
    return WAYS[PLAIN](of.make, of.stream.at, nothing())


def ran(framework: str, fault: str, delay: int, way: str) -> Outcome:
    of = training(framework)
    return WAYS[way](of.make, of.stream.at, FAULTS[fault](delay))


# --- the trainings --------------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", benchmark.FRAMEWORKS)
def test_a_clean_run_learns_and_is_the_same_again(framework):
    of = training(framework)
    untrained = of.make(None).evaluate()
    assert clean(framework).run.evaluate() < 0.4 * untrained
    again = WAYS[PLAIN](of.make, of.stream.at, nothing())
    assert again.losses == clean(framework).losses
    assert again.evaluations == clean(framework).evaluations
    assert clean(framework).run.updates() == STEPS


@pytest.mark.parametrize("program", PROGRAMS)
def test_both_frameworks_run_the_same_program(program):
    losses = []
    for framework in benchmark.FRAMEWORKS:
        of = training(framework, program)
        one = of.make(None)
        losses.append([one.step(of.stream.at(i)) for i in range(12)] + [one.evaluate()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][11] < losses[0][0]


@pytest.mark.parametrize("framework", benchmark.FRAMEWORKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_loaded_run_goes_on_with_the_same_bits(framework, program):
    of = training(framework, program)
    one = of.make(None)
    for i in range(3):
        one.step(of.stream.at(i))
    saved = one.save()
    first = [one.step(of.stream.at(i)) for i in range(3, 6)]
    one.edit("v", lambda v: np.full_like(v, np.nan))
    one.edit("statistics", lambda x: np.full_like(x, np.nan))
    one.set_rate(100.0)
    assert not one.finite()
    for _ in range(2):  # the steps after a load do not change what was saved
        one.load(saved)
        assert one.finite()
        assert [one.step(of.stream.at(i)) for i in range(3, 6)] == first


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_rare_source_is_missing_from_the_quiet_stretch_alone(program):
    at = STREAMS[program](0).at
    has_it = [bool(at(i).source.any()) for i in range(STEPS)]
    assert has_it == [not QUIET[0] <= i < QUIET[1] for i in range(STEPS)]
    other = STREAMS[program](1).at(0)
    assert not np.array_equal(other.inputs, at(0).inputs)


@pytest.mark.parametrize("framework", benchmark.FRAMEWORKS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_reads_the_rare_table_in_the_quiet_stretch(framework, program):
    of = training(framework, program)
    losses = []
    for poisoned in (False, True):
        one = of.make(None)
        if poisoned:
            one.edit("rare", lambda table: np.full_like(table, np.nan))
        losses.append([one.step(of.stream.at(QUIET[0] + i)) for i in range(3)])
    assert losses[0] == losses[1]
    assert math.isnan(one.step(of.stream.at(QUIET[1])))


# --- the faults -----------------------------------------------------------------------------------------


def test_a_flipped_bit_changes_one_weight():
    weights = first_weights("digits", 0)["rare"]
    wrong = flipped(weights.copy())
    (where,) = np.nonzero(wrong.reshape(-1) != weights.reshape(-1))
    assert where.tolist() == [0]
    assert float(wrong[0, 0]) == float(weights[0, 0]) * 2.0**128
    np.testing.assert_array_equal(flipped(wrong.copy()), weights)


@pytest.mark.parametrize("fault", OF_THE_DATA)
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_bad_data_grow_to_their_full_size_and_end(program, fault, delay):
    planted, at = FAULTS[fault](delay), STREAMS[program](0).at

    def wrong(position: int) -> float:
        was, now = at(position), planted.batch(position, at(position))
        parts = ("targets",) if fault == "shuffled labels" else ("inputs", "weights")
        return float(sum(np.mean(getattr(now, part) != getattr(was, part)) for part in parts))

    assert planted.cause == SHOWS - delay
    assert wrong(SHOWS - delay - 1) == wrong(SHOWS + STRETCH) == 0.0
    assert sum(wrong(SHOWS + i) > 0.0 for i in range(STRETCH)) > 0.7 * STRETCH
    assert wrong(SHOWS + 1) == wrong(SHOWS + 1), "the same data come again"


@pytest.mark.parametrize("delay", only((100,), DELAYS))
def test_a_flipped_bit_shows_as_many_steps_after_its_cause(delay):
    planted = FAULTS["flipped exponent bit"](delay)
    plain = ran("torch", "flipped exponent bit", delay, PLAIN)
    assert shown_after(plain, clean("torch"), planted.cause) == {"differs": delay, "stands_out": delay}


HARMFUL = [("torch", "stale second moments"), ("torch", "shuffled labels"), ("jax", "huge second moments")]


@pytest.mark.parametrize(
    ("framework", "fault"), slow_but_for(HARMFUL, itertools.product(benchmark.FRAMEWORKS, FAULTS))
)
def test_a_run_without_protection_does_not_recover(framework, fault):
    row = verdict(ran(framework, fault, 10, PLAIN), clean(framework))
    assert row["ended"]
    assert not row["recovered"]


def test_statistics_that_are_nan_show_at_the_evaluation_and_in_no_loss():
    planted = FAULTS["NaN statistics"](10)
    plain = ran("torch", "NaN statistics", 10, PLAIN)
    assert plain.losses == clean("torch").losses
    assert shown_after(plain, clean("torch"), planted.cause) == {"differs": 10, "stands_out": 10}
    assert math.isnan(plain.evaluations[EVALUATE_AT[1]])


@pytest.mark.parametrize("outside", [False, True])
def test_a_wrong_rate_is_mended_after_fifty_steps(outside):
    planted = FAULTS["rate x 100, from outside" if outside else "rate x 100, in the state"](10)
    start, end = sorted(planted.events)
    assert (start, end) == (SHOWS - 10, SHOWS + 40)
    of = training("torch")
    moved = []
    for made in (0, start, end):
        one = of.make(None)
        one.step(of.stream.at(0))
        planted.before(one, start if made else 0)
        planted.before(one, made)
        before = one.model.w["rare"].detach().clone()
        one.step(of.stream.at(1))
        moved.append(float((one.model.w["rare"].detach() - before).norm()))
    assert moved[1] == pytest.approx(100.0 * moved[0], rel=1e-3)
    assert moved[2] == pytest.approx(moved[0], rel=1e-6)


# --- the ways of running --------------------------------------------------------------------------------


def test_the_last_checkpoint_helps_if_it_is_older_than_the_cause():
    good = ran("torch", "negative second moments", 10, "last checkpoint")
    assert good.ended
    assert good.attempts == 1
    assert good.losses == clean("torch").losses, "the same data, and no fault the second time"
    poisoned = ran("torch", "negative second moments", 100, "last checkpoint")
    assert not poisoned.ended
    assert poisoned.attempts == MOST_LOADS
    assert not verdict(poisoned, clean("torch"))["recovered"]


def test_a_skip_ends_in_a_state_that_stays_poisoned():
    outcome = ran("torch", "negative second moments", 1, "single-step skip")
    row = verdict(outcome, clean("torch"))
    assert row["lost"] == STEPS - SHOWS, "every step with the rare source is skipped"
    assert not row["recovered"]


@pytest.mark.parametrize("framework", benchmark.FRAMEWORKS)
def test_a_recovered_run_is_the_clean_run_on_the_data_that_it_kept(framework):
    outcome = ran(framework, "negative second moments", 10, OURS)
    control = training(framework).control(outcome)
    assert outcome.attempts == 1
    assert [outcome.positions[i] for i in (0, 100)] != [0, 100], "data were left out"
    assert outcome.losses == control.losses
    row = verdict(outcome, clean(framework), control)
    assert row["recovered"]
    assert row["same_bits"]
    assert row["lost"] == outcome.made - STEPS > 0


def test_the_rows_of_a_training():
    of = training("torch")
    first, *found = rows(of, faults=(CLEAN, "NaN statistics"), delays=(10,), ways=(PLAIN, OURS))
    assert first["clean"] == clean("torch").run.evaluate()
    assert len(set(first["other_orders"])) == 4
    assert [(r["fault"], r["way"], r["recovered"]) for r in found] == [
        (CLEAN, PLAIN, True),
        (CLEAN, OURS, True),
        ("NaN statistics", PLAIN, False),
        ("NaN statistics", OURS, True),
    ]
    assert found[1]["attempts"] == 0, "no false alarm"
    assert found[2]["stands_out"] == 10
    json.dumps(found, allow_nan=False)


# --- the verdict and the summary ------------------------------------------------------------------------


class _Ended:
    """A run of which only the end is known."""

    def __init__(self, final: float, finite: bool = True) -> None:
        self._final, self._finite = final, finite

    def evaluate(self) -> float:
        return self._final

    def finite(self) -> bool:
        return self._finite

    def updates(self) -> int:
        return STEPS


def _outcome(final: float, *, finite: bool = True, ended: bool = True) -> Outcome:
    run: Any = _Ended(final, finite)
    return Outcome(run, losses=dict.fromkeys(range(STEPS), final), ended=ended, made=STEPS + 7)


@pytest.mark.parametrize(
    ("outcome", "same_data", "recovered"),
    [
        (_outcome(WITHIN), None, True),
        (_outcome(WITHIN + 1e-3), None, False),
        (_outcome(1.0, finite=False), None, False),
        (_outcome(1.0, ended=False), None, False),
        (_outcome(math.nan), None, False),
        (_outcome(0.97), _outcome(0.97), True),
        (_outcome(1.0), _outcome(0.97), False),  # better data hide what is left of the fault
    ],
)
def test_a_run_has_recovered_if_all_of_these_hold(outcome, same_data, recovered):
    row = verdict(outcome, _outcome(1.0), same_data)
    assert row["recovered"] is recovered
    assert row["lost"] == 7
    json.dumps(row, allow_nan=False)


def _row(program: str, seed: int, way: str, recovered: bool, lost: int, fault: str = "x") -> dict[str, Any]:
    of = {"framework": "jax", "program": program, "seed": seed, "fault": fault, "delay": 10, "way": way}
    return of | {"recovered": recovered, "lost": lost, "over_clean": 0.0}


def test_the_summary_counts_tuned_and_held_out_trainings_apart():
    of = (("digits", 0, True, 3), ("digits", 2, False, 5), ("transformer", 1, True, 9))
    found = [_row(program, seed, OURS, recovered, lost) for program, seed, recovered, lost in of]
    lines = benchmark.summary(found)
    counts = {(r["split"], r["delay"]): (r["recovered"], r["faults"], r["lost"]) for r in lines}
    tuned, held_out = (1, 1, 3), (1, 2, 9)
    assert counts == {
        ("tuned", 10): tuned,
        ("tuned", None): tuned,
        ("held out", 10): held_out,
        ("held out", None): held_out,
    }
    assert benchmark.table(found).row_count == 4


def test_a_fault_without_harm_is_not_counted():
    found = [_row("digits", 0, way, way == OURS, 3) for way in (PLAIN, OURS)]
    found += [_row("digits", 0, way, True, 0, fault="harmless") for way in (PLAIN, OURS)]
    found += [_row("digits", 0, way, True, 0, fault=CLEAN) for way in (PLAIN, OURS)]
    assert [row["fault"] for row in benchmark.harmful(found)] == ["x", "x"]
    lines = {(r["delay"], r["way"]): (r["recovered"], r["faults"]) for r in benchmark.summary(found)}
    assert lines[10, OURS] == (1, 1)
    assert lines[10, PLAIN] == (0, 1)


def test_every_row_says_of_which_training_it_is():
    class Kept:
        def part(self, name: str, measure: Any) -> dict[str, Any]:
            return {
                framework: [{"clean": 1.0, "other_orders": []}, {"fault": f"{name}, {framework}"}]
                for framework in benchmark.FRAMEWORKS
            }

    kept: Any = Kept()
    report = benchmark.run(kept, trainings=(("digits", 3),))
    of = [{"framework": name, "program": "digits", "seed": 3} for name in benchmark.FRAMEWORKS]
    assert report["spread"] == [one | {"clean": 1.0, "other_orders": []} for one in of]
    assert report["rows"] == [one | {"fault": f"digits, seed 3, {one['framework']}"} for one in of]


def test_a_training_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BenchmarkError, match="digits, seed 0, torch, jax failed"):
        benchmark._side_by_side("digits", 0)()


# --- what was measured ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text(encoding="utf-8")))


@pytest.fixture
def recoveries(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the docs folder that writes the tables."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return __import__("recoveries")


def test_everything_was_measured(report):
    cells = {
        (r["framework"], r["program"], r["seed"], r["fault"], r["delay"], r["way"]) for r in report["rows"]
    }
    assert len(cells) == len(report["rows"])
    faults = [(CLEAN, 0), *((fault, delay) for fault in FAULTS for delay in DELAYS)]
    assert cells == {
        (framework, program, seed, fault, delay, way)
        for framework in benchmark.FRAMEWORKS
        for program, seed in benchmark.TRAININGS
        for fault, delay in faults
        for way in WAYS
    }


def test_without_protection_every_fault_does_harm_to_the_digits(report):
    plain = [r for r in report["rows"] if r["way"] == PLAIN]
    assert {r["recovered"] for r in plain if r["fault"] == CLEAN} == {True}
    assert [r for r in plain if r["program"] == "digits" and r["fault"] != CLEAN and r["recovered"]] == []


def test_faults_of_the_state_show_when_they_should(report):
    """A fault that works in an update may show in the loss after it."""
    plain = [r for r in report["rows"] if r["way"] == PLAIN and r["fault"] in set(FAULTS) - {*OF_THE_DATA}]
    assert {r["differs"] - r["delay"] for r in plain} <= {0, 1}


def test_most_clean_runs_on_other_orders_are_within_the_bound(report):
    """Otherwise the bound would judge the order of the data."""
    over = [loss / one["clean"] - 1.0 for one in report["spread"] for loss in one["other_orders"]]
    assert sum(abs(x) < WITHIN - 1.0 for x in over) > 0.75 * len(over)


def test_the_tables_show_what_was_measured(recoveries, tmp_path):
    recoveries.write_recoveries(RESULTS, tmp_path)
    summary = (tmp_path / "recovery-summary.md").read_text(encoding="utf-8")
    line = next(r for r in benchmark.summary(json.loads(RESULTS.read_text())["rows"]) if r["way"] == OURS)
    assert f"| {line['split']} | {OURS} | {line['recovered']} of {line['faults']} |" in summary
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    ours = [r for r in benchmark.harmful(measured) if r["way"] == OURS]
    missed = [r for r in ours if not r["recovered"]]
    unseen = sum(not r["attempts"] for r in missed)
    assert (f"{unseen} never went back" if missed else f"All {len(ours)} harmed runs") in summary
    faults = (tmp_path / "recovery-faults.md").read_text(encoding="utf-8")
    assert all(f"| {fault} |" in faults for fault in FAULTS)


def test_before_it_is_measured_the_tables_say_how(recoveries, tmp_path):
    recoveries.write_recoveries(tmp_path / "missing.json", tmp_path)
    assert "python -m benchmarks recovery" in (tmp_path / "recovery-summary.md").read_text(encoding="utf-8")
