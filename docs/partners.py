"""The tables of the page on trainers under one bad batch, from ``benchmarks/results/partners.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["COLUMNS", "write_partners"]

FAULTS = {
    "nan_batch": "A NaN in a batch",
    "inf_gradient": "An infinite gradient under a finite loss",
    "loss_spike": "Targets 10,000 times too large",
    "fp16_overflow": "An overflow in float16",
    "nan_in_batchnorm": "Batch norm's statistics made non-finite",
    "nan_loss_on_one_rank": "A NaN loss on one of two processes",
}
COLUMNS = {
    "finite": "finite",
    "bit_equal": "bit-equal",
    "visible": "in the log",
    "scheduler_held": "scheduler held",
    "resumes": "resumes exactly",
    "ends": "ends",
}
_MARKS = {True: "✓", False: "✗", None: "–"}


def write_partners(results: Path, directory: Path) -> None:
    """Write the summary and one table per fault.

    Raises:
        FileNotFoundError: it has not been measured.
    """
    if not results.exists():
        raise FileNotFoundError(f"{results}: missing; `python -m benchmarks partners` writes it")
    report = json.loads(results.read_text(encoding="utf-8"))
    table = report["partners"]
    head = ["", *(f"alone: {column}" for column in COLUMNS.values()), "with a guard: all of these"]
    lines = [*_markdown(head, _summary(table)), ""]
    (directory / "partners-summary.md").write_text("\n".join(lines), encoding="utf-8")
    lines = []
    for fault, title in FAULTS.items():
        lines += [f"### {title}", "", *_markdown(["", *COLUMNS.values()], _rows(table, fault)), ""]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    (directory / "partners.md").write_text("\n".join([*lines, f"{versions}."]) + "\n", encoding="utf-8")


def _summary(table: dict[str, Any]) -> list[list[str]]:
    """For each partner, for how many faults a column is right alone, and all columns with a guard."""
    rows = []
    for name, variants in table.items():
        alone, guarded = (list(variants[variant].values()) for variant in ("alone", "guarded"))
        right = sum(all(mark is not False for mark in verdict.values()) for verdict in guarded)
        cells = [_counted([verdict.get(key) for verdict in alone]) for key in COLUMNS]
        rows.append([name, *cells, f"{right} of {len(guarded)}"])
    return rows


def _counted(marks: list[bool | None]) -> str:
    judged = [mark for mark in marks if mark is not None]
    return f"{sum(judged)} of {len(judged)}" if judged else _MARKS[None]


def _rows(table: dict[str, Any], fault: str) -> list[list[str]]:
    rows = []
    for name, variants in table.items():
        if fault in variants["alone"]:
            alone, guarded = (variants[variant][fault] for variant in ("alone", "guarded"))
            marks = [f"{_MARKS[alone.get(key)]} / {_MARKS[guarded.get(key)]}" for key in COLUMNS]
            rows.append([name, *marks])
    return rows


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]]
