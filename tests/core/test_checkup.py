"""The core of the checkup: what is measured of a tensor and of an update, the order of complaints."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import pytest

from stablenum.diagnosis.checkup.course import (
    Course,
    Loss,
    ParameterSeen,
    Probe,
    Running,
    measure_update,
    median,
)
from stablenum.diagnosis.checkup.ranking import ranked
from stablenum.diagnosis.checkup.reading import Reading
from stablenum.diagnosis.checkup.report import Checkup
from stablenum.diagnosis.checkup.rules_data import RULES as DATA
from stablenum.diagnosis.checkup.rules_functions import RULES as FUNCTIONS
from stablenum.diagnosis.checkup.rules_normalisation import LAGGING, SLOW
from stablenum.diagnosis.checkup.rules_normalisation import RULES as NORMALISATION
from stablenum.diagnosis.checkup.rules_updates import BY_RATE
from stablenum.diagnosis.checkup.rules_updates import RULES as UPDATES
from stablenum.diagnosis.checkup.signals import Signal, measure_signal
from stablenum.diagnosis.checkup.symptoms import SYMPTOMS, Complaint, Level, Symptom
from stablenum.diagnosis.checkup.wording import lines_assigning, lines_naming
from stablenum.diagnosis.replay.values import Place


def signal(x: np.ndarray, operation: str = "", unit_axis: int = -1) -> Signal:
    return Signal.of(x.shape, x.dtype.name, measure_signal(x, operation, unit_axis=unit_axis, xp=xp))


def test_a_signal_agrees_with_plain_python() -> None:
    x = np.random.default_rng(0).normal(2.0, 3.0, (7, 5))
    x[:, 1] = 0.0
    found = signal(x)
    flat = x.ravel().tolist()
    assert found.rms == pytest.approx(math.sqrt(sum(v * v for v in flat) / 35))
    assert found.mean == pytest.approx(sum(flat) / 35)
    assert (found.least, found.greatest) == (min(flat), max(flat))
    assert found.zero == pytest.approx(7 / 35)
    assert found.dead == pytest.approx(1 / 5)
    means = [sum(x[i, j] for i in range(7)) / 7 for j in range(5)]
    around = math.sqrt(sum((x[i, j] - means[j]) ** 2 for i in range(7) for j in range(5)) / 35)
    assert found.spread == pytest.approx(around / found.rms)
    assert found.norm == pytest.approx(math.sqrt(sum(v * v for v in flat)))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_of_float32_values_neither_overflows_nor_vanishes(size: float) -> None:
    assert signal(np.full((3, 4), size, np.float32)).rms == pytest.approx(size, rel=1e-6)


def test_zeros_and_single_numbers_are_measured() -> None:
    zeros = signal(np.zeros((2, 3), np.float32))
    assert (zeros.rms, zeros.dead, zeros.spread) == (0.0, 1.0, 0.0)
    one = signal(np.asarray(2.0))
    assert one.rms == 2.0
    assert math.isnan(one.dead)


def test_the_unit_axis_says_what_a_channel_is() -> None:
    x = np.ones((2, 3, 4, 4), np.float32)
    x[:, 0] = 0.0
    assert signal(x, unit_axis=1).dead == pytest.approx(1 / 3)
    assert signal(x, unit_axis=-1).dead == 0.0


def test_saturation_load_and_entropy() -> None:
    assert signal(np.asarray([0.001, 0.5, 0.999, 0.995]), "sigmoid").saturated == 0.75
    assert signal(np.asarray([-0.999, 0.0]), "tanh").saturated == 0.5
    rows = signal(np.asarray([[1.0, 0.0], [0.5, 0.5]]), "softmax")
    assert (rows.saturated, rows.used) == (0.5, pytest.approx(1 / (0.75**2 + 0.25**2)))
    assert rows.entropy == pytest.approx(0.5)


def test_an_update_agrees_with_plain_python() -> None:
    w, g = np.asarray([3.0, 4.0, 0.0]), np.asarray([1.0, 0.0, 2.0])
    after = np.asarray([2.7, 3.6, 0.0])
    weight, gradient, zero, update, still, shrink, apart, rise = measure_update(w, after, g, xp=xp)
    assert weight == pytest.approx(math.sqrt(25 / 3))
    assert gradient == pytest.approx(math.sqrt(5 / 3))
    assert zero == pytest.approx(1 / 3)
    assert update == pytest.approx(math.sqrt(0.25 / 3))
    assert still == 0.5  # of the two elements with a gradient, the last has not moved
    assert shrink == pytest.approx(0.1)
    assert math.isnan(apart)
    assert rise == pytest.approx(0.0)  # the change is along the parameter itself


def test_the_part_of_a_change_along_the_gradient_leaves_weight_decay_out() -> None:
    rng = np.random.default_rng(0)
    w, g = rng.normal(size=(2, 5, 7))
    plain = measure_update(w, w + 0.1 * g, g, xp=xp)[-1]
    decayed = measure_update(w, w + 0.1 * g - 0.9 * w, g, xp=xp)[-1]
    assert plain == pytest.approx(0.1 * (np.mean(g * g) - np.mean(w * g) ** 2 / np.mean(w * w)))
    assert decayed == pytest.approx(plain)


@pytest.mark.parametrize(
    ("weights", "gradient", "apart"),
    [
        ([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], [[3.0, 4.0]] * 3, 0.0),
        ([[1.0, 1.0], [2.0, 2.0]], [[3.0, 3.0], [4.0, 4.0]], 0.0),
        # As far apart as the gradients of the units.
        ([[1.0, 1.0], [1.0, 1.0]], [[1.0, 3.0], [3.0, 1.0]], 1 / math.sqrt(5)),
        ([[1.0, 2.0]], [[1.0, 1.0]], 0.5 / math.sqrt(2.5)),
    ],
)
def test_units_are_apart_by_their_weights_or_their_gradients(
    weights: list[object], gradient: list[object], apart: float
) -> None:
    w, g = np.asarray(weights), np.asarray(gradient)
    assert measure_update(w, w, g, xp=xp)[-2] == pytest.approx(apart)


def test_lines_that_name_a_format_or_assign_a_name_are_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        '"""Train in half precision."""\n# half of it\nmodel = model.half()\n'
        'params = {\n    "experts": start,\n}\nexperts = params["experts"]\nif experts == 1:\n    pass\n'
    )
    place = Place(file=str(script), line=1)
    assert [p.line for p in lines_naming("float16", place)] == [3]
    assert lines_naming("float32", place) == ()
    assert [p.line for p in lines_assigning("experts.0.w", place)] == [5, 7]
    assert lines_assigning("experts", None) == ()


def course(values: list[float]) -> Course:
    return Course(framework="torch", steps=len(values), losses=[Loss(i, v) for i, v in enumerate(values)])


@pytest.mark.parametrize(
    ("values", "fall"),
    [([4.0, 3.0, 2.0, 1.0], 0.75), ([1.0, 1.0, 1.0, 3.0], -2.0), ([0.0, 0.0, 0.0, 0.0], 0.0)],
)
def test_the_fall_of_a_loss(values: list[float], fall: float) -> None:
    assert course(values).fall() == pytest.approx(fall)


def test_the_fall_is_not_known_of_few_losses_and_of_losses_around_zero() -> None:
    assert math.isnan(course([1.0, 0.5]).fall())
    assert math.isnan(course([1.0, -0.5, 0.3, -0.2]).fall())


def test_the_losses_of_two_lines_are_not_mixed() -> None:
    both = Course(framework="torch", steps=4)
    from stablenum.diagnosis.replay.values import Place

    a, b = Place("gan.py", 1), Place("gan.py", 2)
    both.losses = [Loss(0, 1.0, a), Loss(1, 9.0, b), Loss(2, 0.5, a), Loss(3, 9.0, b), Loss(4, 0.4, a)]
    assert both.values == [1.0, 0.5, 0.4]


def test_the_median_leaves_nan_out() -> None:
    assert median([1.0, math.nan, 3.0]) == 2.0
    assert math.isnan(median([]))


def complaint(symptom: Symptom, level: Level = Level.FAULT) -> Complaint:
    return Complaint.of(symptom, level, "seen")


def test_consequences_stand_under_their_cause() -> None:
    found = ranked(map(complaint, (Symptom.LOSS_CONSTANT, Symptom.ZERO_GRADIENT, Symptom.FLUSHED_GRADIENTS)))
    assert [c.symptom for c in found] == [Symptom.FLUSHED_GRADIENTS]
    assert {c.symptom for c in found[0].consequences} == {Symptom.LOSS_CONSTANT, Symptom.ZERO_GRADIENT}


def test_a_cause_is_as_serious_as_its_consequences() -> None:
    note = complaint(Symptom.EXPLODING_ACTIVATIONS, Level.NOTE)
    (root,) = ranked([complaint(Symptom.DEAD_UNITS), note])
    assert (root.symptom, root.level) == (Symptom.EXPLODING_ACTIVATIONS, Level.FAULT)


def test_statistics_follow_from_large_steps_only_if_they_lag_behind() -> None:
    large, unused = map(complaint, (Symptom.STEPS_TOO_LARGE, Symptom.BATCH_NORM))
    assert [c.symptom for c in ranked((large, unused))] == [Symptom.BATCH_NORM, Symptom.STEPS_TOO_LARGE]
    (first,) = ranked((large, unused.with_(cure=LAGGING)))
    assert first.symptom is Symptom.STEPS_TOO_LARGE


def statistics(size: float) -> Signal:
    """The signal of equal running statistics of this size."""
    return signal(np.full(4, size))


def lagging(momentum: float, measured: int, variance: float, steps: int = 250) -> list[Complaint]:
    """What is said of a variance that a step has read, with batches of variance 0.1 and mean 0."""
    norm = Running(
        "bn", None, (), statistics(0.0), statistics(variance), 0.0, batch_variance=0.1, momentum=momentum
    )
    seen = course([1.0] * steps)
    seen.probes = [Probe(step=measured, running=(norm,))]
    return [c for rule in NORMALISATION for c in rule(seen, [Reading(p) for p in seen.probes])]


def test_an_initial_variance_that_has_not_worn_off_is_no_fault_of_the_steps() -> None:
    after_120 = 0.99**120  # the part of the initial 1 that is left
    assert lagging(0.01, 120, after_120 + 0.1 * (1 - after_120)) == []
    (apart,) = lagging(0.01, 120, 5.0)
    assert apart.cure == LAGGING
    assert apart.evidence[0].startswith("after 120 steps its running variance is 50 times")


def test_a_new_batch_that_counts_too_little_for_the_whole_training_is_named() -> None:
    (slow,) = lagging(0.001, 120, 0.99)
    assert slow.cure == SLOW
    assert "of which 78% is left after 250 steps" in slow.evidence[0]


@pytest.mark.parametrize("cure", [LAGGING, SLOW])
@pytest.mark.parametrize("other", [Symptom.STEPS_TOO_SMALL, Symptom.NO_GRADIENT, Symptom.RATE_ZERO])
def test_statistics_that_no_training_step_reads_explain_no_training(cure: str, other: Symptom) -> None:
    norm = complaint(Symptom.BATCH_NORM, Level.WARNING).with_(cure=cure)
    first, second = ranked((norm, complaint(other, Level.WARNING)))
    assert (first.symptom, second.symptom) == (other, Symptom.BATCH_NORM)


def moved(step: int, by: float) -> Probe:
    """A measured step in which a weight of size 1 changed by so much."""
    return Probe(step=step, parameters=(ParameterSeen("w", (4, 4), "float32", weight=1.0, update=by),))


@pytest.mark.parametrize(
    ("rates", "shown"),
    [
        ([1.0, 3.0, 2.0, 1e-5], "changes by 0.5 of its size per step, at rates from 2 to 3"),
        ([3.0, 3.0, 3.0, 1e-5], "changes by 0.5 of its size per step, at a rate of 3"),
        ([], "changes by 0.5 of its size per step"),
    ],
)
def test_large_steps_are_shown_with_the_rates_at_which_they_were_measured(
    rates: list[float], shown: str
) -> None:
    seen = course([1.0, 2.0, 4.0, 4.0])
    seen.rates = list(enumerate(rates))
    # At step 0, as at the beginning of a warm-up, nothing moved; step 3 was not measured.
    seen.probes = [moved(0, 0.0), moved(1, 0.6), moved(2, 0.4)]
    (found,) = (c for rule in UPDATES for c in rule(seen, []) if c.symptom is Symptom.STEPS_TOO_LARGE)
    assert found.evidence[0] == f"the median weight {shown}"


def climbing(rises: list[float], values: list[float]) -> list[Complaint]:
    """What is said of steps with these cosines between change and gradient, both of size 1."""
    seen = course(values)
    one = ParameterSeen("w", (4, 4), "float32", weight=1.0, gradient=1.0, update=1.0)
    seen.probes = [Probe(step=i, parameters=(one._replace(rise=rise),)) for i, rise in enumerate(rises)]
    return [c for rule in UPDATES for c in rule(seen, []) if c.symptom is Symptom.UPHILL_UPDATES]


def test_updates_in_the_direction_of_the_gradient_are_named_if_the_loss_rises() -> None:
    (found,) = climbing([0.9, 0.5, 0.4, 0.6], [1.0, 2.0, 4.0, 8.0])
    assert found.level is Level.WARNING
    assert "in 4 of 4 measured steps" in found.evidence[0]
    assert climbing([0.9, 0.5, -0.4, 0.6], [1.0, 2.0, 4.0, 8.0]) == []  # momentum may overshoot
    assert climbing([0.9, 0.5, 0.4, 0.6], [8.0, 4.0, 2.0, 1.0]) == []
    assert climbing([0.9, 0.5], [1.0, 2.0, 4.0, 8.0]) == []


def test_a_likelihood_that_rises_is_only_noted() -> None:
    (found,) = climbing([0.9, 0.5, 0.4], [-4.0, -3.0, -2.0, -1.0])
    assert found.level is Level.NOTE


def test_a_loss_that_grows_follows_from_updates_that_climb() -> None:
    found = (Symptom.LOSS_DIVERGES, Symptom.STEPS_TOO_LARGE, Symptom.UPHILL_UPDATES)
    (first,) = ranked(map(complaint, found))
    assert first.symptom is Symptom.UPHILL_UPDATES
    assert len(first.consequences) == 2


def test_a_usual_weight_decay_follows_from_a_large_rate() -> None:
    large, decay = map(complaint, (Symptom.STEPS_TOO_LARGE, Symptom.WEIGHT_DECAY))
    (first,) = ranked((large, decay))
    assert first.symptom is Symptom.WEIGHT_DECAY
    (first,) = ranked((large, decay.with_(cure=BY_RATE)))
    assert first.symptom is Symptom.STEPS_TOO_LARGE


def test_a_cause_explains_what_stands_before_it_in_the_order() -> None:
    (root,) = ranked(map(complaint, (Symptom.LOST_UPDATES, Symptom.VANISHING_ACTIVATIONS)))
    assert root.symptom is Symptom.VANISHING_ACTIVATIONS


def test_every_complaint_is_shown_once_whatever_explains_what() -> None:
    found = ranked(map(complaint, Symptom))
    shown = [c.symptom for root in found for c in (root, *root.consequences)]
    assert sorted(shown) == sorted(Symptom)


def test_every_symptom_has_a_text() -> None:
    assert set(SYMPTOMS) == set(Symptom)
    for text in SYMPTOMS.values():
        assert not any(part.endswith(".") or part[:1].isupper() for part in (text.what, text.expects))


def test_a_report_is_ok_with_notes_only_and_comes_back_from_its_dict() -> None:
    note = complaint(Symptom.SATURATED, Level.NOTE)
    report = Checkup(complaints=(note,), steps=3, measured=1, losses=(1.0, 0.5))
    assert report.ok
    assert Checkup.from_dict(report.to_dict()) == report
    assert not Checkup(complaints=(complaint(Symptom.SATURATED),), steps=3, measured=1).ok
    assert "<b>" not in Checkup(complaints=(note.with_(what="<b>"),), steps=1, measured=1).to_html().replace(
        "<b>Cure:</b>", ""
    )


def test_the_first_line_of_a_report_is_wrapped_like_the_others() -> None:
    report = Checkup(complaints=(), steps=100_000, measured=40, losses=(3.859e11, 1.476e06))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 92
    assert " ".join(line.strip() for line in lines) == (
        "Nothing found in 100000 optimizer steps, of which 40 were measured in full. "
        "The loss went from 3.859e+11 to 1.476e+06."
    )


def test_a_finite_course_without_faults_has_no_complaint() -> None:
    assert Checkup.of(course([4.0, 3.0, 2.0, 1.0] * 4)).ok
    assert [c.symptom for c in Checkup.of(course([2.0] * 12)).complaints] == [Symptom.LOSS_CONSTANT]
    assert [c.symptom for c in Checkup.of(course([float(2**i) for i in range(12)])).complaints] == [
        Symptom.LOSS_DIVERGES
    ]


def reading_of(step: int, saturated: float = 0.9, spread: float = 0.0) -> Any:
    """What rules ask of a step in which a layer reads what a sigmoid makes."""
    x = np.full((4, 2), 0.5)
    made = signal(x, "sigmoid")._replace(saturated=saturated, spread=spread)
    data = signal(np.arange(8.0).reshape(4, 2))
    one = SimpleNamespace(operation="sigmoid", outputs=(1,), inputs=(0,), index=0, place=None, module="")
    return SimpleNamespace(
        probe=Probe(step=step),
        forward=lambda: [one],
        signals={1: made},
        differentiated={0},
        is_last=lambda _: False,
        signal=lambda i: made if i else None,
        output=lambda: (one, 1),
        chain=[SimpleNamespace(input=data)],
    )


AROUND_ZERO = [0.1, -0.1, 0.05, -0.05, 0.0, 0.0]  # the surrogate of a policy
STILL = [1.0, 1.1, 1.0, 0.9, 1.0, 1.0]


@pytest.mark.parametrize(
    ("losses", "since", "first", "relative", "level"),
    [
        (AROUND_ZERO, 20, 1.0, 0.01, Level.NOTE),  # a policy that is sure of itself, and may be right
        (AROUND_ZERO, 20, 0.0, 0.3, Level.NOTE),  # the same, with a weight that began at 0
        (AROUND_ZERO, 0, 1.0, 0.01, Level.FAULT),  # from the first step on
        (AROUND_ZERO, 20, 1.0, 0.5, Level.FAULT),  # after a jump
        (AROUND_ZERO, 20, 0.0, 1.5, Level.FAULT),  # after a jump of a weight that began at 0
        (STILL, 20, 1.0, 0.01, Level.FAULT),  # a loss that tells that nothing was learned
    ],
)
def test_what_a_policy_has_learned_is_not_saturated(
    losses: list[float], since: int, first: float, relative: float, level: Level
) -> None:
    run = course(losses)
    moved = ParameterSeen("w", (4, 4), "float32", weight=1.0, update=relative)
    run.probes = [
        Probe(step=step, parameters=(moved if step else moved._replace(weight=first, update=0.01),))
        for step in (0, 10, 20)
    ]
    readings = [reading_of(step, 0.9 if step >= since else 0.1) for step in (0, 10, 20)]
    (found,) = FUNCTIONS[0](run, readings)
    assert (found.symptom, found.level, found.since) == (Symptom.SATURATED, level, since)


@pytest.mark.parametrize(("last", "level"), [(0.001, Level.NOTE), (0.9, Level.FAULT)])
def test_a_constant_output_is_right_where_the_loss_has_come_down_with_it(last: float, level: Level) -> None:
    run = course([1.0, 0.9, last, last, last, last, last, last])
    found = DATA[-1](run, [reading_of(step) for step in (0, 10, 20)])
    assert [(one.symptom, one.level) for one in found] == [(Symptom.CONSTANT_OUTPUT, level)]
