"""The judge of partners' loops, on outcomes written by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.partners.batches import BAD, STEPS, batches
from benchmarks.partners.judge import Verdict, judge, same_bits, shown
from benchmarks.partners.outcome import Fault, Outcome

LOSSES = [1.0 / (i + 1) for i in range(STEPS)]


def outcome(**changes: object) -> Outcome:
    state = {"w": np.ones(2, np.float32), "mean": np.zeros(1, np.float32)}
    reference = Outcome(state=state, log=(), schedule=tuple(map(float, range(1, STEPS))))
    log = tuple({"loss": loss, "applied": i != BAD} for i, loss in enumerate(LOSSES))
    good = Outcome(
        state=state,
        log=log,
        schedule=(*reference.schedule[: BAD + 1], *reference.schedule[BAD:]),
        resumed=state,
        reference=reference,
    )
    return replace(good, **changes)


ALL = Verdict(finite=True, bit_equal=True, visible=True, scheduler_held=True, resumes=True)
WITH_NAN = {"w": np.ones(2, np.float32), "mean": np.full(1, np.nan, np.float32)}
OTHER_BITS = {"w": np.ones(2, np.float32), "mean": np.full(1, -0.0, np.float32)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ALL),
        ({"state": WITH_NAN, "resumed": WITH_NAN}, replace(ALL, finite=False, bit_equal=False)),
        ({"state": OTHER_BITS, "resumed": OTHER_BITS}, replace(ALL, bit_equal=False)),
        ({"resumed": OTHER_BITS}, replace(ALL, resumes=False)),
        ({"resumed": None}, replace(ALL, resumes=None)),
        ({"log": tuple({"loss": loss} for loss in LOSSES)}, replace(ALL, visible=False)),
        ({"schedule": tuple(map(float, range(1, STEPS + 1)))}, replace(ALL, scheduler_held=False)),
        ({"schedule": (11.0,) * STEPS}, ALL),
    ],
)
def test_each_column_is_judged_by_its_own_part_of_the_outcome(
    changes: dict[str, object], expected: Verdict
) -> None:
    assert judge(outcome(**changes)) == expected


def test_a_constant_rate_says_nothing_of_the_schedule() -> None:
    constant = {"schedule": (0.1,) * 3}
    assert judge(outcome(**constant, reference=replace(outcome(), **constant))).scheduler_held is None


def test_a_run_without_a_bad_batch_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match=r"outcome\.reference must be the run without the bad batch"):
        judge(outcome(reference=None))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 0.9, 0.8, float("nan")], True),
        ([1.0, float("nan"), float("nan"), float("nan")], False),
        ([1.0, 0.9, 0.8, 1e7], True),
        ([1.0, 0.9, 0.8, 0.7], False),
        ([0, 0, 0, 1], True),
        ([0, 1, 2, 3], False),
        ([1.0, 1.0, 1.0, 0.0], True),
        ([1024.0, 1024.0, 1024.0, 512.0], True),
        (["OK", "OK", "OK", "NAN_GRADIENT"], True),
        (["OK", "CLIPPED", "OK", "CLIPPED"], False),
        ([True, True, True, False], True),
        ([None, None, None, "skipped"], True),
    ],
)
def test_what_a_reader_of_the_log_notices(values: list[float | str | bool], expected: bool) -> None:
    assert shown([{"x": value} for value in [*values, 0.1]], 3) is expected


def test_states_of_other_names_or_dtypes_are_not_the_same() -> None:
    one = {"w": np.ones(2, np.float32)}
    assert same_bits(one, {"w": np.ones(2, np.float32)})
    assert not same_bits(one, {"v": np.ones(2, np.float32)})
    assert not same_bits(one, {"w": np.ones(2, np.float64)})
    assert not same_bits({}, {})


@pytest.mark.parametrize("fault", Fault)
def test_only_the_bad_batch_differs(fault: Fault) -> None:
    good, bad = batches(None), batches(fault)
    differ = [not all(np.array_equal(a, b) for a, b in zip(g, s)) for g, s in zip(good, bad)]
    assert differ == [i == BAD for i in range(STEPS)]


def test_the_parts_for_both_frameworks_import_neither() -> None:
    program = (
        "import sys, benchmarks.partners.judge, benchmarks.partners.driving\n"
        "assert not {'jax', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
