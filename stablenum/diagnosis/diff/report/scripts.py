"""The text of the scripts that reproduce a difference."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stablenum._support.outside_text import in_code, printable
from stablenum.diagnosis.diff.differences import Location
from stablenum.diagnosis.diff.sides.play import Dialect

__all__ = ["Line", "Script", "comparing_script", "side_script"]

_VALUE = re.compile(r"\$(\d+)")

# How compare.py gets the value of a side.
_WAYS = {
    "script": "{side}()",
    "given": 'np.load(Path(__file__).with_name("inputs.npz"))["{side}"]'
    "  # the {side} program has no operation here",
}
_BESIDE = "sys.path.insert(0, str(Path(__file__).resolve().parent))  # also with PYTHONSAFEPATH=1"
_APART = """\
finite = np.isfinite(a) & np.isfinite(b)
gap = np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0))
size = np.abs(np.where(np.isfinite(a), a, 0.0)).max(initial=0.0)
alone = ~finite & (a != b) & ~(np.isnan(a) & np.isnan(b))
apart = alone | (gap > 1e-9 * size)
print(apart.sum(), "of", apart.size, "entries differ by more than 1e-9 of the largest,", end=" ")
print(alone.sum(), "of them with inf or NaN on one side alone")
print("largest finite difference", gap.max(initial=0.0), "where the largest entry is", size)
for at in map(tuple, np.argwhere(apart)[:4]):
    print("  at", list(map(int, at)), "left", a[at], "right", b[at])"""


@dataclass(frozen=True, slots=True)
class Line:
    """An operation as code.

    Attributes:
        code: with ``$7`` for the value 7.
        place: where it comes from.
    """

    code: str
    place: Location | None


@dataclass(frozen=True, slots=True)
class Script:
    """What one side's script says.

    Attributes:
        side: "left" or "right".
        dialect: how it is written.
        reads: name of an array -> what it is.
        names: value -> its name or its number.
        lines: the operations.
        end: the value that is printed.
        remarks: what is not as in the program.
        lacking: the arrays that are too large to be kept.
    """

    side: str
    dialect: Dialect
    reads: Mapping[str, str]
    names: Mapping[int, str]
    lines: Sequence[Line]
    end: int
    remarks: Sequence[str] = ()
    lacking: Sequence[str] = ()


def side_script(script: Script) -> str:
    """Return the script of one side."""
    load, give = script.dialect.load, script.dialect.give
    body = [f"# {printable(remark)}" for remark in script.remarks]
    loaded = {name: load.format(f'given["{name}"]') for name in script.reads}
    body += [f"{name} = {loaded[name]}  # {printable(what)}" for name, what in script.reads.items()]
    body += _operations(script)
    body.append(f"return {give.format(script.names[script.end])}")
    return "\n".join([
        f'"""The {script.side} program, from what both programs have to the first value that differs."""',
        "",
        "from pathlib import Path",
        "",
        *sorted({"import numpy as np", *script.dialect.imports}),
        "",
        *script.dialect.setup,
        'given = np.load(Path(__file__).with_name("inputs.npz"))  # in float64',
        *_checked(script.lacking),
        "",
        "",
        "def run():",
        *(f"    {line}" for line in body),
        "",
        "",
        'if __name__ == "__main__":',
        "    print(run())",
        "",
    ])  # fmt: skip


def _operations(script: Script) -> list[str]:
    found, place = list[str](), None
    for line in script.lines:
        at = None if line.place is None else (line.place.where, line.place.phase)
        if at != place and line.place is not None and line.place.code:
            found.append(_comment(line.place))
        place = at
        found += _VALUE.sub(lambda m: script.names[int(m[1])], line.code).split("\n")
    return found


def _comment(place: Location) -> str:
    passed = "" if place.phase == "forward" else f" ({place.phase})"
    return printable(f"# {place.where}{passed}  {place.code}".rstrip())


def _checked(lacking: Sequence[str]) -> list[str]:
    if not lacking:
        return []
    return [
        f"for name in {list(lacking)!r}:",
        "    if name not in given:",
        '        raise SystemExit(f"inputs.npz lacks {name}, too large to keep. Add it to run this.")',
    ]


def comparing_script(title: str, sides: Mapping[str, str], turned: str) -> str:
    """Return the script that shows both sides.

    Args:
        title: what differs.
        sides: for "left" and "right", "script" if it has one, "given" if ``inputs.npz`` has its value, and
            else why there is nothing to show.
        turned: the code that lays out the left side's value ``a`` as that of the right one; "" where nothing
            does.
    """
    names = dict(zip(sides, "ab", strict=True))
    shown = [side for side, way in sides.items() if way in _WAYS]
    made = [f"{names[side]} = {_WAYS[sides[side]].format(side=side)}" for side in shown]
    if len(shown) == 2 and turned not in ("", "a"):
        made.append(f"a = {turned}  # laid out as on the right")
    made += ["np.set_printoptions(threshold=20, edgeitems=1)  # a few entries of large arrays"]
    made += [f'print("{side}", {names[side]}.shape, {names[side]}, sep="\\n")' for side in shown]
    made += _APART.splitlines() if len(shown) == 2 and turned else []
    made += [f'print("{side}: {in_code(why)}")' for side, why in sides.items() if side not in shown]
    imports = [f"from {side} import run as {side}" for side in shown if sides[side] == "script"]
    path = ["from pathlib import Path", ""] if "given" in sides.values() or imports else []
    system = ["import sys"] if imports else []
    beside = ["", _BESIDE] if imports else []
    head = [*system, *path, "import numpy as np", *beside, *imports]
    return "\n".join([f'"""{in_code(title)}"""', "", *head, "", *made, ""])
