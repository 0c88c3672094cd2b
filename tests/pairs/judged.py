"""Run a case, and judge the report by what its author says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import stablenum
from stablenum.diagnosis.diff.differences import Location

HERE = Path(__file__).parent


class Judged(NamedTuple):
    """What is right in a report.

    Attributes:
        ok: whether the programs were found to agree.
        phase, left, right, module: whether these are right.
        cause, confirmed: whether the cause is right, and whether it was confirmed.
    """

    ok: bool
    phase: bool = False
    left: bool = False
    right: bool = False
    module: bool = False
    cause: bool = False
    confirmed: bool = False


def cases(name: str) -> dict[str, dict[str, Any]]:
    """The cases of a set, by name."""
    return {c["name"]: c for c in json.loads((HERE / name / "cases.json").read_text(encoding="utf-8"))}


def source_of(name: str, case: dict[str, Any]) -> str:
    """The text of a case's file."""
    text = (HERE / name / case["base"]).read_text(encoding="utf-8")
    for old, new in case["replace"]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def report_of(name: str, case: dict[str, Any], folder: Path) -> Any:
    """The report on a case, which is written into a folder and run."""
    path = folder / f"{case['name']}.py"
    path.write_text(source_of(name, case), encoding="utf-8")
    module_name = f"pair_{case['name']}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return stablenum.diff(module.left(), module.right())
    finally:
        del sys.modules[module_name]


def judged(name: str, case: dict[str, Any], folder: Path) -> Judged:
    """What is right in the report on a case."""
    try:
        report = report_of(name, case, folder)
    except ValueError:  # parameters that were not mapped: no answer
        return Judged(ok=False)
    if report.ok or case["kind"] == "equivalent":
        return Judged(ok=report.ok)
    first, text = report.first, source_of(name, case)
    left = _right_line(first.left, text, case["left"], case.get("left_also"))
    right = _right_line(first.right, text, case["right"], case.get("right_also"))
    place = first.left or first.right
    module = _ends(first.left, case["module_left"]) and _ends(first.right, case["module_right"])
    return Judged(
        ok=False,
        phase=place is not None and place.phase == case["phase"],
        left=left,
        right=right,
        module=module,
        cause=bool(report.causes) and report.causes[0].code == case["cause"],
        confirmed=bool(report.causes) and report.causes[0].confirmed,
    )


def lines_of(text: str, fragment: str | None) -> set[int]:
    """The lines that a fragment of the text spans."""
    if fragment is None:
        return set()
    first = text[: text.index(fragment)].count("\n") + 1
    return set(range(first, first + fragment.count("\n") + 1))


def _right_line(location: Location | None, text: str, fragment: str | None, also: list[str] | None) -> bool:
    if fragment is None and (location is None or location.operation is None):
        return True
    wanted = set().union(*(lines_of(text, f) for f in [fragment, *(also or [])]))
    return location is not None and location.where.rpartition(":")[2] in {str(line) for line in wanted}


def _ends(location: Location | None, module: str | None) -> bool:
    """Whether a module's path ends with the author's, written with dots or slashes."""
    if location is None or not module:
        return True
    return location.module.replace("/", ".").endswith(module.replace("/", "."))
