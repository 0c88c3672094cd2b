"""What becomes of the failing programs of `corpus/unseen` with the patches that `explain` prints.

``python -m benchmarks.remedies RESULTS`` runs each program once under ``explain``, applies the patch that it
prints, if it prints one, and runs the whole program with it. Programs that have a result are not run again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.reported import of_explain, patched, run

__all__ = ["look_at"]

_UNSEEN = Path("corpus/unseen")
# A program takes at most half a minute; the command watches it, and runs it again for a trial.
_PLAIN, _WATCHED = 180, 900


def look_at(name: str, lines: list[int]) -> dict[str, Any]:
    """What `explain` says of one program, and what becomes of it with the patch."""
    source = (_UNSEEN / f"{name}.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "program.py").write_text(source, encoding="utf-8")
        line = [sys.executable, "-m", "stablenum", "explain", "program.py", "--json", "report.json"]
        status, _ = run(line, work, _WATCHED)
        written = work / "report.json"
        report = of_explain(json.loads(written.read_text(encoding="utf-8")) if written.exists() else {})
        result: dict[str, Any] = {
            **report,
            "exit": status,
            "line_ok": bool(set(report["lines"]) & set(lines)),
        }
        if report["patch"]:
            text = patched(source, report["patch"])
            result["applies"] = text is not None
            (work / "patched.py").write_text(text or "", encoding="utf-8")
            result["patched_exit"], said = run([sys.executable, "patched.py"], work, _PLAIN)
            result["patched_tail"] = said[-600:]
    return result


def main(results: Path) -> None:
    """Look at every failing program that has no result yet."""
    known = json.loads(results.read_text(encoding="utf-8"))
    answers = json.loads((_UNSEEN / "answers.json").read_text(encoding="utf-8"))
    for name, answer in answers.items():
        if answer["kind"] == "failing" and name not in known["programs"]:
            known["programs"][name] = look_at(name, answer["lines"])
            results.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(name, known["programs"][name].get("patched_exit"), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
