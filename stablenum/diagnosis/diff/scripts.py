"""The text of the scripts that reproduce a difference."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stablenum.diagnosis.diff.differences import Location
from stablenum.diagnosis.diff.play import Dialect

__all__ = ["Line", "Script", "comparing_script", "side_script"]

_VALUE = re.compile(r"\$(\d+)")


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
    body = [f"# {remark}" for remark in script.remarks]
    loaded = {name: load.format(f'given["{name}"]') for name in script.reads}
    body += [f"{name} = {loaded[name]}  # {what}" for name, what in script.reads.items()]
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
    return f"# {place.where}{passed}  {place.code}".rstrip()


def _checked(lacking: Sequence[str]) -> list[str]:
    if not lacking:
        return []
    return [
        f"for name in {list(lacking)!r}:",
        "    if name not in given:",
        '        raise SystemExit(f"inputs.npz lacks {name}, too large to keep. Add it to run this.")',
    ]


def comparing_script(
    title: str, sides: Mapping[str, Script | None], turned: str, known: Sequence[str]
) -> str:
    """Return the script that shows both sides.

    Args:
        title: what differs.
        sides: the side's script; None for a side without one.
        turned: the code that lays out the left side's value ``a`` as that of the right one; "" where nothing
            does.
        known: the sides whose value ``inputs.npz`` holds.
    """
    scripts = [f"from {side} import run as {side}" for side, script in sides.items() if script is not None]
    lines = [f'"""{title}"""', "", *_loading(sides, known), "import numpy as np", *scripts, ""]
    names = dict(zip(sides, "ab", strict=True))
    for side, name in names.items():
        if sides[side] is not None:
            lines.append(f"{name} = {side}()")
        elif side in known:
            lines.append(f'{name} = np.load(Path(__file__).with_name("inputs.npz"))["{side}"]  # as it is')
    there = [side for side, script in sides.items() if script is not None or side in known]
    if len(there) == 2 and turned not in ("", "a"):
        lines.append(f"a = {turned}  # laid out as on the right")
    lines += [f'print("{side}", {names[side]}, sep="\\n")' for side in there]
    if len(there) == 2 and turned:
        lines.append(
            'print("largest difference", np.abs(a - b).max(), "where the largest entry is", np.abs(a).max())'
        )
    lines += [f'print("{side}: nothing leads to the difference")' for side in sides if side not in there]
    return "\n".join([*lines, ""])


def _loading(sides: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    needed = any(script is None and side in known for side, script in sides.items())
    return ["from pathlib import Path", ""] if needed else []
