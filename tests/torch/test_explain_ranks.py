"""One of four ranks makes a number that is not finite: which rank it was, on which line, and what follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from stablenum.commands.explain.verdicts import Joint, join
from stablenum.diagnosis import Report
from stablenum.diagnosis.watch.plan import Outcome
from tests.selection import only
from tests.torch.rank_faults import FAULTS, PROGRAMS, SIZE, Program, bad_line

ROOT = Path(__file__).parents[2]


class Pool:
    """Processes that run one program after another.

    Args:
        size: how many ranks there are.
        store: a file that does not exist.
    """

    def __init__(self, size: int, store: Path) -> None:
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        worker = [sys.executable, "-W", "ignore", "-m", "tests.torch.rank_worker"]
        self.ranks = [
            subprocess.Popen(
                [*worker, str(rank), str(size), str(store)],
                cwd=ROOT,
                env=env,
                text=True,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
            )
            for rank in range(size)
        ]

    def outcomes(self, program: Program) -> dict[int, Outcome]:
        """How the program ended on each rank."""
        return {rank: Outcome.from_dict(said) for rank, said in self.ask(program).items()}

    def ask(self, program: Program) -> dict[int, dict[str, Any]]:
        """What each rank says of the program."""
        for process in self.ranks:
            process.stdin.write(json.dumps([program.layout, program.fault, program.rank]) + "\n")
            process.stdin.flush()
        return {rank: self._said(process) for rank, process in enumerate(self.ranks)}

    @staticmethod
    def _said(process: subprocess.Popen[str]) -> dict[str, Any]:
        for line in process.stdout:
            if line.startswith("OUTCOME "):
                said: dict[str, Any] = json.loads(line.removeprefix("OUTCOME "))
                return said
        raise AssertionError(process.communicate()[1][-3000:])

    def close(self) -> None:
        for process in self.ranks:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Iterator[Pool]:
    pool = Pool(SIZE, tmp_path_factory.mktemp("ranks") / "store")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Iterator[dict[str, Report]]:
    """The report on each fault in one process."""
    pool = Pool(1, tmp_path_factory.mktemp("alone") / "store")
    found: dict[str, Report] = {}

    class Reports(dict[str, Report]):
        def __missing__(self, fault: str) -> Report:
            outcome = pool.outcomes(Program("alone", fault, 0))[0]
            self[fault] = Report.from_dict(outcome.report)
            return self[fault]

    yield Reports(found)
    pool.close()


def joined(outcomes: dict[int, Outcome]) -> Joint:
    for outcome in outcomes.values():
        assert not outcome.troubles, outcome.trouble
        assert not outcome.error
    return join(outcomes, SIZE)


ALWAYS = [Program("DDP", "sqrt", 2), Program("FSDP2+TP", "exp", 1), Program("pipeline", "div", 3)]


@pytest.mark.parametrize("program", only(ALWAYS, PROGRAMS), ids=str)
def test_the_rank_and_the_line_are_named_as_on_one_rank(ranks, alone, program):
    joint = joined(ranks.outcomes(program))
    first, same = joint.report.findings[0], alone[program.fault]
    assert (first.rank, first.shard) == (program.rank, f"rank {program.rank}")
    assert first.place.line == bad_line(program)
    assert first.place.code == same.findings[0].place.code
    assert first.operation == same.findings[0].operation
    assert joint.report.verdict.cause == same.verdict.cause
    assert f"on rank {program.rank}" in str(joint.report)


def test_there_are_30_programs_of_every_layout_and_fault() -> None:
    assert len(PROGRAMS) >= 30
    assert {p.fault for p in PROGRAMS} == set(FAULTS)
    assert {p.rank for p in PROGRAMS} == set(range(SIZE))


def test_a_sum_over_ranks_that_overflows_is_the_fault_of_none(ranks):
    report = joined(ranks.outcomes(Program("sum of halves", "half", -1))).report
    first = report.findings[0]
    assert (first.operation, first.kind, first.rank) == ("all_reduce", "inf", None)
    assert first.place.code == "torch.distributed.all_reduce(narrow)"
    assert report.verdict.cause.value == "overflow"


@pytest.mark.parametrize("layout", ["DDP", "FSDP2"])
def test_all_ranks_replay_a_skipped_step_at_once_and_each_speaks_for_itself(ranks, layout):
    said = ranks.ask(Program(f"replay {layout}", "sqrt", 1))
    for rank, found in said.items():
        report = Report.from_dict(found["report"])
        assert not found["applied"]
        assert found["same"]
        assert report.findings[0].shard == f"rank {rank}"
        if rank == 1:
            assert report.findings[0].operation == "sqrt"
            assert report.verdict.cause.value == "boundary_derivative"
            assert len(report.findings[0].spread) == 1
        else:
            assert report.findings[0].operation == {"DDP": "all_reduce", "FSDP2": "reduce_scatter"}[layout]
            assert report.findings[0].phase == "backward"
            assert report.verdict.cause.value == "other_rank"
