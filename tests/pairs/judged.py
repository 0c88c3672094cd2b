"""Run a case, and judge the report by what its author says."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import stablenum
from stablenum.diagnosis.diff.differences import Location
from stablenum.diagnosis.diff.weights.weights import UnmappedError

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


def lacking_for(case: dict[str, Any]) -> str:
    """The packages that a case needs and that are not installed in that version."""
    found = []
    for need in case.get("needs", ()):
        package, _, wanted = need.partition("==")
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = ""
        if not version or (wanted and version != wanted):
            found.append(need)
    return ", ".join(found)


def source_of(name: str, case: dict[str, Any]) -> str:
    """The text of a case's file."""
    text = (HERE / name / case["base"]).read_text(encoding="utf-8")
    for old, new in case["replace"]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


class Sides(NamedTuple):
    """The two sides of a case: what makes the programs, and the texts in which their lines are counted.

    Attributes:
        left, right: return the programs.
        left_text, right_text: the texts; two of them if a program is compared with a changed copy.
        weights: the argument of ``stablenum.diff``.
    """

    left: Callable[[], Any]
    right: Callable[[], Any]
    left_text: str
    right_text: str
    weights: Any = "match"


@contextmanager
def sides_of(name: str, case: dict[str, Any], folder: Path) -> Iterator[Sides]:
    """The sides of a case, whose file is written into a folder and loaded.

    Where a case says ``"both": "left"``, the file's left program is compared with itself after the change.
    """
    text = source_of(name, case)
    with _loaded(case["name"], text, folder) as module:
        if "both" not in case:
            yield Sides(module.left, module.right, text, text, getattr(module, "weights", "match"))
            return
        before = (HERE / name / case["base"]).read_text(encoding="utf-8")
        with _loaded(f"{case['name']}_before", before, folder) as original:
            yield Sides(original.left, module.left, before, text)


@contextmanager
def _loaded(name: str, text: str, folder: Path) -> Iterator[ModuleType]:
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    module_name = f"pair_{name}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[module_name]


def report_of(name: str, case: dict[str, Any], folder: Path) -> Any:
    """The report on a case, which is written into a folder and run."""
    with sides_of(name, case, folder) as sides:
        return stablenum.diff(sides.left(), sides.right(), weights=sides.weights)


def judged(name: str, case: dict[str, Any], folder: Path) -> Judged:
    """What is right in the report on a case."""
    try:
        report = report_of(name, case, folder)
    except UnmappedError:  # no answer
        return Judged(ok=False)
    return judged_report(name, case, report)


def judged_report(name: str, case: dict[str, Any], report: Any) -> Judged:
    """What is right in a report."""
    if report.ok or case["kind"] == "equivalent":
        return Judged(ok=report.ok)
    first, text = report.first, source_of(name, case)
    before = text if "both" not in case else (HERE / name / case["base"]).read_text(encoding="utf-8")
    left = _right_line(first.left, before, case["left"], case.get("left_also"))
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
    if location is None:
        return False
    # The line of the program itself, where the other one is of an installed package.
    said = location.called_at or location.where
    return said.rpartition(":")[2] in {str(line) for line in wanted}


def _ends(location: Location | None, module: str | None) -> bool:
    """Whether a module's path ends with the author's, written with dots or slashes."""
    if location is None or not module:
        return True
    return location.module.replace("/", ".").endswith(module.replace("/", "."))
