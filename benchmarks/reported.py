"""What `explain` and `checkup` say of programs that were retold from public reports, and what their cures do.

``python -m benchmarks.reported FOLDER RESULTS`` runs each program of a folder such as ``corpus/reported``:
``explain`` and ``checkup`` once, the program itself, the author's cure, and the program with the patch that
``explain`` prints, if it prints one. The line is judged here: it is right if one of the author's lines is the
place of the first finding, or one of its further places. Causes, and cures in words, are judged by a reader,
who adds them to the results.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["look_at", "of_explain", "patched", "run"]

# A program takes at most half a minute; the commands watch it, and run it again for a trial.
_PLAIN, _WATCHED = 180, 900


def run(line: list[str], folder: Path, limit: int) -> tuple[int, str]:
    """The exit status and the output of a command; 124 if it took too long."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            line, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, "took too long"
    return done.returncode, done.stdout + done.stderr


def _final(output: str) -> float:
    """The number on the last line that begins with FINAL; NaN if there is none."""
    found = re.findall(r"^FINAL\s+(\S+)", output, re.M)
    try:
        return float(found[-1]) if found else math.nan
    except ValueError:
        return math.nan


def _lines(places: list[dict[str, Any] | None]) -> list[int]:
    return [p["line"] for p in places if p is not None and p["file"].endswith("program.py")]


def of_explain(report: dict[str, Any]) -> dict[str, Any]:
    verdict = report.get("verdict") or {}
    findings = (report.get("evidence") or {}).get("findings") or []
    places = [f.get("place") for f in findings[:1]]
    return {
        "ok": report.get("ok"),
        "cause": verdict.get("cause"),
        "lines": _lines(places),
        "code": verdict.get("code") or "",
        "patch": verdict.get("patch") or [],
        "trial": verdict.get("trial") or "",
    }


def _of_checkup(report: dict[str, Any]) -> dict[str, Any]:
    found = report.get("complaints") or []
    return {
        "ok": report.get("ok"),
        "findings": [
            {
                "symptom": c["symptom"],
                "level": c["level"],
                "lines": _lines([c["place"], *c["places"]]),
                "tried": c["tried"],
            }
            for c in found
        ],
    }


def patched(source: str, patch: list[str]) -> str | None:
    """A source with the lines of a patch, as a user would type them; None if a line is not there."""
    imports = [line[2:] for line in patch if re.match(r"\+ (import|from) ", line)]
    changes: list[tuple[list[str], list[str]]] = []
    for line in (line for line in patch if line[2:] not in imports):
        if line.startswith("- ") and (not changes or changes[-1][1]):
            changes.append(([], []))
        changes[-1][line.startswith("+ ")].append(line[2:])
    lines = source.splitlines()
    for old, new in changes:
        stripped, wanted = [line.strip() for line in lines], [line.strip() for line in old]
        at = next((i for i in range(len(lines)) if stripped[i : i + len(old)] == wanted), None)
        if at is None:
            return None
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at : at + len(old)] = [indent + line for line in new]
    own = (i for i, line in enumerate(lines) if re.match(r"(import|from) (?!__future__)", line))
    first = next(own, 0)
    lines[first:first] = imports
    return "\n".join(lines) + "\n"


def look_at(folder: Path) -> dict[str, Any]:
    """What the commands say of one program, and what it comes to as it is, cured, and patched."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    result: dict[str, Any] = {k: meta[k] for k in ("name", "framework", "kind")}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for name in ("program.py", "cured.py"):
            if (folder / name).exists():
                shutil.copy(folder / name, work / name)
        for command, read in (("explain", of_explain), ("checkup", _of_checkup)):
            line = [sys.executable, "-m", "stablenum", command, "program.py", "--json", f"{command}.json"]
            status, said = run(line, work, _WATCHED)
            written = work / f"{command}.json"
            report = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
            result[command] = {"exit": status, **read(report)}
            result[command]["said"] = said[-6000:]
        result["final"] = _final(run([sys.executable, "program.py"], work, _PLAIN)[1])
        if (work / "cured.py").exists():
            result["final_cured"] = _final(run([sys.executable, "cured.py"], work, _PLAIN)[1])
        patch = result["explain"]["patch"]
        if patch:
            source = patched((work / "program.py").read_text(encoding="utf-8"), patch)
            result["patch_applies"] = source is not None
            (work / "patched.py").write_text(source or "", encoding="utf-8")
            result["final_patched"] = _final(run([sys.executable, "patched.py"], work, _PLAIN)[1])
    lines = [
        *result["explain"]["lines"],
        *(line for f in result["checkup"]["findings"][:1] for line in f["lines"]),
    ]
    result["line"] = bool(set(lines) & set(meta["fault_lines"]))
    return result


def main(folder: Path, results: Path) -> None:
    """Look at every program of a folder that has no result yet."""
    known = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    for meta in sorted(folder.rglob("meta.json")):
        name = meta.parent.relative_to(folder).as_posix()
        if name not in known:
            known[name] = look_at(meta.parent)
            results.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print(name, known[name]["kind"], known[name]["line"], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
