"""Which courses of a buffer are symptoms: jumps of running statistics, and nothing that is healthy."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence

import pytest

from stablenum.recovery.buffers import BufferWatch, Noted, Part, is_judged, sizes

WINDOW, THRESHOLD = 128, 10.0  # as RecoveryPolicy has them by default


def jumps(course: Iterable[float]) -> list[int]:
    """The steps in which a buffer with these sizes jumps, by a watch that is saved in between."""
    watch, found = BufferWatch(THRESHOLD, WINDOW), []
    for step, size in enumerate(course, 1):
        if watch.look([Noted(step, {"b": size})]) is not None:
            found.append(step)
        saved, watch = json.loads(json.dumps(watch.state_dict())), BufferWatch(THRESHOLD, WINDOW)
        watch.load_state_dict(saved)
    return found


def averages(momentum: float | None, data: Sequence[float]) -> list[float]:
    """The sizes of a running variance that begins at 1, by the mean squares of the batches."""
    kept, found = 1.0, []
    for step, mean_square in enumerate(data, 1):
        a = 1 / step if momentum is None else momentum
        kept = (1 - a) * kept + a * mean_square
        found.append(math.sqrt(kept))
    return found


MOMENTA = [1.0, 0.5, 0.1, 0.01, 0.001, None]


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("unit", [1e-6, 1.0, 5e3])
def test_batches_of_one_scale_are_silent(momentum: float | None, unit: float) -> None:
    draw = random.Random(f"{momentum} {unit}")
    assert jumps(averages(momentum, [unit * math.exp(draw.gauss(0, 0.5)) for _ in range(2000)])) == []


@pytest.mark.parametrize("momentum", MOMENTA)
def test_a_batch_is_found_if_it_more_than_doubles_the_root_and_no_other_did(momentum: float | None) -> None:
    at, draw = 200, random.Random(str(momentum))
    share = 1 / at if momentum is None else momentum
    bound = math.sqrt(1 + 3 / share)  # (1 - a + a * c**2) = 4
    usual = [math.exp(draw.gauss(0, 0.02)) for _ in range(at - 1)]
    for factor, found in ((1.1 * bound, [at]), (0.9 * bound, [])):
        assert jumps(averages(momentum, [*usual, factor**2])) == found


@pytest.mark.parametrize(
    ("course", "found"),
    [
        ([1.0] * 300 + [50.0] * 5, []),  # it never changed before: set on purpose
        ([float(i) for i in range(300)], []),  # a counter
        ([1 + 0.01 * (i % 5) for i in range(300)] + [0.0, 1.0, 1.01], []),  # a reset
        ([1 + 0.01 * (i % 5) for i in range(300)] + [1.9], []),  # less than doubled
        ([1 + 0.9 * (i % 2) for i in range(300)] + [6.0], []),  # not far from its changes
        ([1 + 0.01 * (i % 5) for i in range(10)] + [50.0], []),  # too early to know
        ([1 + 0.01 * (i % 5) for i in range(300)] + [2.2], [301]),
        ([1 + 0.01 * (i % 5) for i in range(300)] + [math.inf], [301]),
        ([math.inf] * 300, []),  # a mask
        ([1 + 0.01 * (i % 5) for i in range(300)] + [math.nan], []),  # another symptom
        ([0.9**i for i in range(200)] + [5e-3], []),  # a branch that begins to give something
        ([50.0] + [1 + 0.01 * (i % 5) for i in range(400)] + [40.0], [402]),  # the first step is forgotten
    ],
)
def test_courses(course: list[float], found: list[int]) -> None:
    assert jumps(course) == found


def test_of_several_steps_the_first_with_a_jump_is_named_and_what_follows_is_not_learnt() -> None:
    watch = BufferWatch(THRESHOLD, WINDOW)
    watch.look(Noted(step, {"a": 1 + 0.01 * (step % 5), "b": 1.0}) for step in range(50))
    noted = [Noted(step, {"a": a, "b": 1.0}) for step, a in ((50, 1.0), (51, 9.0), (52, 9.0))]
    assert watch.look(noted) == (51, ["a"])
    assert watch.look(noted[1:]) == (51, ["a"])


def test_running_statistics_of_a_layer_have_one_size() -> None:
    norms = [("1", Part.MEAN, 4, 3.0), ("1", Part.VARIANCE, 4, 16.0), ("2.u", Part.WHOLE, 4, 6.0)]
    assert sizes(norms) == {"running statistics of 1": 5.0, "2.u": 3.0}


def test_numbers_by_themselves_and_large_buffers_are_not_judged() -> None:
    assert [is_judged(shape, Part.WHOLE) for shape in ((), (1,), (2,), (256, 256), (257, 256), (0,))] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert is_judged((1,), Part.VARIANCE)
