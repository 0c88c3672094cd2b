"""A run in JAX that goes back says why in its log, and the report says so too."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import stablenum_jax
from stablenum import RecoveryPolicy, RecoveryStopped
from stablenum.commands.report.page import as_html
from stablenum.commands.report.watch import shown
from stablenum.runlog.lines import Rewind, Step, parsed
from stablenum.runlog.reading import Run, read_run
from stablenum.typing import Response
from tests.jax.recovering import (
    AGAIN,
    POLICY,
    SECOND_MOMENT,
    batch_at,
    donating_step,
    first_state,
    put,
    train_step,
)

QUICK = dataclasses.replace(POLICY, good_after=0, responses=(AGAIN,))
HARM = put(("params", "last"), math.nan)
SEEN = "1 array of the state is not finite (params.last)"


def run(
    path: Path,
    steps: int,
    hurt_at: int,
    policy: RecoveryPolicy = QUICK,
    *,
    harm: Callable[[Any], Any] = HARM,
    again: bool = False,
    given: bool = True,
    at_once: bool = False,
    step: Callable[..., Any] = train_step,
) -> stablenum_jax.Recovery:
    """Train with a log, and hurt the state before a step: the first time that it is taken, or each time."""
    hurt = False
    with stablenum_jax.RunLog(path) as log:
        recovery = stablenum_jax.Recovery(first_state(), policy, data=batch_at, log=log if given else None)
        for batch in recovery.batches(steps):
            if recovery.step + 1 == hurt_at and (again or not hurt):
                hurt, recovery.state = True, harm(recovery.state)
            recovery.state, _ = step(recovery.state, batch)
            log(recovery.state, recovery.state["params"])
            if at_once:  # so that it does not depend on the machine when the log has learned its pace
                log._readings._write(wait=True)
    return recovery


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def on_terminal(run: Run) -> str:
    console = Console(file=io.StringIO(), width=300)
    console.print(shown(run, 300))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("step", [train_step, donating_step], ids=["kept", "donated"])
def test_a_rewind_is_in_the_log_with_its_reason(path, step):
    (event,) = run(path, 80, 73, step=step).events
    lines = [parsed(line) for line in path.read_text().splitlines()]
    (rewind,) = [line for line in lines if isinstance(line, Rewind)]
    at = lines.index(rewind)
    steps = [[line.step for line in part if isinstance(line, Step)] for part in (lines[:at], lines[at:])]
    # Seen after 75 steps, whose numbers are 0 to 74. The same data give the same steps again.
    assert steps == [[*range(75)], [*range(70, 80)]]
    assert (rewind.symptom, rewind.first, rewind.last) == ("nonfinite_state", 70, 74)
    assert (rewind.seen, rewind.done) == (SEEN, "Attempt 1: the same data again")
    since = event.symptom.origin
    assert (
        str(event)
        == f"step 75: {SEEN}, likely since step {since}. Attempt 1: back to step 70, the same data again"
    )


def test_no_step_of_before_is_written_again_however_far_the_run_goes_back(path):
    """The log remembers the last 256 steps; the record of the state that is put back is older."""
    policy = dataclasses.replace(QUICK, every=100, keep=2, good_after=300)
    (event,) = run(path, 450, 428, policy).events
    assert (event.symptom.step, event.to_step) == (430, 100)
    read = read_run(path)
    steps = [line.step for line in map(parsed, path.read_text().splitlines()) if isinstance(line, Step)]
    assert steps == [*range(430), *range(100, 450)]
    assert (read.rewinds, read.restarts, len(read.undone)) == ([], [], 330)


def test_the_report_says_why_a_run_went_back(path):
    run(path, 80, 73)
    read = read_run(path)
    assert (read.steps, [step.step for step in read.undone]) == ([*range(80)], [*range(70, 75)])
    said = f"back from step 74 to step 70: {SEEN}. Attempt 1: the same data again"
    assert said in on_terminal(read)
    page = as_html([read])
    assert f"<code>nonfinite_state</code><br>{SEEN}.</td>" in page
    assert f'"rewinds":[{{"first":70,"last":74,"text":"{said}"}}]' in page


def test_a_response_is_told_in_words(path):
    policy = dataclasses.replace(QUICK, responses=(Response(rate=0.5, clip=2.0, steps=8),))
    (event,) = run(path, 60, 33, policy).events
    (rewind,) = read_run(path).events
    assert rewind.done == (
        "Attempt 1: batches 30 to 34 of epoch 0 left out, learning rate x 0.5, gradients clipped at "
        f"{event.clip_at:.3g}, up to step 43"
    )
    assert read_run(path).steps == list(range(60))


def test_a_run_that_is_stopped_says_so_in_its_log(path):
    with pytest.raises(RecoveryStopped):
        run(path, 60, 33, again=True)
    read = read_run(path)
    stopped = "The training was stopped: all 1 responses to this fault were tried"
    assert read.events[1].done == stopped
    assert read.steps == list(range(30))  # the last good state
    assert stopped in on_terminal(read)


@pytest.mark.parametrize(("given", "measured"), [(True, [63, 127]), (False, [124, 127])])
def test_an_update_is_not_measured_over_a_rewind(path, given, measured):
    """A sample is taken in the 63rd call, then the run goes back, and the 64th call has none to compare.

    A log that is not told of the rewind needs two readings to see at which step the run is.
    """
    harm = put(SECOND_MOMENT, math.inf)  # the parameters stay finite, which a measured update needs
    policy = dataclasses.replace(QUICK, check_every=7)
    (event,) = run(path, 140, 63, policy, harm=harm, given=given, at_once=True).events
    assert (event.symptom.step, event.to_step) == (63, 60)
    assert [update.step for update in read_run(path).updates] == measured


def test_a_log_that_was_not_given_holds_the_steps_alone(path):
    (event,) = run(path, 80, 73, given=False).events
    read = read_run(path)
    assert (read.events, read.rewinds) == ([], [event.to_step + 2])  # the steps before came out as before
    assert read.steps == list(range(80))


def test_a_log_that_was_given_no_step_stays_empty(path):
    log = stablenum_jax.RunLog(path)
    recovery = stablenum_jax.Recovery(first_state(), QUICK, data=batch_at, log=log)
    for batch in recovery.batches(40):
        if recovery.step == 32 and not recovery.events:
            recovery.state = HARM(recovery.state)
        recovery.state, _ = train_step(recovery.state, batch)
    assert len(recovery.events) == 1
    assert not path.exists()


@pytest.mark.parametrize("wrong", ["run.jsonl", 3, object()])
def test_a_log_must_be_one(wrong):
    with pytest.raises(TypeError, match="log must be a RunLog or None; got"):
        stablenum_jax.Recovery(first_state(), data=batch_at, log=wrong)
