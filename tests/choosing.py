"""Choose the tests that ``make test`` leaves to the slow parts: ``python -m tests.choosing``.

The choice is made from a recording of which test runs which line (``python -m tests.changed --record``) and
stands in ``tests/left_out.txt``. Every test that takes less than a quarter of a second stays. Of the others,
those stay that together run nearly all lines which no cheaper test runs, and then, from the cheapest on, one
case of each test function, until the time for them is spent. What is left out is run with the slow parts; the
mutants show whether the choice is good.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.mutants.recording import TestMap

__all__ = ["EVERYTHING", "LEFT_OUT", "left_out", "names_left_out"]

LEFT_OUT = Path(__file__).with_name("left_out.txt")
EVERYTHING = "STABLENUM_TESTS_EVERYTHING"
CHEAP = 0.25  # seconds; nine of ten tests take less, and all of them together a tenth of the time
# Lines a second: below it, a test costs too much for what it alone runs. In a recording of 12,254 tests, 258
# of the costly ones run 98 % of what the cheap ones leave, in a quarter of the time that the last 2 % take.
WORTH = 2.0


def names_left_out() -> set[str]:
    """The tests that are left to the parts; none while everything is recorded."""
    return set() if EVERYTHING in os.environ else set(LEFT_OUT.read_text(encoding="utf-8").splitlines())


def left_out(tests: TestMap, seconds: float, already: Iterable[str] = ()) -> list[str]:
    """The tests to leave out, so that those that are not cheap take about ``seconds`` in all."""
    lines = _lines_of(tests)
    costly = {test for test, s in tests.seconds.items() if s >= CHEAP}
    covered = {line for test in tests.seconds.keys() - costly for line in lines.get(test, ())}
    kept = _cover({test: lines.get(test, set()) - covered for test in costly}, tests.seconds)
    spent = math.fsum(tests.seconds[test] for test in kept)
    functions = {test.split("[")[0] for test in kept}
    for test in sorted(costly - kept, key=lambda test: (tests.seconds[test], test)):
        if test.split("[")[0] not in functions and spent + tests.seconds[test] <= seconds:
            functions.add(test.split("[")[0])
            kept.add(test)
            spent += tests.seconds[test]
    return sorted((costly - kept) | (set(already) - tests.seconds.keys()))


def _lines_of(tests: TestMap) -> dict[str, set[tuple[str, int]]]:
    found: dict[str, set[tuple[str, int]]] = {}
    for file, of_file in tests.lines.items():
        for line, names in of_file.items():
            for name in names:
                found.setdefault(name, set()).add((file, line))
    return found


def _cover(lines: Mapping[str, set[tuple[str, int]]], seconds: Mapping[str, float]) -> set[str]:
    """Tests that together run nearly all lines: next is always what runs the most new lines in a second."""
    left = {test: set(of_test) for test, of_test in lines.items() if of_test}
    kept: set[str] = set()
    while left:
        best = max(left, key=lambda test: (len(left[test]) / seconds[test], test))
        if len(left[best]) < WORTH * seconds[best]:
            break
        kept.add(best)
        done = left.pop(best)
        left = {test: rest for test, of_test in left.items() if (rest := of_test - done)}
    return kept


def main() -> int:
    """Choose from the last recording, and write the list."""
    from tests.changed import MAP

    parser = argparse.ArgumentParser(prog="python -m tests.choosing", description=__doc__)
    parser.add_argument("--seconds", type=float, default=400.0, help="for the costly tests that stay (400)")
    options = parser.parse_args()
    if not MAP.exists():
        parser.error("nothing has been recorded: python -m tests.changed --record")
    tests = TestMap.load(MAP)
    names = left_out(tests, options.seconds, names_left_out())
    LEFT_OUT.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    kept = sum(tests.seconds.values()) - sum(tests.seconds.get(name, 0.0) for name in names)
    sys.stdout.write(f"{len(names)} tests left out; the others took {kept:.0f} s while recorded\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
