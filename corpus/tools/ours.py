"""stablenum: ``replay`` of a step, ``explain`` of a script, ``checkup`` of a silent one."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from corpus.case import Program
from corpus.task import Found, Task

__all__ = ["PACKAGE", "PLACE", "replay", "stablenum"]

PACKAGE = "stablenum"
PLACE = re.compile(r"([^\s:]+\.py):(\d+)")


def stablenum(task: Task) -> Found:
    """The first finding."""
    if task.is_step:
        return _replayed(task)
    return _checked(task) if task.set == "silent" else _explained(task)


def replay(framework: str, program: Program) -> Any:
    """The report of this framework's ``replay``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the standard deviation of one item, for example
        adapter = importlib.import_module(f"stablenum_{framework}")
        return adapter.replay(program.step, *program.args, **program.options)


def _replayed(task: Task) -> Found:
    report = replay(task.framework, task.build())
    said = str(report)
    place = PLACE.search(said)
    return Found(
        not report.ok,
        line=int(place[2]) if place else 0,
        file=place[1] if place else "",
        operation=report.findings[0].operation if report.findings else "",
        cause=report.verdict.cause.value,
        said=said[:500],
    )


def _command(name: str, task: Task, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        line = [sys.executable, "-m", "stablenum", name, task.path.name, "--json", str(file), *options]
        done = subprocess.run(line, capture_output=True, text=True, cwd=task.path.parent, check=False)
        return done, json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _explained(task: Task) -> Found:
    done, report = _command("explain", task)
    place = re.search(rf"^{re.escape(task.path.name)}:(\d+): ", done.stdout, re.MULTILINE)
    findings = report.get("findings") or [{}]
    return Found(
        done.returncode == 1,
        line=int(place[1]) if place else 0,
        operation=findings[0].get("operation") or "",
        cause=(report.get("verdict") or {}).get("cause") or "",
        said=done.stdout[:500],
    )


def _checked(task: Task) -> Found:
    done, report = _command("checkup", task, "--once")
    first = next(iter(report.get("complaints", ())), None)
    if report.get("ok", True) or first is None:
        return Found(False, said=done.stdout[:500])
    place = first["place"] or {}
    return Found(True, line=place.get("line", 0), cause=first["symptom"], said=done.stdout[:500])
