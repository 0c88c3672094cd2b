"""``python docs/screenshots.py``: the pictures of the page of ``stablenum report``, by a headless browser."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from stablenum.commands.report.page import as_html  # noqa: E402
from stablenum.runlog.reading import read_run  # noqa: E402
from tests.report.logs import long_log  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome")
STEPS = 20_000


def main() -> None:
    """Write the pictures into ``docs/static``."""
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, NAMES)), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as p:
        browser = p.chromium.launch(executable_path=executable)
        file = Path(folder) / "report.html"
        runs = [read_run(long_log(Path(folder) / f"run-{k}.jsonl", STEPS, k)) for k in (1, 2)]
        skipped = runs[0].steps[runs[0].skipped[3]]
        file.write_text(as_html(runs), encoding="utf-8")
        _picture(browser, file, "report.png", skipped, "light", {"width": 1000, "height": 790})
        _picture(browser, file, "report-narrow.png", skipped, "dark", {"width": 400, "height": 790})
        browser.close()


def _picture(browser: Any, file: Path, name: str, skipped: int, scheme: str, size: dict[str, int]) -> None:
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.goto(file.as_uri())
    page.wait_for_function("() => performance.getEntriesByName('interactive').length === 1")
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + skipped / STEPS * box["width"], box["y"] + 20)
    page.screenshot(path=HERE / "static" / name)
    page.close()


if __name__ == "__main__":
    main()
