"""Checkups of small scripts, for the tests of both adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["assert_fault", "assert_healthy", "checked", "run_checkup"]


def run_checkup(
    script: str, folder: Path, target: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The process of ``stablenum checkup``, run in a folder, and its report; {} if it wrote none."""
    line = [sys.executable, "-m", "stablenum", "checkup", script, "--json", str(target), *options]
    result = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=280)
    return result, json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}


def checked(
    text: str, folder: Path, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The same for a script with this text."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    return run_checkup("train.py", folder, folder / "r.json", *options)


def assert_fault(case: tuple[str, str, str], folder: Path) -> None:
    """The script's first finding is the symptom, and one of its lines has the given code."""
    text, symptom, line = case
    result, report = checked(text, folder, "--once")
    assert result.returncode == 1, result.stdout + result.stderr
    first = report["complaints"][0]
    assert first["symptom"] == symptom, result.stdout
    places = [p["code"] for p in (first["place"], *first["places"]) if p is not None]
    assert any(line in code for code in places), result.stdout
    assert "watching failed" not in result.stderr


def assert_healthy(text: str, folder: Path) -> None:
    """Nothing above a note is found in the script."""
    result, report = checked(text, folder)
    assert report.get("ok"), result.stdout + result.stderr
    assert result.returncode == 0, result.stderr
    assert "watching failed" not in result.stderr
