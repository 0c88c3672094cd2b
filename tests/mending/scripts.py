"""Mend the failing scripts of the corpus with ``explain --fix``, and run what comes out.

``python -m tests.mending.scripts [--sample N] [--seed S] SETS`` takes ``reported`` (with the authors' cures)
and ``unseen``, failing and healthy ones, or a sample of the latter, and writes each result into
``scripts.json`` as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CORPUS, RECORD = ROOT / "corpus", Path(__file__).parent / "scripts.json"
# No script of the corpus takes that long to be explained.
_MOST_SECONDS = 900


def tasks_of(name: str, sample: int, seed: int) -> list[tuple[str, str]]:
    """The scripts of a set: name and kind, "failing" or "healthy"."""
    if name == "reported":
        kinds = {"loud": "failing", "healthy": "healthy"}
        return [
            (f"reported/{path.parent.parent.name}/{path.parent.name}", kinds[kind])
            for path in sorted((CORPUS / "reported").glob("*/*/meta.json"))
            if (kind := json.loads(path.read_text())["kind"]) in kinds
        ]
    answers = json.loads((CORPUS / "unseen" / "answers.json").read_text())
    found = [(f"unseen/{key}", a["kind"]) for key, a in sorted(answers.items())]
    return random.Random(seed).sample(found, min(sample, len(found))) if sample else found


def row_of(name: str, kind: str) -> dict[str, Any]:
    """What ``explain --fix --write`` makes of a copy of a script, and how that ends."""
    folder = CORPUS / name
    source = folder / "program.py" if folder.is_dir() else CORPUS / f"{name}.py"
    with tempfile.TemporaryDirectory() as temporary:
        path, report = Path(temporary) / source.name, Path(temporary) / "report.json"
        shutil.copy(source, path)
        before, begun = path.read_text(), time.monotonic()
        command = [sys.executable, "-m", "stablenum", "explain", "--fix", "--write", "--json", report, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False)
        row: dict[str, Any] = {"kind": kind, "code": done.returncode}
        row["seconds"] = round(time.monotonic() - begun, 1)
        if report.exists():
            fixes = json.loads(report.read_text()).get("fixes") or []
            row["fixes"] = [[fix["patch"], fix["proven"], fix["evidence"]] for fix in fixes]
        if path.read_text() == before:
            return row
        mended = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, timeout=900, check=False
        )
        row["mended"] = mended.returncode
        final = re.findall(r"^FINAL\s+(\S+)", mended.stdout, re.MULTILINE)
        if final and (meta := folder / "meta.json").exists():
            row["final"] = float(final[-1])
            row["author"] = json.loads(meta.read_text())["final_cured"]
        return row


def main() -> None:
    """Mend what is named, and say how much of it is mended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sets", nargs="+", choices=("reported", "unseen"))
    parser.add_argument("--sample", type=int, default=0, help="so many scripts of unseen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    tasks = [task for name in arguments.sets for task in tasks_of(name, arguments.sample, arguments.seed)]
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    count = Counter[tuple[str, int]]()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for (name, kind), row in zip(tasks, pool.map(lambda task: row_of(*task), tasks), strict=True):
            known[name] = row
            count[kind, row["code"]] += 1
            RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
            shown = {key: value for key, value in row.items() if key != "fixes"}
            print(name, shown, flush=True)  # noqa: T201
    for (kind, code), number in sorted(count.items()):
        print(f"{kind}: exit code {code}: {number}")  # noqa: T201


if __name__ == "__main__":
    main()
