"""The tables of the leaderboard, from the result files of ``corpus/results``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from measured import dense, software, table

from corpus.judging import COLUMNS, Score, score
from corpus.labels import read
from corpus.task import Task

__all__ = ["BOARDS", "write_leaderboard"]

# Name of the generated file -> the sets in it, and the columns that it shows.
BOARDS = {
    "held-out": (("unseen",), ("detected", "line", "cause")),
    "tuned": (("failing", "healthy"), COLUMNS),
    "silent": (("silent",), ("line", "cause")),
}
FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}


def write_leaderboard(results: Path, directory: Path) -> None:
    """Write one file for each board; it holds one table for each framework.

    Raises:
        FileNotFoundError: there are no result files.
    """
    files = sorted(results.glob("*.json"))
    if not files:
        raise FileNotFoundError(f"{results}: no result files; `python -m corpus run` writes them")
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for board, (sets, columns) in BOARDS.items():
        lines: list[str] = []
        for framework, title in FRAMEWORKS.items():
            lines += _board(entries, framework, title, sets, columns)
        (directory / f"leaderboard-{board}.md").write_text("\n".join(lines), encoding="utf-8")


def _board(
    entries: list[dict[str, Any]], framework: str, title: str, sets: tuple[str, ...], columns: tuple[str, ...]
) -> list[str]:
    """A table with one row for each tool, the one that finds most lines first."""
    labels = read()
    used = {
        name
        for entry in entries
        for name in entry["programs"]
        if Task(name).framework == framework and Task(name).set in sets
    }
    shown = [entry for entry in entries if used & entry["programs"].keys()]
    rows = [(entry, score(labels, entry["programs"], sorted(used))) for entry in shown]
    rows.sort(key=lambda row: (-row[1].right["line"], row[0]["tool"]))
    of = {column: max((total.of[column] for _, total in rows), default=0) for column in columns}
    healthy = sum(labels[name]["kind"] == "healthy" for name in used)
    tuned = {labels[name]["status"] for name in used} == {"tuned"}
    head = [
        "tool",
        *(f"{column}, of {of[column]}" for column in columns),
        "false alarms",
        "errors",
        "seconds",
    ]
    return [
        f"### {title}: {len(used) - healthy} failing, {healthy} healthy",
        "",
        *dense(table(head, [_row(entry, total, columns, tuned) for entry, total in rows])),
        "",
        *(f"{line}\n" for line in sorted({_measured(entry) for entry in shown} - {""})),
    ]


def _row(entry: dict[str, Any], total: Score, columns: tuple[str, ...], tuned: bool) -> list[str]:
    name = f"`{entry['tool']}`"
    if entry.get("first_run"):
        name += ", first run"
    elif tuned and entry["tool"] == "stablenum":
        name += ", **tuned**"
    named = {column for column in columns if total.right[column] or column == "detected"}
    cells = [_share(total.right[column], total.of[column] * (column in named)) for column in columns]
    seconds = f"{total.seconds:.0f}" if total.seconds else "–"
    alarms = f"{len(total.alarms)} of {total.healthy}" if total.healthy else "–"
    return [name, *cells, alarms, str(len(total.errors)), seconds]


def _share(right: int, of: int) -> str:
    """A dash where nothing was recorded, nothing is labelled, or the tool never names it."""
    return f"{right / of:.0%} ({right})" if of else "–"


def _measured(entry: dict[str, Any]) -> str:
    """With what an entry was measured, but for the version of the tool itself."""
    if "versions" not in entry:
        return ""
    versions = {name: version for name, version in entry["versions"].items() if name != entry["tool"]}
    return f"{software({**entry, 'versions': versions})}."
