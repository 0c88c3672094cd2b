"""The loop of a recovery, with a training of a few plain numbers in place of a framework."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablenum import CheckpointError, Reason, RecoveryEvent, RecoveryPolicy, RecoveryStopped
from stablenum.recovery.buffers import Noted
from stablenum.recovery.hooks import Easing
from stablenum.recovery.ledger import Ledger
from stablenum.recovery.logged import Why
from stablenum.recovery.loop import RecoveryLoop
from stablenum.recovery.parameters import Measures, ParameterWatch
from stablenum.recovery.plan import Rewind, Stop, plan
from stablenum.recovery.snapshots import Snapshot, Snapshots
from stablenum.recovery.symptoms import Finding, Symptom, SymptomCode
from stablenum.runlog.lines import Rewind as LoggedRewind
from stablenum.typing import Response, Worst


class PythonsGenerator:
    def read(self) -> Any:
        return random.getstate()

    def write(self, states: Any) -> None:
        random.setstate(states)


class Training:
    """One weight with momentum and noise, and a guard that skips what is not finite: the adapter's hooks."""

    def __init__(self) -> None:
        self.generators = PythonsGenerator()
        self.weight, self.momentum = 5.0, 0.0
        self.record: list[Any] = []
        self.easings: list[Easing | None] = []
        self.rate = 0.1
        self.logged: list[tuple[LoggedRewind, int]] = []
        self.saved: dict[int, Snapshot] = {}
        self.moments_poisoned = False
        self.second_moment = 1.0
        self.buffer = 1.0
        self.noted: list[Noted] = []

    def train(self, target: float) -> None:
        gradient = (self.weight - target) + 0.01 * random.gauss(0, 1)
        loss = gradient * gradient
        good = math.isfinite(loss) and abs(loss) < 1e30
        if good:
            self.momentum = 0.5 * self.momentum + gradient
            self.weight -= self.rate * self.momentum
        reason = Reason.OK if good else Reason.NONFINITE_LOSS
        self.record.append(
            {
                "step": len(self.record),
                "loss": loss,
                "grad_norm": abs(gradient),
                "loss_scale": 1.0,
                "clip_coefficient": 1.0,
                "reason": reason,
                "applied": good,
                "worst": Worst(0, "weight"),
                "precision_level": 0,
                "worst_rank": None,
            }
        )

    def check_beginning(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError("weight is not finite")

    def capture(self) -> Any:
        return copy.deepcopy((self.weight, self.momentum, self.record, random.getstate()))

    def restore(self, state: Any) -> None:
        self.weight, self.momentum, self.record, generator = copy.deepcopy(state)
        random.setstate(generator)
        self.moments_poisoned = False
        self.second_moment = self.buffer = 1.0

    def log(self, why: Why, before: Any) -> None:
        self.logged.append((why.rewind(before, self.rows()), len(self.rows())))

    def rows(self) -> Any:
        return self.record[-128:]

    def counts(self) -> Any:
        return None

    def findings(self) -> list[Finding]:
        if math.isfinite(self.weight):
            return []
        return [Finding(SymptomCode.NONFINITE_STATE, "a parameter is not finite", ("weight",))]

    def measures(self) -> dict[str, Measures]:
        lowest = -1.0 if self.moments_poisoned else 0.0
        return {"weight": Measures(abs(self.weight), lowest, self.second_moment)}

    def note_buffers(self, step: int) -> None:
        self.noted.append(Noted(step, {"buffer": self.buffer}))

    def noted_buffers(self) -> list[Noted]:
        noted, self.noted = self.noted, []
        return noted

    def possible(self, response: Response) -> Response:
        return response

    def ease(self, easing: Easing | None) -> None:
        self.easings.append(easing)
        self.rate = 0.1 * (easing.rate if easing else 1.0)

    def agree(self, symptoms: Any) -> Any:
        return symptoms

    def shared(self, value: Any) -> Any:
        return value

    def save(self, snapshot: Snapshot, held: Sequence[int]) -> None:
        json.dumps(snapshot.course, allow_nan=False)
        kept = self.saved | {snapshot.step: copy.deepcopy(snapshot)}
        self.saved = {step: kept[step] for step in held if step in kept}

    def load(self) -> list[Snapshot]:
        return [self.saved[step] for step in sorted(self.saved)]


def _train(training: Training, loop: RecoveryLoop, steps: int) -> None:
    for batch in loop.batches(steps):
        training.train(batch)


def targets(n: int) -> float:
    return 1.0 + 0.1 * math.sin(n)


POLICY = RecoveryPolicy(every=20, good_after=30, check_every=5, window=16, skips_in_a_row=4, runaway_steps=6)
Hurt = Callable[[Training, int], None]


def nothing(training: Training, step: int) -> None:
    """Leave the training alone."""


def run(
    steps: int = 200,
    *,
    policy: RecoveryPolicy = POLICY,
    data: Any = targets,
    hurt: Hurt = nothing,
    training: Training | None = None,
    **options: Any,
) -> tuple[Training, RecoveryLoop]:
    """Train, and let ``hurt`` do its harm before each step, whose number it is given."""
    random.seed(7)
    training = training or Training()
    loop = RecoveryLoop(policy, training, data, **options)
    for batch in loop.batches(steps):
        hurt(training, loop.step + 1)
        training.train(batch)
    return training, loop


def once(step: int, harm: Callable[[Training], None]) -> Hurt:
    """Do harm the first time that a step is made, as a fault of the machine does."""
    done: list[int] = []

    def hurt(training: Training, now: int) -> None:
        if now == step and not done:
            done.append(now)
            harm(training)

    return hurt


def flipped(training: Training) -> None:
    training.weight = -1e28


def made_nan(training: Training) -> None:
    training.weight = math.nan


def poisoned(training: Training) -> None:
    training.moments_poisoned = True


def enlarged(training: Training) -> None:
    training.second_moment = 1e30


AGAIN = RecoveryPolicy(
    every=20, good_after=30, check_every=5, window=16, skips_in_a_row=4, runaway_steps=6,
    responses=(Response(skip_data=False),),
)  # fmt: skip


# A second moment is compared with that of the snapshot before.
@pytest.mark.parametrize("step", [1, 37, 60, 101, 185])
@pytest.mark.parametrize("harm", [flipped, made_nan, poisoned, enlarged])
def test_after_a_fault_of_the_machine_the_same_data_give_the_run_that_would_have_been(
    harm: Callable[[Training], None], step: int
) -> None:
    expected, untouched = run()
    assert untouched.events == []
    training, loop = run(policy=AGAIN, hurt=once(step, harm))
    assert training.capture() == expected.capture()
    assert len(loop.events) == 1
    assert loop.events[0].to_step < step


def bad_data(first: int, last: int) -> Callable[[int], float]:
    return lambda n: 1e20 if first <= n <= last else targets(n)


def test_data_that_hurt_are_left_out() -> None:
    asked: list[int] = []

    def data(n: int) -> float:
        asked.append(n)
        return bad_data(100, 103)(n)

    training, loop = run(data=data)
    (event,) = loop.events
    assert event.symptom.code is SymptomCode.SKIPS_IN_A_ROW
    assert event.left_out is not None
    assert event.left_out[0] == {"epoch": 0, "batch": event.to_step}
    assert asked == list(range(len(asked)))  # no batch is used twice
    assert len(asked) == 200 + event.left_out[1]["batch"] - event.to_step + 1
    assert training.weight == pytest.approx(1.0, abs=0.2)


def test_the_snapshot_is_older_than_the_fault_may_be() -> None:
    _, loop = run(data=bad_data(100, 103))
    (event,) = loop.events
    assert event.symptom.origin == 101
    # Of the snapshots at 0, 20, 40, 60, 80 and 100, that of 60 is the last with 30 steps before the origin.
    assert event.to_step == 60


def test_a_fault_before_any_snapshot_is_good_goes_back_to_the_beginning() -> None:
    _, loop = run(data=bad_data(10, 15))
    assert [event.to_step for event in loop.events] == [0]


def test_the_same_fault_gets_the_next_response_and_then_the_run_stops(caplog: Any) -> None:
    responses = (Response(), Response(older=1, skip_further=10, rate=0.5, steps=7), Response(skip_data=False))
    policy = RecoveryPolicy(every=20, good_after=10, check_every=5, skips_in_a_row=4, responses=responses)
    training = Training()
    with pytest.raises(RecoveryStopped) as stopped, caplog.at_level(logging.WARNING, "stablenum"):
        run(policy=policy, data=bad_data(100, 10_000), training=training)
    assert stopped.value.code == 3
    assert stopped.value.step == 60
    assert math.isfinite(training.weight)
    assert len(training.record) == 60
    report = str(stopped.value)
    assert "all 3 responses to this fault were tried" in report
    assert report.count("Tried: step") == 3
    assert "Attempt 1: back to step 80, batches 80 to 104 of epoch 0 left out" in report
    assert "Attempt 2: back to step 60, batches 60 to 119 of epoch 0 left out" in report
    assert "Attempt 3: back to step 60, the same data again" in report
    assert "learning rate x 0.5" in report
    assert "the state of step 60" in report
    assert sum("Recovery at step" in line for line in caplog.messages) == 3


def test_a_later_fault_is_another_one() -> None:
    def data(n: int) -> float:
        return 1e20 if 100 <= n < 105 or 300 <= n < 305 else targets(n)

    policy = RecoveryPolicy(
        every=20, good_after=10, check_every=5, skips_in_a_row=4, responses=(Response(),), forget_after=50
    )
    _, loop = run(400, policy=policy, data=data)
    assert [event.attempt for event in loop.events] == [1, 1]
    with pytest.raises(RecoveryStopped, match="all 1 responses"):
        run(400, policy=RecoveryPolicy(**_fields(policy) | {"forget_after": 1000}), data=data)
    with pytest.raises(RecoveryStopped, match="the budget of 1 rewinds"):
        run(400, policy=RecoveryPolicy(**_fields(policy) | {"budget": 1}), data=data)


def test_a_log_is_given_each_rewind_and_its_reason() -> None:
    training, loop = run(hurt=once(73, made_nan))
    (event,) = loop.events
    ((rewind, rows),) = training.logged
    # It is seen after 75 steps, of which the last has the number 74 in the guard's record.
    assert (event.symptom.step, event.to_step) == (75, 40)
    assert (rewind.symptom, rewind.first, rewind.last) == ("nonfinite_state", 40, 74)
    assert rows == 40  # the state has been put back
    assert rewind.seen == "a parameter is not finite (weight)"
    done = rewind.done.replace(": ", ": back to step 40, ")
    assert str(event) == f"step 75: {rewind.seen}, likely since step {event.symptom.origin}. {done}"


def test_a_log_is_given_steps_by_their_numbers_in_the_record() -> None:
    """The guard had made steps before the recovery, which counts its own."""
    training = Training()
    for n in range(10):
        training.train(targets(n))
    run(training=training, hurt=once(3, made_nan))
    ((rewind, _),) = training.logged
    assert (rewind.first, rewind.last) == (10, 14)


def test_a_log_is_given_a_return_to_the_first_step() -> None:
    training, _ = run(hurt=once(3, made_nan))
    ((rewind, rows),) = training.logged
    assert (rewind.first, rewind.last, rows) == (0, 4, 0)


def test_a_log_is_given_the_end_of_a_run_that_is_stopped() -> None:
    training = Training()

    def always(training: Training, now: int) -> None:
        if now == 73:
            made_nan(training)

    with pytest.raises(RecoveryStopped):
        run(training=training, hurt=always, policy=dataclasses.replace(POLICY, budget=1))
    tried, stopped = (rewind for rewind, _ in training.logged)
    assert tried.done.startswith("Attempt 1: ")
    assert stopped.done == "The training was stopped: the budget of 1 rewinds is used up"
    assert stopped.seen == "a parameter is not finite (weight)"


def _fields(policy: RecoveryPolicy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in RecoveryPolicy.__dataclass_fields__}


def test_easing_lasts_as_long_as_the_response_says() -> None:
    policy = RecoveryPolicy(
        every=20, good_after=10, check_every=5, skips_in_a_row=4,
        responses=(Response(rate=0.5, clip=2.0, steps=28),),
    )  # fmt: skip
    rates: list[tuple[int, float]] = []
    training, loop = run(
        policy=policy, data=bad_data(100, 103), hurt=lambda t, step: rates.append((step, t.rate))
    )
    (event,) = loop.events
    assert event.eased_until == event.symptom.step + 28  # between two checks
    eased = [step for step, rate in rates if rate == 0.05]
    assert eased == list(range(event.to_step + 1, event.eased_until + 1))
    assert [e is None for e in training.easings] == [False, True]
    assert training.easings[0] == Easing(0.5, event.clip_at, False, event.eased_until)
    assert event.clip_at is not None
    assert 0 < event.clip_at < 10


def test_what_only_the_user_sees_is_a_symptom() -> None:
    policy = RecoveryPolicy(every=20, good_after=10, check_every=5, audit=False)
    told: list[int] = []

    def predicate() -> str | None:
        return "samples look odd" if loop.step == 50 and not loop.events else None

    random.seed(7)
    training = Training()
    loop = RecoveryLoop(policy, training, targets, predicate=predicate)
    for batch in loop.batches(120):
        training.train(batch)
        if loop.step == 90 and not told:
            told.append(loop.step)
            loop.evaluated(finite=True)
        if loop.step == 102 and told == [90]:
            told.append(loop.step)
            loop.evaluated(finite=False)
    first, second = loop.events
    assert (first.symptom.code, first.symptom.detail) == (SymptomCode.REPORTED, "samples look odd")
    assert (second.symptom.code, second.symptom.origin) == (SymptomCode.NONFINITE_EVALUATION, 91)
    assert loop.step == 120


def test_a_symptom_of_another_rank_rewinds_this_one_too() -> None:
    class OneOfTwo(Training):
        def agree(self, symptoms: Any) -> Any:
            there = len(self.record) == 50 and not loops[0].events
            return [*symptoms, Symptom(SymptomCode.NONFINITE_STATE, 50, 46, "NaN elsewhere")] * there

    training, loops = OneOfTwo(), []
    random.seed(7)
    loops.append(RecoveryLoop(POLICY, training, targets))
    for batch in loops[0].batches(80):
        training.train(batch)
    assert [event.symptom.detail for event in loops[0].events] == ["NaN elsewhere"]


def test_a_snapshot_that_was_good_is_not_used_if_the_user_says_that_the_fault_is_older() -> None:
    training = Training()
    random.seed(7)
    loop = RecoveryLoop(POLICY, training, targets)
    for batch in loop.batches(120):
        training.train(batch)
        if loop.step == 112 and len(loop.events) < 2:
            loop.report("grey", origin=112 if not loop.events else 50)
    assert [event.to_step for event in loop.events] == [80, 40]


def test_a_resumed_run_is_the_one_that_was_never_interrupted(tmp_path: Path) -> None:
    expected, straight = run(data=bad_data(100, 103))
    first, _ = run(137, data=bad_data(100, 103), folder=tmp_path)
    random.seed(12345)
    second = Training()
    second.saved = {step: s for step, s in first.saved.items() if step <= 120}
    loop = RecoveryLoop(POLICY, second, bad_data(100, 103), folder=tmp_path)
    assert loop.resume() == 120
    assert loop.events == straight.events
    for batch in loop.batches(200):
        second.train(batch)
    assert second.capture() == expected.capture()


EASED = RecoveryPolicy(
    every=20, good_after=30, check_every=5, window=16, skips_in_a_row=4, runaway_steps=6,
    responses=(Response(rate=0.5, steps=30),),
)  # fmt: skip


def test_steps_are_eased_up_to_the_one_named_also_if_no_check_follows_it() -> None:
    rates: dict[int, float] = {}
    harm = once(101, made_nan)

    def hurt(training: Training, step: int) -> None:
        rates[step] = training.rate
        harm(training, step)

    _, loop = run(policy=dataclasses.replace(EASED, responses=(Response(rate=0.5, steps=33),)), hurt=hurt)
    assert (loop.events[0].to_step, loop.events[0].eased_until) == (60, 138)
    assert {step for step, rate in rates.items() if rate == 0.05} == set(range(61, 139))


EASED_AGAIN = dataclasses.replace(EASED, responses=(Response(skip_data=False, rate=0.5, steps=30),))


@pytest.mark.parametrize("policy", [EASED, EASED_AGAIN])
@pytest.mark.parametrize("killed_after", [1, 17, 40])
def test_a_run_that_is_killed_after_a_rewind_goes_on_as_the_one_that_was_not(
    policy: RecoveryPolicy, killed_after: int, tmp_path: Path
) -> None:
    expected, straight = run(policy=policy, hurt=once(101, made_nan))
    assert [event.to_step for event in straight.events] == [60]
    first = Training()
    random.seed(7)
    loop, hurt = RecoveryLoop(policy, first, targets, folder=tmp_path), once(101, made_nan)
    since = 0
    for batch in loop.batches(200):
        since += bool(loop.events)
        if since > killed_after:
            break
        hurt(first, loop.step + 1)
        first.train(batch)
    second = Training()
    second.saved = first.saved
    again = RecoveryLoop(policy, second, targets, folder=tmp_path)
    assert again.resume() == (60 if killed_after < 20 else 80 if killed_after < 40 else 100)
    _train(second, again, 200)
    assert second.capture() == expected.capture()
    assert again.events == straight.events


def test_a_rewind_is_in_the_budget_of_a_restart_whatever_fails_in_it(tmp_path: Path) -> None:
    class Failing(Training):
        def restore(self, state: Any) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        run(hurt=once(101, made_nan), training=Failing(), folder=tmp_path)
    assert len(json.loads((tmp_path / "recovery.json").read_text())["events"]) == 1


def test_training_goes_on_if_the_ledger_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    _, loop = run(hurt=once(101, made_nan), folder=tmp_path / "file" / "folder")
    assert loop.step == 200
    assert "recovery.json could not be written" in caplog.text


def test_a_run_that_gives_up_leaves_nothing_newer_than_its_good_state_on_the_disk() -> None:
    training = Training()
    with pytest.raises(RecoveryStopped) as stopped:
        run(data=bad_data(100, 10**9), training=training)
    assert max(training.saved) == stopped.value.step


def test_all_ranks_have_the_ledger_of_the_first_after_a_restart(tmp_path: Path) -> None:
    first, loop = run(hurt=once(101, made_nan), folder=tmp_path)
    content = (tmp_path / "recovery.json").read_bytes()

    class Second(Training):
        def shared(self, value: Any) -> Any:
            assert value is None
            return tmp_path / "recovery.json", content

    second = Second()
    second.saved = first.saved
    again = RecoveryLoop(POLICY, second, targets)
    again.resume()
    assert again.events == loop.events
    assert len(loop.events) == 1


def _is_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _is_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    "damage",
    [
        _is_folder,
        _is_pipe,
        lambda file: file.write_bytes(file.read_bytes().replace(b'"step": 1', b'"step": "1', 1)),
        lambda file: file.write_bytes(file.read_bytes().replace(b'"attempt": 1', b'"attempt": null')),
        *(
            lambda file, content=content: file.write_bytes(content)
            for content in (
                *(b"", b'{"events": [', b"[]", b"{}", b'{"events": null}', b'{"events": [{}]}'),
                *(b'{"events": [1]}', b"\xff\xfe", b'{"events":' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
            )
        ),
    ],
)
def test_a_damaged_ledger_is_named_and_nothing_is_changed(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    first, _ = run(hurt=once(101, made_nan), folder=tmp_path)
    damage(tmp_path / "recovery.json")
    second = Training()
    second.saved, before = first.saved, second.capture()
    loop = RecoveryLoop(POLICY, second, targets, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"recovery\.json cannot be read: .*remove it"):
        loop.resume()
    assert (loop.step, list(loop.events), second.capture()) == (0, [], before)


def test_a_restart_does_not_refill_the_budget(tmp_path: Path) -> None:
    forever = bad_data(100, 10**9)
    training = Training()
    with pytest.raises(RecoveryStopped):
        run(data=forever, folder=tmp_path, training=training)
    rewinds = []
    for _ in range(5):
        again = Training()
        again.saved = training.saved
        loop = RecoveryLoop(POLICY, again, forever, folder=tmp_path)
        loop.resume()
        with pytest.raises(RecoveryStopped):
            _train(again, loop, 200)
        rewinds.append(len(loop.events))
    assert rewinds == [3] * 5


def test_nothing_to_resume_from_changes_nothing() -> None:
    loop = RecoveryLoop(POLICY, Training(), targets)
    assert loop.resume() == 0


def test_the_history_names_the_batches() -> None:
    _, loop = run(7, data=[0.0, 1.0, 2.0], identify=lambda batch: f"file {batch:.0f}")
    assert [row["batch"][-1] for row in loop.history()] == list("0120120")
    _, loop = run(4, data=[0.0, 1.0, 2.0])
    assert loop.history()[-1]["batch"] == {"epoch": 1, "batch": 0}


def test_the_history_names_the_batches_in_the_middle_of_a_step_too() -> None:
    training = Training()
    loop = RecoveryLoop(POLICY, training, targets)
    for batch in loop.batches(8):
        before = [row["batch"]["batch"] for row in loop.history()]
        training.train(batch)
        after = [row["batch"]["batch"] for row in loop.history()]
        assert (before, after) == (list(range(loop.step)), list(range(loop.step + 1)))


@pytest.mark.parametrize("every", [2, 3])
def test_the_history_names_no_batch_where_rows_and_batches_do_not_match(every: int) -> None:
    training = Training()
    loop = RecoveryLoop(POLICY, training, targets)
    for batch in loop.batches(60):
        if not (20 <= loop.step < 40) or loop.step % every == 0:
            training.train(batch)
    named = [None if row["batch"] is None else row["batch"]["batch"] for row in loop.history()]
    assert named == [*range(20), *[None] * len(range(20 + -20 % every, 40, every)), *range(40, 60)]


def test_the_history_names_the_batches_of_a_guard_that_has_stepped_before() -> None:
    training = Training()
    for number in range(200):
        training.train(targets(number))
    loop = RecoveryLoop(POLICY, training, targets)
    _train(training, loop, 3)
    named = [row["batch"] for row in loop.history()]
    assert named == [None] * 125 + [{"epoch": 0, "batch": number} for number in range(3)]


def test_the_report_replays_the_first_skipped_step() -> None:
    seen: list[float] = []

    def explain(batch: float) -> str:
        seen.append(batch)
        return "log of 0 at train.py:12"

    policy = RecoveryPolicy(**_fields(POLICY) | {"responses": (Response(),)})
    data = lambda n: n + 1e20 if n >= 100 else targets(n)  # noqa: E731
    with pytest.raises(RecoveryStopped, match=r"replayed:\n  log of 0 at train.py:12"):
        run(data=data, policy=policy, explain=explain)
    assert seen == [pytest.approx(1e20)]


def test_second_moments_may_grow_with_the_gradients() -> None:
    def hurt(training: Training, step: int) -> None:
        training.second_moment += 100 * max((row["grad_norm"] for row in training.record), default=0.0) ** 2

    _, loop = run(hurt=hurt)
    assert loop.events == []


def test_an_enlarged_second_moment_is_named() -> None:
    _, loop = run(hurt=once(50, enlarged))
    (event,) = loop.events
    assert (event.symptom.code, event.symptom.names) == (SymptomCode.POISONED_MOMENTS, ("weight",))
    assert event.symptom.detail == "the second moments of 1 parameter are such that no gradients produce them"


def wrong(measures: dict[str, Measures], watch: ParameterWatch | None = None) -> dict[str, list[str]]:
    return {what: names for what, names in (watch or ParameterWatch()).look(measures).items() if names}


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.99), (0.0, 0.999), (0.9, 0.9999)])
def test_moments_of_any_gradients_are_explained(betas: tuple[float, float]) -> None:
    first, second, largest = 0.0, 0.0, 0.0
    draw = random.Random(str(betas))
    for _ in range(3000):
        g = math.exp(draw.gauss(0, 4)) if draw.random() < 0.1 else draw.gauss(0, 1e-3)
        first = betas[0] * first + (1 - betas[0]) * g
        second = betas[1] * second + (1 - betas[1]) * g * g
        largest = max(largest, abs(first) / math.sqrt(second))
    b1, b2 = betas
    assert largest <= 1.001 * (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))
    assert wrong({"w": Measures(1.0, 0.0, second, largest)}) == {}
    assert wrong({"w": Measures(1.0, 0.0, second, 1000 * largest)}) == {"unexplained": ["w"]}


def test_moments_that_begin_are_not_judged_by_what_they_were() -> None:
    watch = ParameterWatch()
    watch.look({"w": Measures(1.0)})
    assert wrong({"w": Measures(1.0, second=1.0)}, watch) == {}


def jumps(norms: Sequence[float]) -> list[int]:
    """The looks at which a parameter with these norms has jumped, by a watch that is saved in between."""
    watch, found = ParameterWatch(), []
    for i, norm in enumerate(norms):
        if wrong({"w": Measures(norm)}, watch):
            found.append(i)
        saved, watch = json.loads(json.dumps(watch.state_dict())), ParameterWatch()
        watch.load_state_dict(saved)
    return found


@pytest.mark.parametrize(
    ("norms", "at"),
    [
        ([8.0, 8.1, 8.2, 8.25, 8.3, 24.0], [5]),
        ([8.0, 8.1, 8.2, 8.25, 8.3, 1.7e38], [5]),
        ([8.0, 8.1, 8.2, 8.25, 8.3, math.inf], [5]),
        ([8.0, 8.1, 8.2, 8.25, 8.3, 16.0], []),  # not twice
        ([8.0, 8.1, 8.2, 8.25, 8.3, 0.0], []),  # a reset
        ([8.0, 8.1, 24.0], []),  # too early to know
        ([0.0, 0.1, 0.3, 0.8, 1.9, 4.0, 9.0], []),  # from 0, with a rate that warms up
        ([1e-3, 0.5, 1e-3, 0.5, 1e-3, 0.5, 1e-3, 0.5], []),  # a scale about 0
        ([3.0, 3.0, 3.0, 3.0, 3.0, 30.0, 31.0], []),  # frozen up to there
        ([0.0, 0.0, 0.0, 0.0, 0.2, 0.4, 0.6], []),  # frozen, and all 0
    ],
)
def test_only_a_parameter_that_leaps_beyond_all_its_changes_has_jumped(
    norms: list[float], at: list[int]
) -> None:
    assert jumps(norms) == at


def test_a_run_that_goes_back_still_knows_how_much_its_parameters_change() -> None:
    watch, first = ParameterWatch(), ParameterWatch().state_dict()
    for norm in (8.0, 8.1, 8.2, 8.3, 8.4):
        watch.look({"w": Measures(norm)})
    assert wrong({"w": Measures(30.0)}, watch) == {"jumped": ["w"]}
    watch.load_state_dict(first)  # as at step 0
    watch.look({"w": Measures(8.0)})
    assert wrong({"w": Measures(30.0)}, watch) == {"jumped": ["w"]}


def test_nothing_is_clipped_where_the_usual_norm_is_0() -> None:
    broken = once(100, made_nan)

    def hurt(training: Training, step: int) -> None:
        for row in training.record:
            row["grad_norm"] = 0.0
        broken(training, step)

    policy = RecoveryPolicy(**_fields(POLICY) | {"responses": Response(clip=1.0, steps=50)})
    _, loop = run(150, hurt=hurt, policy=policy)
    (event,) = loop.events
    assert event.clip_at is None


def test_a_jump_is_answered_and_names_the_parameter() -> None:
    def overwrite(training: Training) -> None:
        training.weight += 500.0

    _, loop = run(
        hurt=once(99, overwrite), policy=RecoveryPolicy(**_fields(POLICY) | {"runaway_steps": None})
    )
    (event,) = loop.events
    assert (event.symptom.code, event.symptom.names) == (SymptomCode.RUNAWAY_PARAMETER, ("weight",))
    assert "a norm more than doubled" in str(event)


def test_a_buffer_that_jumps_is_answered_and_the_step_is_named() -> None:
    def spoil(training: Training) -> None:
        training.buffer *= 1e3

    def drifting(spoil: Hurt) -> Hurt:
        def hurt(training: Training, step: int) -> None:
            training.buffer *= 1.001
            spoil(training, step)

        return hurt

    _, loop = run(hurt=drifting(once(97, spoil)))
    (event,) = loop.events
    assert (event.symptom.code, event.symptom.names) == (SymptomCode.RUNAWAY_BUFFER, ("buffer",))
    assert (event.symptom.origin, event.symptom.step) == (97, 100)
    assert "a buffer more than doubled in one step" in str(event)
    assert "likely since step 97." in str(event)
    blind = RecoveryPolicy(**_fields(POLICY) | {"buffer_threshold": None})
    assert run(hurt=drifting(once(97, spoil)), policy=blind)[1].events == []


# --- the plan ------------------------------------------------------------------------------------


def test_an_event_survives_json() -> None:
    _, loop = run(data=bad_data(100, 103))
    (event,) = loop.events
    assert RecoveryEvent.from_dict(json.loads(json.dumps(event.to_dict()))) == event


def _snapshots(*steps: int, keep: int = 3, good_after: int = 10) -> Snapshots:
    held = Snapshots(keep, good_after)
    for step in steps:
        held.add(Snapshot(step, None, None, {}))
    return held


def test_the_newest_good_snapshot_is_never_dropped() -> None:
    for now in range(1, 400, 7):
        held = _snapshots(*range(now), keep=2, good_after=50)
        good = [step for step in held.steps() if step + 50 < now]
        assert good[-1:] >= [now - 101] or now <= 51
        assert held.steps()[-1] == now - 1
        assert len(held) <= 2 + 4


def test_snapshots_after_a_rewind_replace_those_that_were_there() -> None:
    held = _snapshots(0, 20, 40, 60, keep=9)
    held.drop_from(21)
    held.add(Snapshot(20, "new", None, {}))
    assert held.steps() == [0, 20]
    assert held.good_before(100)[0].state == "new"


@given(
    st.lists(st.integers(0, 400), unique=True, min_size=1, max_size=12).map(sorted),
    st.integers(1, 500),
    st.integers(0, 120),
)
def test_no_good_snapshot_is_near_the_origin(steps: list[int], origin: int, good_after: int) -> None:
    held = Snapshots(20, good_after)
    for step in steps:
        held.add(Snapshot(step, None, None, {}))
    good = [s.step for s in held.good_before(origin)]
    expected = [step for step in reversed(steps) if step + good_after < origin]
    assert good == (expected or steps[:1])


def test_a_snapshot_is_not_good_yet_at_its_last_step_of_waiting_nor_at_the_origin() -> None:
    held = _snapshots(0, 5, 9, good_after=10)
    assert [s.step for s in held.good_before(15)] == [0]
    assert [s.step for s in held.good_before(16)] == [5, 0]
    held.confirm_before(16)  # 5 need not wait any more
    assert [s.step for s in held.good_before(5)] == [0]
    assert [s.step for s in held.good_before(6)] == [5, 0]


@given(st.data())
def test_no_stream_of_faults_makes_a_run_endless(data: st.DataObject) -> None:
    """Whatever shows at whatever step: a run ends, or stops after its budget."""
    policy = RecoveryPolicy(
        every=data.draw(st.integers(1, 15)),
        keep=data.draw(st.integers(2, 4)),
        good_after=data.draw(st.integers(0, 20)),
        check_every=data.draw(st.integers(1, 9)),
        budget=data.draw(st.integers(1, 6)),
        forget_after=data.draw(st.integers(0, 30)),
        responses=tuple(
            Response(older=older, skip_data=skip)
            for older, skip in data.draw(
                st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=3)
            )
        ),
    )
    training, made = Training(), 0
    loop = RecoveryLoop(policy, training, targets)
    try:
        for batch in loop.batches(40):
            made += 1
            training.train(batch)
            if data.draw(st.integers(0, 9)) == 0:
                loop.report("odd", origin=data.draw(st.integers(1, loop.step + 1)))
    except RecoveryStopped as stopped:
        ended = stopped.step
    else:
        ended = 40
    assert loop.step == ended == len(training.record)
    assert len(loop.events) <= policy.budget
    assert made <= 40 * (policy.budget + 2)


def test_a_plan_stops_in_the_last_good_state() -> None:
    _, loop = run(data=bad_data(100, 103))
    symptom = loop.events[0].symptom
    held = _snapshots(0, 40, 80, 100, keep=9, good_after=30)
    move = plan(symptom, held, Ledger(loop.events), RecoveryPolicy(responses=(Response(),)))
    assert isinstance(move, Stop)
    assert move.snapshot.step == 40
    move = plan(symptom, held, Ledger(loop.events), RecoveryPolicy(responses=(Response(), Response(older=9))))
    assert isinstance(move, Rewind)
    assert (move.snapshot.step, move.attempt) == (0, 2)


@pytest.mark.parametrize("left_at", [1, 37, 39, 40, 41, 199])
def test_a_loop_that_is_left_and_continued_makes_the_run_that_was_never_left(left_at: int) -> None:
    expected, straight = run(data=bad_data(100, 103))
    random.seed(7)
    training = Training()
    loop = RecoveryLoop(POLICY, training, bad_data(100, 103))
    for batch in loop.batches(200):
        training.train(batch)
        if len(training.record) == left_at:
            break
    _train(training, loop, 200)
    assert training.capture() == expected.capture()
    assert loop.events == straight.events


def test_a_loop_that_is_left_at_its_last_step_makes_no_further_one() -> None:
    training = Training()
    loop = RecoveryLoop(POLICY, training, targets)
    for batch in loop.batches(30):
        training.train(batch)
        if len(training.record) == 30:
            break
    assert list(loop.batches(30)) == []
    assert loop.step == len(training.record) == 30


def test_a_run_that_begins_with_nan_is_not_begun_also_if_there_was_nothing_to_resume() -> None:
    training = Training()
    training.weight = math.nan
    loop = RecoveryLoop(POLICY, training, targets)
    assert loop.resume() == 0
    with pytest.raises(ValueError, match="weight is not finite"):
        loop.batches(10)


@pytest.mark.parametrize("origin", [0, -5, True, 1.5])
def test_the_origin_of_a_report_is_a_step(origin: Any) -> None:
    loop = RecoveryLoop(POLICY, Training(), targets)
    with pytest.raises(ValueError, match="origin"):
        loop.report("grey", origin)


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        ({"epoch": 0, "batch": 450}, {"epoch": 0, "batch": 539}, "batches 450 to 539 of epoch 0 left out"),
        (
            {"epoch": 0, "batch": 450},
            {"epoch": 1, "batch": 12},
            "batch 450 of epoch 0 to batch 12 of epoch 1 left out",
        ),
        ([3, 4], [5, 6], "batches [3, 4] to [5, 6] left out"),
        ({"file": "a", "row": 3}, {"file": "b", "row": 0}, "batches file a row 3 to file b row 0 left out"),
        (None, {"epoch": 2, "batch": 7}, "batches up to 7 of epoch 2 left out"),
        (None, None, "batches left out"),
    ],
)
def test_events_say_which_batches_were_left_out(first: Any, last: Any, text: str) -> None:
    symptom = Symptom(SymptomCode.REPORTED, 9, 8, "grey")
    event = RecoveryEvent(symptom=symptom, attempt=1, to_step=3, response=Response(), left_out=(first, last))
    assert str(event) == f"step 9: grey, likely since step 8. Attempt 1: back to step 3, {text}"


def test_a_snapshot_that_was_found_good_is_so_after_a_restart(tmp_path: Path) -> None:
    first = Training()
    random.seed(7)
    loop, hurt = RecoveryLoop(POLICY, first, targets, folder=tmp_path), once(101, made_nan)
    for batch in loop.batches(200):
        if loop.events and loop.step == 63:
            break
        hurt(first, loop.step + 1)
        first.train(batch)
    second = Training()
    second.saved = first.saved
    again = RecoveryLoop(POLICY, second, targets, folder=tmp_path)
    assert again.resume() == 60
    for each, training in ((loop, first), (again, second)):
        each.report("grey", origin=62)
        _train(training, each, 80)
    assert [event.to_step for event in again.events] == [event.to_step for event in loop.events] == [60, 40]
