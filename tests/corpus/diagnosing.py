"""``replay`` on a planted failure, and which parts of its answer are right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from corpus.case import bad_line, build
from corpus.tools.ours import PLACE, replay

__all__ = ["Outcome", "diagnose"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a diagnosis reported, and whether it is right.

    ``operation`` and ``line`` are also True if the case has no operation to name and none was named.
    """

    name: str
    detected: bool
    operation: bool
    line: bool
    cause: bool
    module: bool
    where: bool
    said: str


def diagnose(module: ModuleType, framework: str) -> Outcome:
    """Replays the failure and compares the answer with the case's."""
    make = build(module, framework)
    if make is None:
        raise ValueError(f"{module.__name__} is not for {framework}")
    return compare(module, framework, replay(framework, make()))


def compare(module: ModuleType, framework: str, report: Any) -> Outcome:
    """The right parts of a report on this case."""
    case, first = module.CASE, report.findings[0] if report.findings else None
    cause = report.verdict.cause.value
    match = PLACE.search(str(report))
    place = (Path(match[1]).name, int(match[2])) if match else None
    accepted = case.operations(framework)
    expected = bad_line(module, framework) if accepted else None
    operation = first.operation if first else ""
    path = first.module if first else ""
    return Outcome(
        name=module.__name__.rpartition(".")[2],
        detected=not report.ok,
        operation=operation in accepted if accepted else True,
        line=place == expected if accepted else True,
        cause=cause in case.causes(framework),
        module=case.module in path,
        where=_right_where(first.where if first else "", case.where if framework == "jax" else ""),
        said=f"{operation or 'no operation'} ({first.primitive if first else ''}), {cause}, "
        f"{':'.join(map(str, place)) if place else 'no place'} "
        f"(expected {'/'.join(accepted)}, {'/'.join(case.causes(framework))}, {expected and expected[1]})",
    )


def _right_where(said: str, wanted: str) -> bool:
    """Nothing is reported if nothing is expected: a loop in Python has no iterations to count."""
    return wanted in said if wanted else not said
