"""What the outcomes of several ranks come to: the rank on which a bad value was born, and its path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stablenum.diagnosis import Finding, Report
from stablenum.diagnosis.watch.plan import Failure, Outcome

__all__ = ["Joint", "join", "listed"]

# Collectives that add values of several ranks up, so that they may overflow by themselves.
_ADDING = ("all_reduce", "reduce_scatter", "dist.reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """The result of one run on all ranks.

    Attributes:
        failure: what failed first; None if nothing did.
        failed: the rank on which it failed.
        report: the one report; None if nothing was recorded.
    """

    failure: Failure | None = None
    failed: int | None = None
    report: Report | None = None


class _Verdict(NamedTuple):
    """The report of one rank."""

    only_sent: bool
    step: int
    rank: int
    report: Report

    @property
    def received(self) -> bool:
        """Whether a collective brought the value in."""
        return self.report.evidence.other_rank


def join(outcomes: Mapping[int, Outcome], size: int) -> Joint:
    """Return what failed, and the report of the rank in which the value was born.

    Args:
        outcomes: those of the ranks that have reported.
        size: how many ranks there are.
    """
    failures = [(o.failure.step, rank, o.failure) for rank, o in outcomes.items() if o.failure is not None]
    if not failures:
        return Joint()
    _, failed, failure = min(failures, key=lambda f: f[:2])
    verdicts = sorted(_verdicts(outcomes), key=lambda v: v[:3])
    born = [v for v in verdicts if not v.received]
    silent = sorted(set(range(size)) - {rank for rank, o in outcomes.items() if not o.lost})
    if not verdicts:
        return Joint(failure=failure, failed=failed)
    chosen = born[0] if born else verdicts[0]
    report = chosen.report
    own = outcomes[chosen.rank].failure
    if own is not None:
        failure, failed = own, chosen.rank
    if not born and not silent:
        report = _of_the_sum(report)
    notes = (*_path(verdicts, chosen), *_missing(silent), *report.notes)
    return Joint(failure=failure, failed=failed, report=replace(report, notes=notes))


def listed(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks in words.

    Example:
        >>> listed([2]), listed([0, 1, 3]), listed(list(range(20)))
        ('rank 2', 'ranks 0, 1 and 3', 'ranks 0, 1, 2, 3, 4, 5 and 14 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = list(map(str, ranks if len(ranks) <= 8 else ranks[:6]))
    last = shown.pop() if len(ranks) <= 8 else f"{len(ranks) - 6} more"
    return f"ranks {', '.join(shown)} and {last}"


def _verdicts(outcomes: Mapping[int, Outcome]) -> Iterable[_Verdict]:
    for rank, outcome in outcomes.items():
        own = outcome.report if outcome.failure is not None else None
        received = own is not None and own["evidence"]["other_rank"]
        if own is not None and outcome.failure is not None:
            yield _Verdict(False, outcome.failure.step, rank, Report.from_dict(own))
        if outcome.sent is not None and (own is None or received):
            yield _Verdict(True, outcome.sent.step, rank, Report.from_dict(outcome.sent.report))


def _of_the_sum(report: Report) -> Report:
    """Return a report on a collective that made the value itself, because no rank gave it a bad one."""
    first = report.findings[0]
    if first.operation not in _ADDING:
        return report
    alone = replace(first, shard="", rank=None)
    evidence = replace(report.evidence, other_rank=False, findings=(alone, *report.findings[1:]))
    return Report.of(evidence, notes=report.notes, seconds=report.seconds)


def _path(verdicts: Sequence[_Verdict], chosen: _Verdict) -> Iterable[str]:
    """Return which other ranks made such a value too, and through what it came to the others."""
    same, received = list[int](), dict[str, list[int]]()
    for v in verdicts:
        first = next(iter(v.report.findings), None)
        if v.rank == chosen.rank or first is None:
            continue
        if v.received:
            received.setdefault(_through(first), []).append(v.rank)
        elif _line(first) == _line(next(iter(chosen.report.findings), None)):
            same.append(v.rank)
    if same:
        yield f"the same happens on {listed(sorted(set(same)))}"
    for through, ranks in received.items():
        yield f"{listed(sorted(set(ranks)))} received it through {through}"


def _through(finding: Finding) -> str:
    return f"{finding.operation} ({finding.place})" if finding.place else finding.operation


def _line(finding: Finding | None) -> tuple[str, int] | None:
    return None if finding is None or finding.place is None else (finding.place.file, finding.place.line)


def _missing(silent: Sequence[int]) -> Iterable[str]:
    if silent:
        yield f"{listed(silent)} did not report"
