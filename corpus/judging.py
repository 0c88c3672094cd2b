"""Which parts of a tool's answer are right, and how many of them over many programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpus.names import plain_name

__all__ = ["COLUMNS", "Score", "judge", "score"]

COLUMNS = ("detected", "line", "operation", "cause")


def judge(label: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, bool]:
    """What is right in a record of a result file.

    A column is missing where there is nothing to name, or where no answer is labelled. Of a healthy program
    there is only "detected", which is a false alarm. A record may hold its ``judged`` columns itself, if a
    person judged it. Of an error, or no answer in time, a record holds no answer, so that nothing is right.
    """
    if "judged" in record:
        return dict(record["judged"])
    detected = bool(record.get("detected"))
    right = {"detected": detected}
    if label["kind"] == "healthy":
        return right
    if label["lines"]:
        file = Path(record.get("file") or label["file"]).name
        right["line"] = (
            detected and file == Path(label["file"]).name and record.get("line", 0) in label["lines"]
        )
    if label["operations"]:
        accepted = {plain_name(name) for name in label["operations"]}
        right["operation"] = detected and plain_name(record.get("operation", "")) in accepted
    if label["causes"]:
        right["cause"] = detected and record.get("cause", "") in label["causes"]
    return right


@dataclass
class Score:
    """Counts over some programs.

    Attributes:
        right: how often each of ``COLUMNS`` is right in the failing programs.
        of: in how many there is something to name and a label for it.
        alarms: healthy programs that were blamed.
        healthy: healthy programs that were run.
        errors: programs on which the tool raised an error or gave no answer in time.
        seconds: the time of all of them.
        missed: the failing programs in which a column is wrong.
    """

    right: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    of: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    alarms: list[str] = field(default_factory=list)
    healthy: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    missed: dict[str, list[str]] = field(default_factory=lambda: {column: [] for column in COLUMNS})

    def add(self, name: str, label: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Count one program."""
        self.seconds += record.get("seconds", 0.0)
        if record.get("error"):
            self.errors.append(name)
        columns = judge(label, record)
        if label["kind"] == "healthy":
            self.healthy += 1
            self.alarms += [name] if columns["detected"] else []
            return
        for column, right in columns.items():
            if column in COLUMNS:
                self.of[column] += 1
                self.right[column] += right
                if not right:
                    self.missed[column].append(name)


def score(
    labels: Mapping[str, Mapping[str, Any]], records: Mapping[str, Mapping[str, Any]], names: Iterable[str]
) -> Score:
    """The counts over the programs of these names that have a record."""
    total = Score()
    for name in names:
        if name in records:
            total.add(name, labels[name], records[name])
    return total
