"""The log message about skipped steps: when it comes, how often, and what it says."""

from __future__ import annotations

import logging
import math

import pytest

from stablenum import GuardConfig
from stablenum.guard.decide import GuardState
from stablenum.guard.readout import history, metrics
from stablenum.guard.skip_log import SkipLog, SkipLogs
from tests.backends import BACKENDS
from tests.selection import slow_but_for

NAMES = ["embed.weight", "head.weight"]


@pytest.fixture(autouse=True)
def _all_messages(caplog):
    caplog.set_level(logging.DEBUG, logger="stablenum")


def steps_with_a_message(caplog, pattern: str, *, every: int = 1, log: SkipLog | None = None) -> list[int]:
    """The steps of ``pattern`` (b: bad) after which a message is logged, if every so many are looked at."""
    numpy, config, found = BACKENDS["numpy"], GuardConfig(), []
    log = log or SkipLog()
    run, state = numpy.prepare(config), numpy.init(config, 2)
    for i, letter in enumerate(pattern):
        _, state = run(state, numpy.observe([1.0, math.nan if letter == "b" else 2.0], loss=0.5))
        if i % every == every - 1:
            before = len(caplog.records)
            last = metrics(state, NAMES)
            log.after_step(last["skipped_in_a_row"], int(state.step), lambda last=last: last)
            found += [i] * (len(caplog.records) - before)
    return found


@pytest.mark.parametrize(
    ("pattern", "steps"),
    [
        ("g" * 50, []),
        ("bbg" * 50, []),
        ("gbbbg", [3]),
        ("b" * 3500, [2, 29, 299, 2999]),
        ("bbbg" * 500, [2, 1002]),
        ("bbbg" + "b" * 40, [2, 33]),
        ("b" * 31 + "g" + "b" * 31, [2, 29, 61]),
    ],
)
def test_a_message_comes_at_3_skips_in_a_row_and_seldom_again(caplog, pattern, steps):
    assert steps_with_a_message(caplog, pattern) == steps


def test_a_host_that_looks_seldom_gets_one_message_for_all_it_missed(caplog):
    assert steps_with_a_message(caplog, "b" * 4000, every=1000) == [999, 2999]


def test_another_training_is_not_silenced_by_the_one_before(caplog):
    log = SkipLog()
    assert steps_with_a_message(caplog, "g" * 5000 + "bbb", log=log) == [5002]
    assert steps_with_a_message(caplog, "gbbb", log=log) == [3]


def test_the_message_names_the_parameter_the_reason_and_the_remedy(caplog):
    steps_with_a_message(caplog, "gbbb")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("stablenum", logging.WARNING)
    message = record.getMessage()
    assert message.startswith(
        "3 steps in a row were skipped, up to step 3. First bad parameter: head.weight "
    )
    assert "a gradient holds NaN" in message
    assert "Remedy: " in message


def test_the_advice_is_given_once_for_each_reason(caplog):
    log = SkipLog()
    steps_with_a_message(caplog, "b" * 30 + "g" * 1000, log=log)
    numpy, config = BACKENDS["numpy"], GuardConfig()
    run, state = numpy.prepare(config), numpy.init(config, 2)
    for step in range(2100):
        bad = step >= 2000
        _, state = run(state, numpy.observe([1.0, 2.0], loss=math.nan if bad else 0.5))
        last = metrics(state, NAMES)
        log.after_step(last["skipped_in_a_row"], 1031 + step, lambda last=last: last)
    advised, short, other, other_short = (record.getMessage() for record in caplog.records)
    assert "Likely cause: " in advised
    assert "Likely cause: " in other
    assert short == (
        "30 steps in a row were skipped, up to step 29. First bad parameter: head.weight (gradient norm nan, "
        "loss 0.5). At step 29 the step was skipped: a gradient holds NaN (NAN_GRADIENT; for cause and "
        "remedy see the message at step 2). Loss scale: 1."
    )
    assert "(NONFINITE_LOSS; for cause and remedy see the message at step 2002)" in other_short
    assert "All gradients were finite (gradient norm 2.23607, loss nan)" in other_short


def test_another_training_gets_the_advice_again(caplog):
    log = SkipLog()
    for pattern in ("g" * 50 + "bbb", "gbbb"):
        steps_with_a_message(caplog, pattern, log=log)
    assert [("Remedy: " in record.getMessage()) for record in caplog.records] == [True, True]


@pytest.mark.parametrize(
    ("pattern", "every", "told"),
    [
        ("g" * 50, 50, []),
        ("bbg" * 30, 30, []),
        ("gbbbg", 5, [(3, 3)]),
        ("gbbbg", 1, [(3, 3)]),
        ("bbbg" * 20, 80, [(3, 2)]),
        ("b" * 50, 50, [(50, 49)]),
        ("bbbg" + "b" * 40, 44, [(3, 2), (40, 43)]),
        ("b" * 200, 200, [(200, 199)]),
        ("g" * 200 + "bbbb", 102, [(4, 203)]),
    ],
)
def test_a_host_that_has_only_the_records_tells_of_runs_that_are_over(caplog, pattern, every, told):
    numpy, config, log = BACKENDS["numpy"], GuardConfig(), SkipLog()
    run, state = numpy.prepare(config), numpy.init(config, 2)
    for i, letter in enumerate(pattern):
        _, state = run(state, numpy.observe([1.0, math.nan if letter == "b" else 2.0], loss=0.5))
        if i % every == every - 1:
            log.after_steps(history(state, NAMES), metrics(state, NAMES))
            log.after_steps(history(state, NAMES), metrics(state, NAMES))
    expected = [f"{n} steps in a row were skipped, up to step {step}" for n, step in told]
    assert [record.getMessage().split(".")[0] for record in caplog.records] == expected


def test_a_halt_is_told_once_and_not_to_one_who_knows_it(caplog):
    log = SkipLog()
    log.after_halt(4, "It stopped.")
    log.after_halt(4, "It stopped.")
    log.after_halt(9)
    log.after_halt(9, "It stopped again.")
    assert [record.getMessage() for record in caplog.records] == ["It stopped."]


def _states(pattern: str, at: set[int], norm: float) -> list[GuardState]:
    """The states after so many steps of ``pattern`` (b: bad), whose good steps have a norm of their own."""
    numpy, config, found = BACKENDS["numpy"], GuardConfig(), []
    run, state = numpy.prepare(config), numpy.init(config, 1)
    for i, letter in enumerate(pattern, start=1):
        _, state = run(state, numpy.observe([math.nan if letter == "b" else norm], loss=None))
        found += [state] * (i in at)
    return found


GOOD, BAD = "g" * 900, "b" * 900
PATTERNS = [(GOOD, GOOD), (GOOD, BAD), (BAD, GOOD), ("b" + GOOD[1:], GOOD)]


# Beyond 128 steps no record is common to two states. Each pair of trainings runs with one interval.
@pytest.mark.parametrize(
    ("one", "other", "every"),
    slow_but_for(
        [(*pair, every) for pair, every in zip(PATTERNS, (100, 1, 100, 300), strict=True)],
        [(*pair, every) for pair in PATTERNS for every in (1, 100, 300)],
    ),
    ids=lambda value: value if isinstance(value, int) else f"{value[:2]}...",
)
def test_trainings_in_turn_have_a_log_each(one, other, every):
    logs, at = SkipLogs(), set(range(every, 901, every))
    turns = zip(_states(one, at, 1.0), _states(other, at, 2.0), strict=True)
    found = [(logs.of(first), logs.of(second)) for first, second in turns]
    assert found == [found[0]] * len(found)
    assert found[0][0] is not found[0][1]


def test_a_training_that_goes_back_keeps_its_log():
    logs = SkipLogs()
    early, late = _states("g" * 60 + "b" * 40, {50, 100}, 1.0)
    assert logs.of(late) is logs.of(early)
    (other,) = _states("g" * 50, {50}, 2.0)
    assert logs.of(late) is not logs.of(other)


def test_a_training_that_begins_like_another_has_a_log_once_it_differs():
    logs = SkipLogs()
    (same,), (one,), (other,) = (_states(steps, {len(steps)}, 1.0) for steps in ("bbb", "bbbg", "bbbb"))
    first = logs.of(same)
    assert logs.of(one) is first
    assert logs.of(other) is not first


def test_the_logs_of_so_many_trainings_are_kept_and_no_more():
    logs = SkipLogs()
    for i in range(200):
        logs.of(*_states("g", {1}, 1.0 + i))
    assert len(logs._trainings) == 64
