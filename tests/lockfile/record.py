"""Compare recordings of programs with changed programs, and write what is right into ``found.json``.

``cases/cases.json`` holds harmless changes and faults of the programs beside it, whose author had not seen
the comparison. ``python -m tests.lockfile.record`` compares all of them, and prints the table of the page;
with ``--table``, it only prints the table; with ``--environment NAME PYTHON``, it compares the unchanged
programs in another virtual environment, and notes these under NAME.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import stablenum

HERE = Path(__file__).parent
CASES = HERE / "cases"
RECORD = HERE / "found.json"


class Row(NamedTuple):
    """What a report says of a case.

    Attributes:
        kind: "harmless" or "fault".
        seen: whether it calls the programs different.
        line: whether the first line of the changed program is one that the author names.
        rounding: whether the difference is one of rounding.
        confirmed: whether a cause is confirmed.
        cause: the code of the first cause.
    """

    kind: str
    seen: bool
    line: bool = False
    rounding: bool = False
    confirmed: bool = False
    cause: str = ""


def cases() -> dict[str, dict[str, Any]]:
    """The cases by name."""
    return {c["name"]: c for c in json.loads((CASES / "cases.json").read_text(encoding="utf-8"))}


def bases() -> list[str]:
    """The files of the programs."""
    return sorted({c["base"] for c in cases().values()})


def changed_text(case: dict[str, Any]) -> str:
    """The text of a changed program."""
    text = (CASES / case["base"]).read_text(encoding="utf-8")
    for old, new in case["replace"]:
        assert text.count(old) == 1, (case["name"], old)
        text = text.replace(old, new)
    return text


@contextmanager
def loaded(name: str, text: str, folder: Path) -> Iterator[ModuleType]:
    """A program, written into a folder and imported."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"lockfile_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def recorded(base: str, folder: Path) -> Any:
    """The recording of an unchanged program, read from a file."""
    path = folder / f"{base}.snum"
    if not path.exists():
        with loaded("base", (CASES / base).read_text(encoding="utf-8"), folder) as module:
            stablenum.save_program(module.program(), path)
    return stablenum.load_program(path)


def row_of(case: dict[str, Any], folder: Path) -> Row:
    """What the report says of a case."""
    golden, text = recorded(case["base"], folder), changed_text(case)
    with loaded(case["name"], text, folder) as module:
        report = stablenum.diff(golden, module.program())
    if report.ok:
        return Row(case["kind"], seen=False)
    first = report.first
    cause = report.causes[0] if report.causes else None
    return Row(
        case["kind"],
        seen=True,
        line=case["kind"] == "fault" and _is_right(first.right, case["line"], text),
        rounding=first.of_rounding,
        confirmed=cause is not None and cause.confirmed,
        cause="" if cause is None else cause.code,
    )


def _is_right(location: Any, lines: str | list[str], text: str) -> bool:
    if location is None:
        return False
    said = (location.called_at or location.where).rpartition(":")[2]
    wanted = {line.strip() for line in ([lines] if isinstance(lines, str) else lines)}
    return said.isdigit() and text.splitlines()[int(said) - 1].strip() in wanted


def in_environment(python: str, base: str, folder: Path, variables: Mapping[str, str]) -> Row:
    """What the command says of an unchanged program in another environment, with these variables set."""
    recorded(base, folder)
    found = subprocess.run(
        [python, "-m", "stablenum", "diff", folder / f"{base}.snum", CASES / base],
        cwd=HERE.parents[1],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode in (0, 1), found.stderr
    return Row("harmless", seen=found.returncode == 1)


def table(found: dict[str, dict[str, Any]]) -> str:
    """The table of the page."""
    rows = [r for name, r in found.items() if "/" not in name]
    elsewhere = [r for name, r in found.items() if "/" in name]
    harmless, faults = ([r for r in rows if r["kind"] == kind] for kind in ("harmless", "fault"))
    alarms = sum(r["seen"] for r in elsewhere)
    confirmed = [r for r in faults if r["confirmed"]]
    lines = [
        "| | of | |",
        "| --- | ---: | ---: |",
        f"| harmless changes that give an alarm | {len(harmless)} | {sum(r['seen'] for r in harmless)} |",
        f"| unchanged programs elsewhere that give an alarm | {len(elsewhere)} | {alarms} |",
        f"| faults that are seen | {len(faults)} | {sum(r['seen'] for r in faults)} |",
        f"| faults whose line is named first | {len(faults)} | {sum(r['line'] for r in faults)} |",
        f"| faults with a confirmed cause | {len(faults)} | {len(confirmed)} |",
    ]
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--environment", nargs=2, metavar=("NAME", "PYTHON"))
    parser.add_argument("--set", nargs="*", default=(), metavar="NAME=VALUE", help="variables there")
    parser.add_argument(
        "--only", choices=("torch", "jax"), help="with --environment: programs of one framework"
    )
    options = parser.parse_args()
    found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        if options.environment:
            name, python = options.environment
            variables = dict(x.split("=", 1) for x in options.set)
            for base in bases():
                if f"stablenum_{options.only or ''}" in (CASES / base).read_text(encoding="utf-8"):
                    row = in_environment(python, base, Path(folder), variables)
                    _note(found, f"{name}/{base}", row)
        elif not options.table:
            for name, case in cases().items():
                _note(found, name, row_of(case, Path(folder)))
    print(table(found))


def _note(found: dict[str, Any], name: str, row: Row) -> None:
    found[name] = row._asdict()
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(name, row, flush=True)


if __name__ == "__main__":
    main()
