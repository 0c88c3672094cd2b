"""An evaluation is taken up where an earlier one with the same arrays came by."""

from __future__ import annotations

import numpy as np
import pytest

from stablenum.diagnosis.diff.sides import resume_points
from stablenum.diagnosis.diff.sides.resume_points import Given, Stand, Stands

WEIGHTS = {"w": np.ones(2)}
ARRAY = np.zeros(3)


def filled(counts: list[int], given: Given, size: int = 0) -> Stands[str]:
    found = Stands[str]()
    for number, count in enumerate(counts):
        found.add(Stand(count, given.before(count), f"state {count}", {number: size}))
    return found


def test_the_last_stand_before_a_value_is_taken() -> None:
    given = Given(WEIGHTS, {})
    kept = filled([300, 100, 200], given)
    assert [kept.before(v, given) and kept.before(v, given).count for v in (99, 100, 250, 999)] == [
        None, 100, 200, 300,
    ]  # fmt: skip


def test_a_stand_with_other_arrays_is_not_taken() -> None:
    kept = filled([100, 200], Given(WEIGHTS, {150: ARRAY}))
    assert kept.before(250, Given(WEIGHTS, {150: ARRAY, 210: ARRAY})).count == 200
    for other in (Given(WEIGHTS, {}), Given(WEIGHTS, {150: ARRAY.copy()}), Given(WEIGHTS, {140: ARRAY})):
        assert kept.before(250, other).count == 100
    assert kept.before(250, Given(dict(WEIGHTS), {150: ARRAY})) is None
    kept.only(Given(WEIGHTS, {}))
    assert kept.before(250, Given(WEIGHTS, {150: ARRAY})).count == 100


def test_two_stands_are_not_near_each_other() -> None:
    kept = filled([100, 400], Given(None, {}))
    assert [kept.wants(n) for n in (50, 101, 250, 399, 463, 464)] == [False, False, True, False, False, True]


def test_of_stands_that_are_too_large_every_other_one_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume_points, "_MOST_BYTES", 300)
    given = Given(None, {})
    kept = filled([100, 200, 300], given, size=100)
    assert kept.before(250, given).count == 200
    kept.add(Stand(400, given, "", {9: 100}))
    assert kept.before(250, given).count == 100
    assert not kept.wants(427)
    assert kept.wants(428)


def test_the_number_of_stands_does_not_grow_with_the_program() -> None:
    """Each copies what is known of the whole program."""
    given = Given(None, {})
    kept = Stands[str]()
    added = 0
    for count in range(100_000):
        if kept.wants(count):
            kept.add(Stand(count, given, "", {}))
            added += 1
    assert len(kept._kept) <= resume_points._MOST_STANDS
    assert added <= 10 * resume_points._MOST_STANDS
    last = kept.before(99_999, given)
    assert last is not None
    assert 99_999 - last.count < 2 * 100_000 / (resume_points._MOST_STANDS / 2)
