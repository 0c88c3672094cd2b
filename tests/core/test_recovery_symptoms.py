"""Symptoms: what the record of a guard says about a run, against a second implementation in NumPy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from stablenum import Reason, RecoveryPolicy
from stablenum.recovery.symptoms import Symptom, SymptomCode, Watch, first_of
from stablenum.typing import Worst

POLICY = RecoveryPolicy(skips_in_a_row=4, runaway_steps=5, window=16)


def row(step: int, loss: float = 1.0, norm: float = 1.0, **fields: Any) -> dict[str, Any]:
    reason = fields.pop("reason", Reason.OK)
    plain = {
        "step": step,
        "loss": loss,
        "grad_norm": norm,
        "loss_scale": 1.0,
        "clip_coefficient": 1.0,
        "reason": reason,
        "applied": reason in (Reason.OK, Reason.CLIPPED),
        "worst": Worst(0, "w"),
        "precision_level": 0,
        "worst_rank": None,
    }
    return plain | fields


def all_symptoms(rows: Sequence[Any], policy: RecoveryPolicy = POLICY, every: int = 1) -> list[Symptom]:
    """Read a record in pieces, as a loop does, of which the guard holds the last 128 steps."""
    watch, found = Watch(policy), []
    for end in range(every, len(rows) + 1, every):
        found += watch.read(rows[max(0, end - 128) : end], end)
    return found


def noise(count: int, seed: int = 0) -> list[float]:
    return [random.Random(f"{seed} {i}").gauss(1.0, 0.05) for i in range(count)]


def test_skips_in_a_row_are_a_symptom_once_and_since_the_first() -> None:
    rows = [row(0), *(row(i, reason=Reason.SPIKE_LOSS) for i in range(1, 12))]
    (found,) = all_symptoms(rows)
    assert (found.code, found.origin, found.step) == (SymptomCode.SKIPS_IN_A_ROW, 2, 6)
    assert "4 steps in a row" in found.detail
    assert "SPIKE_LOSS" in found.detail


def test_skips_with_steps_between_them_are_no_symptom() -> None:
    rows = [row(i, reason=Reason.OK if i % 4 == 3 else Reason.NAN_GRADIENT) for i in range(60)]
    assert all_symptoms(rows) == []


def test_a_loss_scale_that_comes_down_is_no_symptom() -> None:
    rows = [row(i, reason=Reason.INF_GRADIENT, loss_scale=2.0 ** (40 - i)) for i in range(30)]
    assert all_symptoms(rows) == []
    stuck = [row(i, reason=Reason.INF_GRADIENT, loss_scale=2.0) for i in range(30)]
    assert [s.code for s in all_symptoms(stuck)] == [SymptomCode.SKIPS_IN_A_ROW]


@pytest.mark.parametrize("reason", [Reason.NAN_GRADIENT, Reason.NONFINITE_LOSS, Reason.SPIKE_LOSS])
def test_only_skips_for_a_gradient_name_a_parameter(reason: Reason) -> None:
    (found,) = all_symptoms([row(i, reason=reason) for i in range(6)])
    assert found.names == (("w",) if reason is Reason.NAN_GRADIENT else ())


@pytest.mark.parametrize("signal", ["loss", "norm"])
def test_a_signal_that_stays_high_is_a_symptom_and_one_spike_is_none(signal: str) -> None:
    usual = [row(i, **{signal: x}) for i, x in enumerate(noise(60))]
    spike = [*usual[:40], row(40, **{signal: 50.0}), *usual[41:]]
    assert all_symptoms(spike) == []
    high = [*usual, *(row(60 + i, **{signal: 11.0 + i}) for i in range(8))]
    found = all_symptoms(high)[0]
    code = SymptomCode.RUNAWAY_LOSS if signal == "loss" else SymptomCode.RUNAWAY_GRAD_NORM
    # Three of the last five steps are high once row 63 has shown that row 62 is judged.
    assert (found.code, found.origin, found.step) == (code, 61, 64)


def test_values_that_are_not_known_neither_count_nor_disturb() -> None:
    rows = [row(i, loss=math.nan, norm=x) for i, x in enumerate(noise(80))]
    assert all_symptoms(rows) == []
    rows += [row(80 + i, loss=math.nan, norm=19.0) for i in range(8)]
    assert {s.code for s in all_symptoms(rows)} == {SymptomCode.RUNAWAY_GRAD_NORM}


def test_a_constant_loss_may_move_by_a_little() -> None:
    rows = [row(i, loss=1.0 if i < 60 else 1.05) for i in range(90)]
    assert all_symptoms(rows) == []


def test_a_falling_loss_is_no_symptom() -> None:
    rows = [row(i, loss=5.0 * math.exp(-i / 40) + 0.02 * x) for i, x in enumerate(noise(400))]
    assert all_symptoms(rows) == []


@pytest.mark.parametrize("field", ["skips_in_a_row", "runaway_steps"])
def test_a_symptom_can_be_turned_off(field: str) -> None:
    bad = {
        "skips_in_a_row": [row(i, reason=Reason.NAN_GRADIENT) for i in range(30)],
        "runaway_steps": [row(i, loss=x if i < 60 else 9.0) for i, x in enumerate(noise(90))],
    }[field]
    assert all_symptoms(bad)
    off = RecoveryPolicy(**{"skips_in_a_row": 4, "runaway_steps": 5, "window": 16, field: None})  # type: ignore[arg-type]
    assert all_symptoms(bad, off) == []


def test_the_norm_of_a_healthy_training_may_rise_to_eight_times_the_usual() -> None:
    rows = [row(i, norm=x if i < 60 else 8.0 * x) for i, x in enumerate(noise(90))]
    assert all_symptoms(rows) == []


@pytest.mark.parametrize("end", [0.0, 1e-6])
def test_a_loss_that_is_next_to_nothing_may_multiply(end: float) -> None:
    losses = [2.0] * 20 + [end] * 60 + [0.1] * 20
    assert all_symptoms([row(i, loss=x) for i, x in enumerate(losses)]) == []
    losses[80:] = [0.3] * 20
    found = {s.code for s in all_symptoms([row(i, loss=x) for i, x in enumerate(losses)])}
    assert found == {SymptomCode.RUNAWAY_LOSS}


def test_a_loss_that_often_multiplies_is_no_symptom() -> None:
    draw = random.Random(3)
    rows = [row(i, loss=math.exp(draw.gauss(-5, 1) + 2.0 * (i % 60 < 12))) for i in range(400)]
    assert all_symptoms(rows) == []


def _runaway_by_numpy(values: Sequence[float], policy: RecoveryPolicy, ratio: float) -> list[int]:
    """The steps at which the signal has run away, from the rule as it is documented."""
    n, usual, found = policy.runaway_steps or 0, [], []

    def limit() -> float:
        kept = np.asarray(usual[-policy.window :])
        if len(kept) < policy.window // 2:
            return math.inf
        middle, first = np.median(kept), np.median(values[:n])
        least = max(0.01 * abs(middle), 0.01 * abs(first))
        if np.all(kept > 0):
            logs = np.log(kept)
            sd = 1.4826 * np.median(np.abs(logs - np.log(middle)))
            above = middle * np.exp(policy.runaway_threshold * sd)
        else:
            above = middle + policy.runaway_threshold * 1.4826 * np.median(np.abs(kept - middle))
        return float(max(above, middle + policy.runaway_threshold * least, ratio * middle))

    for end in range(1, len(values) + 1):
        if end > n and values[end - n - 1] <= limit():
            usual.append(values[end - n - 1])
        if end >= n and np.median(values[end - n : end]) > limit():
            found.append(end)
    return found


@pytest.mark.parametrize(
    ("signal", "code", "ratio"),
    [("loss", SymptomCode.RUNAWAY_LOSS, 0.0), ("norm", SymptomCode.RUNAWAY_GRAD_NORM, 10.0)],
)
@pytest.mark.parametrize("below_zero", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(20))
def test_runaways_are_those_of_the_documented_rule(
    signal: str, code: SymptomCode, ratio: float, seed: int, below_zero: float
) -> None:
    draw = random.Random(seed)
    values = [draw.gauss(1.0, 0.1) + (draw.random() < 0.05) * draw.uniform(0, 20) for _ in range(300)]
    for i in range(draw.randrange(60, 250), 300):
        values[i] *= 1.0 + (1.0 + 0.1 * ratio) * (i % 17)
    values = [x - below_zero for x in values]
    rows = [row(i, **{signal: x}) for i, x in enumerate(values)]
    found = [s.step for s in all_symptoms(rows) if s.code is code]
    # A row is judged when the next is there.
    assert found == [step + 1 for step in _runaway_by_numpy(values, POLICY, ratio) if step < 300]
    assert found


@pytest.mark.parametrize("seed", range(5))
def test_a_watch_that_is_saved_and_restored_goes_on_alike(seed: int) -> None:
    draw = random.Random(seed)
    reasons = (Reason.OK, Reason.OK, Reason.NAN_GRADIENT, Reason.SPIKE_LOSS)
    rows = [row(i, loss=draw.gauss(1, 0.1) * (1 + i // 90), reason=draw.choice(reasons)) for i in range(200)]
    straight, moved = Watch(POLICY), Watch(POLICY)
    for end in range(1, 201):
        seen = rows[max(0, end - 128) : end]
        assert straight.read(seen, end) == moved.read(seen, end)
        saved, moved = moved.state_dict(), Watch(POLICY)
        moved.load_state_dict(saved)


@pytest.mark.parametrize("every", [1, 3, 10, 100])
def test_skips_are_found_however_often_the_record_is_read(every: int) -> None:
    rows = [row(i, reason=Reason.NAN_GRADIENT if 40 <= i < 55 else Reason.OK) for i in range(200)]
    assert [s.origin for s in all_symptoms(rows, every=every)] == [41]


def test_the_earliest_origin_is_chosen_whatever_the_order() -> None:
    codes = (SymptomCode.REPORTED, SymptomCode.NONFINITE_STATE, SymptomCode.RUNAWAY_LOSS)
    symptoms = [Symptom(code, 90, origin, "seen") for code in codes for origin in (70, 40)]
    for seed in range(10):
        shuffled = random.Random(seed).sample(symptoms, len(symptoms))
        assert first_of(shuffled) == Symptom(SymptomCode.NONFINITE_STATE, 90, 40, "seen")
    assert first_of([]) is None


def test_a_symptom_survives_json() -> None:
    symptom = Symptom(SymptomCode.NONFINITE_STATE, 3, 1, "a buffer is NaN", ("bn.running_mean",))
    assert Symptom.from_dict(symptom.to_dict()) == symptom


@pytest.mark.parametrize("steps_per_row", [1, 2, 4, 7])
@pytest.mark.parametrize("every", [1, 10, 25])
def test_a_row_of_accumulated_gradients_is_not_taken_for_a_later_step(steps_per_row: int, every: int) -> None:
    first_bad = 50  # of the rows: steps 50 * steps_per_row + 1 and on
    rows = [row(i, reason=Reason.OK if i < first_bad else Reason.NAN_GRADIENT) for i in range(100)]
    watch, found = Watch(POLICY), []
    for step in range(every, 100 * steps_per_row + 1, every):
        made = rows[: step // steps_per_row]
        found += watch.read(made[-128:], step)
    (symptom,) = found
    since = first_bad * steps_per_row + 1
    assert since - steps_per_row < symptom.origin <= since


@pytest.mark.parametrize(("begins", "seen"), [(20, None), (40, 90), (70, 90), (84, 100), (120, 140)])
def test_a_run_away_at_the_beginning_is_the_ordinary(begins: int, seen: int | None) -> None:
    losses = [x if i < begins else 5.0 + x for i, x in enumerate(noise(200))]
    rows = [row(i, loss=x) for i, x in enumerate(losses)]
    found = all_symptoms(rows, RecoveryPolicy(), every=10)
    assert next((s.step for s in found), None) == seen
