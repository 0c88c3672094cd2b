"""The tests that ``make test`` leaves out, in named parts: ``python -m tests.parts [PART ...]``.

Each part takes at most an hour on two cores. When a part has run whole, its row of ``tests/PARTS.md`` says
when, on which commit, how long it took and what came out. Without a name, the table is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

__all__ = ["PARTS", "TABLE", "git", "rows_of", "run_pytest", "written"]

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "PARTS.md"

SLOW = ("-m", "slow and not gpu")
EVERY = ("-m", "not gpu")  # of folders that `make test` does not collect
PARTS: dict[str, tuple[str, ...]] = {
    "core": ("tests/core", *SLOW),
    "numerics": ("tests/numerics", "tests/losses", *SLOW),
    "torch": ("tests/torch", *SLOW),
    "jax": ("tests/jax", *SLOW),
    "parity": ("tests/parity", "tests/verifying", "tests/report", "tests/browser", *SLOW),
    "partners": ("tests/partners", *SLOW),
    "pages": ("tests/documents", "tests/release", *EVERY),
    "root": ("tests", "--ignore-glob=tests/*/*", *SLOW),
    "examples": ("stablenum", "stablenum_jax", "stablenum_torch", *EVERY),  # all that are in docstrings
    "kernels": ("tests/kernels", *EVERY),  # needs Triton: `make test-kernels`
    "tools": ("tests/benchmarks", "tests/corpus", "tests/mutants", *EVERY),
    "methods": ("tests/methods", *EVERY),
    "silent": ("tests/silent", *EVERY),
    "unseen": ("tests/unseen", *EVERY),
    "lockfile": ("tests/lockfile", *EVERY),
    "mending": ("tests/mending", *EVERY),
    "real-pairs": ("tests/pairs/real", *EVERY),
    "pairs-tuned": ("tests/pairs/test_pairs.py", "-k", "[tuned-", *EVERY),
    "pairs-within": ("tests/pairs/test_pairs.py", "-k", "[within-", *EVERY),
    "pairs-1": ("tests/pairs/test_pairs.py", "-k", "[blind- or [second-", *EVERY),
    "pairs-2": ("tests/pairs/test_pairs.py", "-k", "[third- or [fourth-", *EVERY),
    "pairs-3": ("tests/pairs/test_pairs.py", "-k", "[fifth- or [sixth- or [seventh- or [eighth-", *EVERY),
    "pairs-4": ("tests/pairs/test_pairs.py", "-k", "[ninth- or [tenth- or [eleventh- or [twelfth-", *EVERY),
}
_HEAD = """# The slow tests, part by part

When each part of `make test-slow PART=...` last ran whole; written by `python -m tests.parts`.

| part | day | commit | minutes | passed | failed | skipped or expected to fail |
| --- | --- | --- | ---: | ---: | ---: | ---: |
"""


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each part's row."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {row[0]: row[1:] for row in cells}


def written(rows: Mapping[str, Sequence[str]]) -> str:
    """The table with these rows, in the order of the parts; a part without a row has not run."""
    never = ["never", "", "", "", "", ""]
    return _HEAD + "".join(f"| {' | '.join([name, *rows.get(name, never)])} |\n" for name in PARTS)


def run_pytest(*arguments: str) -> int:
    """Run pytest with the workers and the environment of ``make test``, and return its exit code."""
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--maxprocesses", "4", *arguments]
    environment = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"} | os.environ
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def git(*arguments: str) -> str:
    """What a command of git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def run(part: str, more: Sequence[str]) -> int:
    """Run a part, and note the result if it ran to its end."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        begin = time.monotonic()
        code = run_pytest("--dist", "load", *PARTS[part], f"--junitxml={report}", *more)
        minutes = (time.monotonic() - begin) / 60
        if code not in (0, 1):  # interrupted, or nothing was run
            return code
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        for suite in ElementTree.parse(report).iter("testsuite"):
            counts = {name: n + int(suite.get(name, 0)) for name, n in counts.items()}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    commit = git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=8").strip()
    row = [f"{datetime.now(UTC):%Y-%m-%d}", commit, f"{minutes:.0f}", *map(str, (passed, failed))]
    rows = rows_of(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    TABLE.write_text(written(rows | {part: [*row, str(counts["skipped"])]}), encoding="utf-8")
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that are named, one after the other, and return the largest exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, or all")
    options, more = parser.parse_known_args(argv)
    if unknown := sorted(set(options.parts) - {*PARTS, "all"}):
        parser.error(f"PART must be of {', '.join(PARTS)} or all; got {', '.join(unknown)}")
    if not options.parts:
        sys.stdout.write(TABLE.read_text(encoding="utf-8") if TABLE.exists() else written({}))
        return 0
    return max(run(part, more) for part in (PARTS if "all" in options.parts else options.parts))


if __name__ == "__main__":
    sys.exit(main())
