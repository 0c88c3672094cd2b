"""Run the tests that the changed lines reach: ``python -m tests.changed [pytest's arguments]``.

Which test runs which line is recorded once, by coverage.py, while all of ``make test`` runs, as for the
mutants: ``python -m tests.changed --record``. What has changed since that commit, uncommitted changes
included, is then looked up. A change outside the functions of a module runs every test that reaches the
module; changed tests run too. It is a choice for the time between two commits; ``make test`` runs everything.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.choosing import EVERYTHING
from tests.mutants.recording import TestMap, record
from tests.mutants.running import copy_tree
from tests.mutants.sampling import packages_of
from tests.parts import ROOT, git, run_pytest

__all__ = ["MAP", "changed_lines", "reached"]

WORK = ROOT / ".mutants"
MAP, OF_COMMIT, CHOSEN = WORK / "map.json", WORK / "map.commit", WORK / "chosen.json"
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


def changed_lines(diff: str) -> dict[str, set[int]]:
    """The lines of the old files that a diff (``git diff -U0``) changes, and those around what it inserts."""
    found: dict[str, set[int]] = {}
    lines: set[int] = set()
    for row in diff.splitlines():
        if row.startswith("diff --git "):
            lines = found.setdefault(row.split(" b/")[-1], set())
        elif hunk := _HUNK.match(row):
            begin, count = int(hunk[1]), int(hunk[2] or 1)
            lines.update(range(begin, begin + count) if count else (begin, begin + 1))
    return found


def reached(changes: Mapping[str, set[int]], tests: TestMap) -> set[str]:
    """The recorded tests that run a changed line; all that run the file where nothing says which."""
    found: set[str] = set()
    for file, lines in changes.items():
        of_file = tests.lines.get(file, {})
        direct = {test for line in lines for test in of_file.get(line, ())}
        found |= direct or {test for of_line in of_file.values() for test in of_line}
    return found


def _record() -> None:
    commit = git("rev-parse", "HEAD").strip()
    packages = packages_of(ROOT)
    copy_tree(ROOT, WORK / "tree-of-map")
    os.environ[EVERYTHING] = "1"
    record(WORK / "tree-of-map", packages, WORK / "recording-of-map", [], processes=2).save(MAP)
    OF_COMMIT.write_text(commit, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Record, or choose and run."""
    if "--record" in arguments:
        if git("status", "--porcelain"):
            sys.exit("tests.changed --record needs a tree without uncommitted changes: commit or stash them")
        _record()
        return 0
    if not (MAP.exists() and OF_COMMIT.exists()):
        sys.exit("which test runs which line has not been recorded: python -m tests.changed --record")
    diff = git("diff", "-U0", OF_COMMIT.read_text(encoding="utf-8").strip(), "--", "*.py")
    new = git("ls-files", "--others", "--exclude-standard", "--", "tests").split()
    changes = changed_lines(diff)
    tests = reached(changes, TestMap.load(MAP))
    own = {f for f in (*changes, *new) if re.search(r"(^|/)test_\w+\.py$", f) and (ROOT / f).exists()}
    files = {file for file in (test.split("::")[0] for test in tests) if (ROOT / file).exists()} | own
    sys.stdout.write(f"{len(changes)} changed files reach {len(tests)} tests of {len(files)} files\n")
    sys.stdout.flush()
    if not files:
        return 0
    CHOSEN.write_text(json.dumps({"tests": sorted(tests), "files": sorted(own)}), encoding="utf-8")
    chosen = ["-p", "tests.changed", "-m", "not gpu", "--dist", "loadfile", *sorted(files)]
    return run_pytest(*chosen, *arguments)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that were chosen (as a plugin, in the run that :func:`main` starts)."""
    chosen = json.loads(CHOSEN.read_text(encoding="utf-8"))
    tests, files = set(chosen["tests"]), set(chosen["files"])
    parted: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        parted[item.nodeid in tests or item.nodeid.split("::")[0] in files].append(item)
    config.hook.pytest_deselected(items=parted[False])
    items[:] = parted[True]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
