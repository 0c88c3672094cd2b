"""``python -m benchmarks report``: the page of 100,000 steps in a browser, and what a log costs."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import stablenum_torch
from benchmarks.steps.errors import BenchmarkError
from stablenum.commands.report.page import as_html
from stablenum.runlog.reading import read_run
from tests.report.logs import long_log

STEPS = 100_000
ROUNDS = 10
NAMES = ("chromium", "chromium-browser", "google-chrome")
VIEWPORT = {"width": 1360, "height": 900}

# Each returns milliseconds until the next frame is on the screen.
FRAME = "await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));"
PRESS = f"""async (id) => {{
  const start = performance.now();
  document.querySelector(`[data-action=${{id}}]`).click();
  {FRAME}
  return performance.now() - start;
}}"""
POINT = f"""async (share) => {{
  const over = document.querySelector(".u-over");
  const box = over.getBoundingClientRect();
  const at = {{ clientX: box.left + share * box.width, clientY: box.top + 50, bubbles: true }};
  const start = performance.now();
  over.dispatchEvent(new MouseEvent("mousemove", at));
  {FRAME}
  return performance.now() - start;
}}"""

ACTIONS = (
    ("zoom_in", PRESS, "in"),
    ("move", PRESS, "on"),
    ("whole_run", PRESS, "all"),
    ("point", POINT, 0.4),
)


def run(say: Callable[[str], None]) -> dict[str, Any]:
    """Return the times: of a page of one run and of three, and of writing and reading a log.

    Raises:
        BenchmarkError: there is no browser.
    """
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        raise BenchmarkError(f"none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory() as folder:
        logs = [long_log(Path(folder) / f"run-{seed}.jsonl", STEPS, seed) for seed in range(3)]
        rows = [_page(logs[:n], executable, say) for n in (1, 3)]
    return {"steps": STEPS, "rounds": ROUNDS, "pages": rows, "training": _training()}


def _page(logs: list[Path], executable: str, say: Callable[[str], None]) -> dict[str, Any]:
    start = time.perf_counter()
    runs = [read_run(path) for path in logs]
    read = time.perf_counter()
    file = logs[0].with_name("page.html")
    file.write_text(as_html(runs), encoding="utf-8")
    row = {
        "runs": len(logs),
        "log_bytes": sum(path.stat().st_size for path in logs),
        "page_bytes": file.stat().st_size,
        "read_s": round(read - start, 2),
        "write_s": round(time.perf_counter() - read, 2),
        "browser": _opened(executable, file.as_uri()),
    }
    say(f"{row}")
    return row


def _opened(executable: str, address: str) -> dict[str, dict[str, float]]:
    """Return milliseconds in the browser, and those of a core on which the page's main thread worked, which
    other programs do not lengthen; the first round warms up and is left out."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=executable)
        rounds = [_round(browser, address) for _ in range(ROUNDS + 1)][1:]
        browser.close()
    return {
        name: {
            "median_ms": round(statistics.median(times[name] for times in rounds), 1),
            "most_ms": round(max(times[name] for times in rounds), 1),
        }
        for name in rounds[0]
    }


def _round(browser: Any, address: str) -> dict[str, float]:
    page = browser.new_page(viewport=VIEWPORT)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(address)
    page.wait_for_function("() => performance.getEntriesByName('interactive').length === 1")
    times = {"interactive": page.evaluate("performance.getEntriesByName('interactive')[0].startTime")}
    busy = [_busy(session)]
    for name, script, argument in ACTIONS:
        times[name] = page.evaluate(script, argument)
        busy.append(_busy(session))
    page.close()
    of_the_thread = [busy[0], *(b - a for a, b in pairwise(busy))]
    return times | {f"{name}_cpu": cpu for name, cpu in zip(times, of_the_thread, strict=True)}


def _busy(session: Any) -> float:
    """Return for how many milliseconds of a core the page's main thread has worked."""
    metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    return 1e3 * float(metrics["TaskDuration"])


def _training() -> dict[str, float]:
    """Return what a log adds to a step on a CPU: microseconds of a core, medians over blocks of 64 steps."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        steps = [_stepping(None), _stepping(Path(folder) / "run.jsonl")]
        blocks: list[list[float]] = [[], []]
        for _ in range(60):
            for step, times in zip(steps, blocks, strict=True):
                start = time.process_time()  # other programs do not lengthen it
                for _ in range(64):
                    step()
                times.append(1e6 * (time.process_time() - start) / 64)
    without, logged = (statistics.median(times[5:]) for times in blocks)
    added = statistics.median(b - a for a, b in zip(blocks[0][5:], blocks[1][5:], strict=True))
    return {"step_us": round(without, 1), "logged_step_us": round(logged, 1), "added_us": round(added, 1)}


def _stepping(log: Path | None) -> Callable[[], None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    opt = stablenum_torch.wrap(optimizer, clip=1.0, names=model, log=log)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return opt.step
