"""What a tool says about a pair, and whether it is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Answer", "figures", "right_place"]


class Answer(NamedTuple):
    """What a tool says about a pair.

    Attributes:
        differs: whether it calls the programs different.
        phase: "forward", "backward" or "update".
        left, right: the paths of the modules that it names.
        line: the line of the right program that it names; 0 for none.
    """

    differs: bool
    phase: str = ""
    left: str = ""
    right: str = ""
    line: int = 0


def right_place(answer: Answer, case: Mapping[str, Any], lines: Sequence[int] | set[int] = ()) -> bool:
    """Whether a tool names the place of a mistake.

    A tool that names a line is right if it is the author's. A tool that names a module is right if that, or
    the module in which it directly lies, is the author's: the output of a layer is the first to differ if
    the operation before it is wrong. Of an update, only the phase has to be right.
    """
    if not answer.differs:
        return False
    if answer.line and answer.line in lines:
        return True
    if answer.phase != case["phase"]:
        return False
    if case["phase"] == "update":
        return True
    if answer.line and not (answer.left or answer.right):
        return False
    rights = (case["module_right"], *case.get("module_right_also", ()))
    return _lies_in(answer.left, (case["module_left"],)) and _lies_in(answer.right, rights)


def _lies_in(named: str, modules: Sequence[str]) -> bool:
    places = (named, named.rpartition(".")[0])
    return any(_ends(path, module.replace("/", ".")) for path in places for module in modules)


def _ends(path: str, wanted: str) -> bool:
    return not wanted or f".{path}".endswith(f".{wanted}")


def figures(judged: Sequence[tuple[Mapping[str, Any], Answer, bool]]) -> dict[str, dict[str, int]]:
    """Count the cases with their answers, and whether the place is right, by phase.

    False alarms that concern the update only are counted apart.
    """
    found: dict[str, dict[str, int]] = {}
    for case, answer, right in judged:
        if case["kind"] == "equivalent":
            row = found.setdefault("equivalent", {"pairs": 0, "false_alarms": 0, "in_the_update": 0})
            row["pairs"] += 1
            row["in_the_update" if answer.phase == "update" else "false_alarms"] += answer.differs
        else:
            row = found.setdefault(case["phase"], {"pairs": 0, "seen": 0, "place": 0})
            row["pairs"] += 1
            row["seen"] += answer.differs
            row["place"] += right
    return found
