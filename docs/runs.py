"""The table of the page on logs of runs, from the results of the last benchmark run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measured import read, table

__all__ = ["write_report_page"]

_ACTIONS = {
    "interactive": "until the page can be used",
    "zoom_in": "zoom in to a half",
    "move": "move by a quarter",
    "whole_run": "show the whole run",
    "point": "point at a step",
}


def write_report_page(results: Path, directory: Path) -> None:
    """Write ``report-page.md``: how long the page of a run takes to open and to zoom.

    Raises:
        FileNotFoundError: there are no results.
        KeyError: the file does not have the form that ``benchmarks.report_page`` writes.
    """
    report = read(results, "report")
    pages = report["pages"]
    counts = [f"{page['runs']} run{'' if page['runs'] == 1 else 's'}" for page in pages]
    head = ["milliseconds, median (of them busy)", *(f"{n} of {report['steps']:,} steps" for n in counts)]
    body = [[text, *(_time(page["browser"], name) for page in pages)] for name, text in _ACTIONS.items()]
    body.append(["size of the page", *(f"{page['page_bytes'] / 1e6:.1f} MB" for page in pages)])
    body.append(["size of the logs", *(f"{page['log_bytes'] / 1e6:.0f} MB" for page in pages)])
    body.append(["reading the logs and writing the page", *(_seconds(page) for page in pages)])
    (directory / "report-page.md").write_text("\n".join(table(head, body)) + "\n", "utf-8")


def _time(browser: dict[str, dict[str, float]], name: str) -> str:
    return f"{browser[name]['median_ms']:.0f} ({browser[f'{name}_cpu']['median_ms']:.0f})"


def _seconds(page: dict[str, Any]) -> str:
    return f"{page['read_s'] + page['write_s']:.1f} s"
