"""``python -m benchmarks.diff_page``: how long the page of a comparison takes to open in a browser."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests.browser.reports import report_of

OPERATIONS = 5000
ROUNDS = 10
NAMES = ("chromium", "chromium-browser", "google-chrome")

# Until the next frame is on the screen.
FILTER = """async (text) => {
  const start = performance.now();
  const input = document.getElementById("filter-text");
  input.value = text;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - start;
}"""


def opening(browser: Any, address: str) -> dict[str, float]:
    """Return milliseconds from the start of the navigation, and those of a filter."""
    page = browser.new_page(viewport={"width": 1360, "height": 900})
    page.goto(address)
    times = {
        "interactive": page.evaluate("performance.getEntriesByName('interactive')[0].startTime"),
        "filter": page.evaluate(FILTER, "softmax"),
    }
    page.close()
    return times


def measure(executable: str, address: str) -> dict[str, list[float]]:
    """Return the times of each round; the first one warms up and is left out."""
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=executable)
        rounds = [opening(browser, address) for _ in range(ROUNDS + 1)][1:]
        browser.close()
    return {name: [times[name] for times in rounds] for name in rounds[0]}


def show(times: Mapping[str, list[float]]) -> None:
    """Print the median and the largest time of each."""
    for name, values in times.items():
        print(f"{name:<12} median {statistics.median(values):5.0f} ms, most {max(values):5.0f} ms")


def main() -> None:
    """Write a page, open it some times and print the times."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        sys.exit(f"none of {', '.join(NAMES)} is installed")
    report = report_of(OPERATIONS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        start = time.perf_counter()
        report.save(file)
        took = 1e3 * (time.perf_counter() - start)
        print(f"{len(report.left_rows):,} and {len(report.right_rows):,} operations", end=", ")
        print(f"{file.stat().st_size / 1e3:.0f} kB, written in {took:.0f} ms")
        show(measure(executable, file.as_uri()))


if __name__ == "__main__":
    main()
