"""Run all trainings with all faults; the two frameworks side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.recovery.once import PLAIN
from benchmarks.recovery.ways import WAYS
from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.keeping import Kept

__all__ = ["FRAMEWORKS", "TRAININGS", "harmful", "is_tuned", "run", "summary", "table"]

FRAMEWORKS = ("torch", "jax")
# The settings were chosen on the first; what was missed in the next two led to further symptoms.
TUNED = (("digits", 0), ("digits", 1), ("transformer", 0))
TRAININGS = (*TUNED, ("digits", 2), ("transformer", 1))
SPLITS = {True: "tuned", False: "held out"}
_PATIENCE_S = 3 * 3600


def is_tuned(row: dict[str, Any]) -> bool:
    """Whether the settings or the rules were chosen on this training; all others are held out."""
    return (row["program"], row["seed"]) in TUNED


def run(kept: Kept, trainings: Sequence[tuple[str, int]] = TRAININGS) -> dict[str, Any]:
    """Return a row for each framework, program, seed, fault, delay and way, and the spread of clean runs."""
    spread, rows = [], []
    for program, seed in trainings:
        measured = kept.part(f"{program}, seed {seed}", _side_by_side(program, seed))
        for framework, (clean, *found) in measured.items():
            of = {"framework": framework, "program": program, "seed": seed}
            spread.append(of | clean)
            rows += [of | row for row in found]
    return {"spread": spread, "rows": rows}


def _side_by_side(program: str, seed: int) -> Callable[[], dict[str, Any]]:
    """What runs the training in both frameworks, each on one thread."""

    def measured() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:  # a pipe that nobody reads yet could fill up
            started = {name: _started(Path(folder) / name, program, seed) for name in FRAMEWORKS}
            try:
                for process in started.values():
                    process.wait(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired as error:
                raise BenchmarkError(
                    f"{program}, seed {seed} did not end in {_PATIENCE_S} seconds"
                ) from error
            finally:
                for process in started.values():
                    process.kill()
                    process.wait()
            said = {name: (Path(folder) / name).read_text(encoding="utf-8") for name in FRAMEWORKS}
        failed = [name for name, process in started.items() if process.returncode]
        if failed:
            raise BenchmarkError(f"{program}, seed {seed}, {', '.join(failed)} failed; the error is above")
        return {name: [json.loads(line) for line in text.splitlines()] for name, text in said.items()}

    return measured


def _started(output: Path, program: str, seed: int) -> subprocess.Popen[str]:
    """Start a framework's process; its name is that of the file that it prints to."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    xla = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    command = [sys.executable, "-m", "benchmarks.recovery.once", output.name, program, str(seed)]
    with output.open("w", encoding="utf-8") as file:
        return subprocess.Popen(command, env=os.environ | one | xla, stdout=file, text=True)


def harmful(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the faults that do harm: without protection the run does not recover from them."""
    harmless = {_fault(row) for row in rows if row["way"] == PLAIN and row["recovered"]}
    return [row for row in rows if _fault(row) not in harmless]


def _fault(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("framework", "program", "seed", "fault", "delay"))


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each split, delay and way from how many harmful faults a run recovered, and at what price.

    ``lost`` is the median of the steps lost by the runs that recovered, ``worst`` the largest final loss of
    these over the clean run's. A delay of None stands for all of them.
    """
    counted, found = harmful(rows), []
    for tuned, split in SPLITS.items():
        for delay in (*dict.fromkeys(row["delay"] for row in counted), None):
            for way in WAYS:
                of = [r for r in counted if is_tuned(r) == tuned and r["way"] == way]
                of = [r for r in of if delay in (None, r["delay"])]
                if of:
                    found.append({"split": split, "delay": delay, "way": way} | _counted(of))
    return found


def _counted(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if row["recovered"]]
    lost = sorted(row["lost"] for row in good)
    return {
        "recovered": len(good),
        "faults": len(rows),
        "lost": lost[len(lost) // 2] if lost else None,
        "worst": max((row["over_clean"] for row in good), default=None),
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the summary as a table."""
    shown = Table(title="planted faults from which a training recovered")
    for column in ("split", "shows after", "way", "recovered", "steps lost", "worst final loss"):
        shown.add_column(column, justify="left" if column in ("split", "way") else "right")
    lines = summary(rows)
    for i, line in enumerate(lines):
        worst = "" if line["worst"] is None else f"{line['worst']:+.1%}"
        share = f"{line['recovered']} of {line['faults']}"
        lost = "" if line["lost"] is None else str(line["lost"])
        delay = "all" if line["delay"] is None else str(line["delay"])
        last = i + 1 == len(lines) or lines[i + 1]["delay"] != line["delay"]
        shown.add_row(line["split"], delay, line["way"], share, lost, worst, end_section=last)
    return shown
