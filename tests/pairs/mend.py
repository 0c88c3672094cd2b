"""Mend the planted mistakes of the pairs with ``--fix``, and judge it by the authors' own programs.

``python -m tests.pairs.mend SETS [--sample N] [--seed S]`` mends the mistakes of some sets, or a sample of
them, and writes each result into ``mended.json`` as soon as it is there. A mistake is mended on the side on
which it was planted. What is called proven is compared with the author's program before the mistake, over
three steps: a change that agrees only in the first one is reported as such.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from stablenum.commands.diff.fixing import fixed
from stablenum.commands.diff.pair import Origin, Pair, built, load_pair
from stablenum.diagnosis.diff.compare import examined
from stablenum.errors import ProgramError
from tests.pairs.judged import HERE, cases, lacking_for, lines_of, source_of

RECORD = HERE / "mended.json"
# Enough steps for a momentum and for averages of moments.
_STEPS = 3


def planted_on(name: str, case: dict[str, Any]) -> str:
    """The side whose lines, as the author names them, are the nearest to the change."""
    if "both" in case:
        return str(case["both"])
    base = (HERE / name / case["base"]).read_text(encoding="utf-8")
    text = source_of(name, case)
    changed = [base[: base.index(old)].count("\n") + 1 for old, _ in case["replace"]]

    def far(side: str) -> int:
        fragments = [case.get(side), *(case.get(f"{side}_also") or [])]
        lines = set().union(*(lines_of(text, f) for f in fragments if f))
        return min((abs(a - b) for a in changed for b in lines), default=sys.maxsize)

    return "left" if far("left") < far("right") else "right"


def pair_of(name: str, case: dict[str, Any], folder: Path) -> tuple[Pair, str]:
    """The programs of a case, and the side to be mended."""
    path, before = folder / f"{case['name']}.py", folder / f"{case['name']}_before.py"
    path.write_text(source_of(name, case), encoding="utf-8")
    before.write_text((HERE / name / case["base"]).read_text(encoding="utf-8"), encoding="utf-8")
    if "both" not in case:
        return load_pair(path), planted_on(name, case)
    origins = Origin(before, case["both"]), Origin(path, case["both"])
    sides = [built(origin, {}).program for origin in origins]
    return Pair(sides[0], sides[1], "match", origins), "right"


def row_of(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """What ``--fix`` makes of a case."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, begun = Path(temporary).resolve(), time.monotonic()
        pair, side = pair_of(name, case, folder)
        found = examined(pair.left, pair.right, pair.weights)
        took = time.monotonic() - begun
        if found[0].ok or (side == "left" and not isinstance(pair.weights, str)):
            return {"side": side, "proven": False, "why": "no difference" if found[0].ok else "given weights"}
        changes = fixed(pair, found, None, side=side, took=took, say=lambda _: None)
        row = {
            "side": side,
            "proven": changes.agrees,
            "seconds": [round(took, 1), round(time.monotonic() - begun, 1)],
            "fixes": [[f.explanation, f.proven] for f in changes.fixes],
            "tried": changes.tried,
        }
        if changes.agrees:
            row["author"] = agrees_with_author(case, folder, side, changes.after)
        return row


def agrees_with_author(case: dict[str, Any], folder: Path, side: str, texts: dict[str, str]) -> str:
    """What a comparison of the mended program with the author's says of it."""
    path, before = folder / f"{case['name']}.py", folder / f"{case['name']}_before.py"
    function = case.get("both", side)
    theirs, mended = built(Origin(before, function), {}), built(Origin(path, function), texts)
    try:
        report = examined(theirs.program, mended.program, "match", _STEPS)[0]
    except (ProgramError, ValueError) as error:
        return f"not compared: {error}"[:200]
    return "the same" if report.ok else str(report).splitlines()[0]


def _row(task: tuple[str, str]) -> dict[str, Any]:
    name, case = task
    try:
        return row_of(name, cases(name)[case])
    except Exception as error:  # noqa: BLE001  a row says what failed
        return {"proven": False, "why": f"{type(error).__name__}: {error}"[:200]}


def main() -> None:
    """Mend what is named, and say how much of it is mended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--sample", type=int, help="so many mistakes of all that are named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--go-on", action="store_true", help="leave out those that have a result already")
    arguments = parser.parse_args()
    tasks = [
        (name, case)
        for name in arguments.sets
        for case, c in sorted(cases(name).items())
        if c["kind"] == "error" and not lacking_for(c)
    ]
    if arguments.sample:
        tasks = random.Random(arguments.seed).sample(tasks, min(arguments.sample, len(tasks)))
    known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    left = [(name, case) for name, case in tasks if not arguments.go_on or case not in known.get(name, {})]
    # One task a process: what a program leaves behind does not reach the next one.
    with ProcessPoolExecutor(os.cpu_count(), max_tasks_per_child=1) as pool:
        for (name, case), row in zip(left, pool.map(_row, left), strict=True):
            known.setdefault(name, {})[case] = row
            RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            print(name, case, row.get("proven"), row.get("author", row.get("why", "")), flush=True)  # noqa: T201
    rows = [known[name][case] for name, case in tasks]
    proven = [row for row in rows if row["proven"]]
    wrong = [row for row in proven if row["author"] != "the same"]
    print(f"{len(proven)} of {len(rows)} mended and proven; {len(wrong)} of these not as the author's")  # noqa: T201


if __name__ == "__main__":
    main()
