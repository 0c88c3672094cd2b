"""Tables of the pages on comparing two programs: the causes, and the results of the last benchmark runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measured import read, software, table, with_software

from stablenum.diagnosis.diff.causes.remedies import REMEDIES, REMEDIES_OF_UPDATES

__all__ = ["write_diff_causes", "write_diff_cost", "write_diff_peers"]

_PHASES = ("forward", "backward", "update")
_TITLES = {
    "copied": "A program of PyTorch, and a copy with a change",
    "rewritten": "A program of PyTorch, rewritten with other modules and operations",
    "ported": "A program of PyTorch, and its port to JAX",
}


def write_diff_causes(directory: Path) -> None:
    """Write ``diff-causes.md``: the names of the causes, and what to do about each."""
    rows = []
    for code, remedy in REMEDIES.items():
        of_updates = REMEDIES_OF_UPDATES[code]
        more = "" if of_updates == remedy else f" Where updates differ: {of_updates}"
        rows.append([f"`{code}`", f"{remedy}{more}".replace("*", "\\*")])
    (directory / "diff-causes.md").write_text("\n".join(table(["cause", "what to do"], rows)) + "\n", "utf-8")


def write_diff_peers(results: Path, directory: Path) -> None:
    """Write ``diff-peers.md``: what each tool finds, one table for each kind of pair.

    Raises:
        FileNotFoundError: there are no results.
        KeyError: the file does not have the form that ``benchmarks.diff_peers`` writes.
    """
    report = read(results, "diff-peers")
    lines: list[str] = []
    for part, title in _TITLES.items():
        rows = report[part]
        first = next(iter(rows.values()))
        counts = {phase: first[phase]["pairs"] for phase in (*_PHASES, "equivalent")}
        mistakes = sum(counts[phase] for phase in _PHASES)
        head = ["", *(f"{phase}, of {counts[phase]}" for phase in _PHASES), "false alarms", "in the update"]
        body = [[method, *_cells(row)] for method, row in rows.items()]
        lines += [f"{title}: {mistakes} mistakes, {counts['equivalent']} pairs that agree", ""]
        lines += [*table(head, body), ""]
    (directory / "diff-peers.md").write_text("\n".join([*lines, f"{software(report)}."]) + "\n", "utf-8")


def _cells(row: dict[str, Any]) -> list[str]:
    found = [f"{row[phase]['seen']} / {row[phase]['place']}" for phase in _PHASES]
    alike = row["equivalent"]
    return [*found, str(alike["false_alarms"]), str(alike["in_the_update"])]


def write_diff_cost(results: Path, directory: Path) -> None:
    """Write ``diff-cost.md``: time and memory of a comparison beside plain training steps, by size.

    Raises:
        FileNotFoundError: there are no results.
        KeyError: the file does not have the form that ``benchmarks.diff_cost`` writes.
    """
    report = read(results, "diff")
    head = ["parameters", "", "operations", "seconds", "x both plain steps", "peak memory, MB"]
    body = []
    for size, row in report["sizes"].items():
        steps = row["steps"]
        body.append([size, "plain steps", "", f"{steps['seconds']:.2f}", "1", str(steps["peak_mb"])])
        for kind in ("alike", "recorded", "differing"):
            if kind in row:
                body.append(["", _KINDS[kind].format(**row[kind]), *_cost(row[kind])])
    (directory / "diff-cost.md").write_text(with_software(table(head, body), report), "utf-8")


_KINDS = {
    "alike": "programs that agree",
    "recorded": "the first from a file, recorded in {record_seconds} s",
    "differing": "a difference in each layer",
}


def _cost(row: dict[str, Any]) -> list[str]:
    ratio = f"{row['ratio']:.0f} ± {row['half_interval']:.0f}"
    return [f"{row['operations']:,}", f"{row['seconds']:.0f}", ratio, str(row["peak_mb"])]
