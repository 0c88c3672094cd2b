"""What the outcomes of several ranks come to, and how their commands find one another."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stablenum.commands.explain.verdicts import join
from stablenum.diagnosis import Finding, Report
from stablenum.diagnosis.replay.judge import Evidence
from stablenum.diagnosis.replay.values import Place, TensorStats
from stablenum.diagnosis.watch import launch as launches
from stablenum.diagnosis.watch.launch import FOLDER, Launch, LaunchError, has_failed, mark_failed
from stablenum.diagnosis.watch.plan import Failure, Outcome, Sent

LOSS = Failure(step=3, what="loss")


def report(rank: int, operation: str = "log", *, line: int = 7, spread: tuple[str, ...] = ()) -> Report:
    zero = TensorStats(dtype="float32", shape=(1,), size=1, min=0.0, max=0.0, amax=0.0, zero=1)
    finding = Finding(
        operation=operation,
        phase="forward",
        kind="inf",
        place=Place("train.py", line),
        inputs=(zero,),
        shard=f"rank {rank}",
        rank=rank,
        spread=spread,
    )
    return Report.of(Evidence(framework="torch", findings=(finding,)))


def received(rank: int, operation: str = "all_reduce") -> Report:
    found = report(rank, operation, line=9)
    return Report.of(replace(found.evidence, other_rank=True))


def outcome(report: Report | None, failure: Failure | None = LOSS, **rest: Any) -> Outcome:
    return Outcome(failure=failure, report=None if report is None else report.to_dict(), **rest)


def test_the_rank_that_made_the_value_is_reported_and_not_the_first_that_received_it() -> None:
    outcomes = {r: outcome(received(r)) for r in (0, 1, 3)} | {2: outcome(report(2))}
    joint = join(outcomes, 4)
    assert joint.failed == 2
    assert joint.report.findings[0].rank == 2
    assert joint.report.verdict.cause.value == "domain"
    assert joint.report.notes == ("ranks 0, 1 and 3 received it through all_reduce (train.py:9)",)


def test_a_rank_that_gave_a_value_away_is_reported_although_nothing_failed_on_it() -> None:
    sent = Sent(step=3, report=report(1).to_dict())
    joint = join({0: outcome(received(0)), 1: outcome(None, None, sent=sent)}, 2)
    assert joint.report.findings[0].rank == 1
    assert joint.failed == 0


def test_the_earliest_step_decides_and_equal_lines_are_named_together() -> None:
    later = Failure(step=4, what="loss")
    outcomes = {0: outcome(report(0, line=8), later), 1: outcome(report(1)), 2: outcome(report(2))}
    joint = join(outcomes, 3)
    assert joint.report.findings[0].rank == 1
    assert joint.report.notes == ("the same happens on rank 2",)


def test_a_sum_of_finite_numbers_that_overflows_is_no_other_ranks_fault() -> None:
    overflowed = TensorStats(dtype="float16", shape=(1,), size=1, min=6e4, max=6e4, amax=6e4)
    base = received(0)
    first = replace(base.findings[0], inputs=(overflowed,), outputs=(replace(overflowed, posinf=1),))
    of_all = Report.of(replace(base.evidence, findings=(first,)))
    joint = join({rank: outcome(of_all) for rank in (0, 1)}, 2)
    assert joint.report.verdict.cause.value == "overflow"
    assert joint.report.findings[0].shard == ""
    only_one = join({0: outcome(of_all)}, 2)  # rank 1 may have given it a bad value
    assert only_one.report.verdict.cause.value == "other_rank"
    assert "rank 1 did not report" in only_one.report.notes


def test_without_the_rank_that_made_it_what_is_known_is_reported() -> None:
    gone = Outcome(exit_code=137, error="killed", lost=True)
    joint = join({0: outcome(received(0, "recv")), 1: gone}, 2)
    assert joint.report.verdict.cause.value == "other_rank"
    assert "recv brought in inf" in str(joint.report)
    assert "rank 1 did not report" in joint.report.notes


def test_rank_shard_and_spread_are_in_every_form() -> None:
    shown = report(2, spread=("all_reduce (line 9)",))
    for text in (str(shown), shown.to_html()):
        assert "on rank 2" in text
        assert "from rank 2 it spread through all_reduce (line 9)" in text
    kept = json.loads(shown.to_json())["evidence"]["findings"][0]
    assert (kept["rank"], kept["shard"], kept["spread"]) == (2, "rank 2", ["all_reduce (line 9)"])
    assert Report.from_dict(json.loads(shown.to_json())) == shown


def test_outcomes_survive_the_way_through_a_file() -> None:
    sent = Sent(step=3, report=report(1).to_dict())
    given = outcome(report(1), sent=sent, cut_short=True)
    kept = json.dumps(given.to_dict())
    read = Outcome.from_dict(json.loads(kept))
    assert json.dumps(read.to_dict()) == kept
    assert (read.failure, read.sent.step, read.cut_short) == (LOSS, 3, True)


# --- finding one another -----------------------------------------------------------------------------


def launch(folder: Path, rank: int, **more: str) -> Launch:
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29500", FOLDER: str(folder), **more}
    found = Launch.of(environment)
    assert found is not None
    return found


def test_ranks_find_one_another_and_rank_0_decides(tmp_path: Path) -> None:
    told: list[Any] = []

    def second() -> None:
        other = launch(tmp_path, 1)
        other.begin()
        other.tell(1, Outcome(steps=5))
        told.append(other.decision(1))
        other.end()

    thread = threading.Thread(target=second)
    thread.start()
    first = launch(tmp_path, 0)
    first.begin()
    first.tell(1, Outcome(steps=4))
    assert {rank: o.steps for rank, o in first.outcomes(1).items()} == {0: 4, 1: 5}
    first.decide(1, {"plan": {"record_from": 3}})
    thread.join(0.3)
    assert thread.is_alive()  # it waits for the report, because torchrun ends all when one of them ends
    first.end()
    thread.join(10)
    assert told == [{"plan": {"record_from": 3}}]
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launch_has_left_is_not_taken_for_this_one(tmp_path: Path, monkeypatch) -> None:
    old = launch(tmp_path, 0)
    old.begin()
    leader = next(tmp_path.iterdir()) / "rank-0.json"
    said = json.loads(leader.read_text())
    leader.write_text(json.dumps({**said, "process": [said["process"][0], "0"]}))  # of another process
    monkeypatch.setattr(launches, "_START", 0.2)
    with pytest.raises(LaunchError, match=f"rank 1 does not find rank 0 .* set {FOLDER}"):
        launch(tmp_path, 1).begin()


def test_a_rank_that_does_not_report_is_not_waited_for_once_one_has_failed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(launches, "_KILLED", 0.2)
    first = launch(tmp_path, 0)
    first.begin()
    first.tell(1, Outcome())
    assert not has_failed(first.marks(1))
    mark_failed(first.marks(1), 0)
    assert has_failed(first.marks(1))
    assert not has_failed(first.marks(1), but=0)
    assert list(first.outcomes(1)) == [0]


def test_launches_with_another_port_or_restart_have_other_folders(tmp_path: Path) -> None:
    assert Launch.of({}) is None
    assert Launch.of(os.environ | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    first = launch(tmp_path, 0)
    first.begin()
    launch(tmp_path, 0, MASTER_PORT="29501").begin()
    launch(tmp_path, 0, TORCHELASTIC_RESTART_COUNT="1").begin()
    assert len(list(tmp_path.iterdir())) == 3
