"""Judge all pairs with today's version, and write what is right into ``found.json``.

``python -m tests.pairs.record`` judges all sets, about an hour and a half on two cores, or those that
are named, and prints the table of ``docs/diff-reference.md``; with ``--table``, it only prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.pairs.judged import HERE, cases, judged, lacking_for
from tests.pairs.test_pairs import BLIND, SETS

RECORD = HERE / "found.json"
Row = dict[str, bool]
_NAMES = {
    "blind": "first blind set",
    "within": "within PyTorch",
    "tenth": "tenth blind set, one pair mended",
    "eleventh": "eleventh blind set, one pair mended",
}


def row_of(name: str, case: str) -> Row:
    """What is right in the report on a case."""
    with tempfile.TemporaryDirectory() as folder:
        return judged(name, cases(name)[case], Path(folder))._asdict()


def record(sets: list[str]) -> None:
    """Judge the cases of sets, and write each result as soon as it is there."""
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    wanted = [(n, case) for n in sets for case, c in cases(n).items() if not lacking_for(c)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (name, case), row in zip(wanted, pool.map(row_of, *zip(*wanted, strict=True)), strict=True):
            found[name][case] = row
            write(found)


def write(found: dict[str, dict[str, Row]]) -> None:
    """Write the record."""
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def table(found: dict[str, dict[str, Row]]) -> str:
    """The table of what is right in the sets to which the comparison was tuned; pairs within PyTorch are no
    part of the sum."""
    lines, sums = [], [[0, 0] for _ in range(7)]
    for name in (n for n in SETS if n != BLIND):
        rows = [(cases(name)[case]["kind"], row) for case, row in found[name].items()]
        agree, mistakes = ([row for k, row in rows if k == kind] for kind in ("equivalent", "error"))
        confirmed = [row for row in mistakes if row["confirmed"]]
        cells = [
            [sum(r["ok"] for r in agree), len(agree)],
            [sum(not r["ok"] for r in mistakes), len(mistakes)],
            [sum(r["left"] and r["right"] for r in mistakes), len(mistakes)],
            [sum(r["module"] for r in mistakes), len(mistakes)],
            [sum(r["cause"] for r in mistakes), len(mistakes)],
            [sum(r["cause"] for r in confirmed), len(mistakes)],
            [sum(not r["cause"] for r in confirmed), len(confirmed)],
        ]
        lines.append(_line(_NAMES.get(name, name if name == "tuned" else f"{name} blind set"), cells))
        if name != "within":
            sums = [[a + c, b + d] for (a, b), (c, d) in zip(sums, cells, strict=True)]
    return "\n".join([*lines, _line("together", sums)])


def _line(name: str, cells: list[list[int]]) -> str:
    return f"| {name} | " + " | ".join(f"{a} of {b}" for a, b in cells) + " |"


def main() -> None:
    """Record the sets that are named, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(SETS))
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        record(given.sets)
    sys.stdout.write(table(json.loads(RECORD.read_text(encoding="utf-8"))) + "\n")


if __name__ == "__main__":
    main()
