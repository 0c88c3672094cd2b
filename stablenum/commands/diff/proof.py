"""The process in which a mended program is compared: ``python -m stablenum.commands.diff.proof``.

It reads what to compare from its standard input, and writes one line of JSON; what the programs print goes to
the standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Proof", "Task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is compared.

    Attributes:
        left, right: the file and the function of each side; the function is "" for a recording.
        texts: the changed text of each file from which the right program is made, by its real path.
        steps: how many training steps; None for as many as a recording has, or one.
        results: how many results of each kind and step were compared before, as (kind, step, number).
        paths: where modules are looked for.
    """

    left: tuple[str, str]
    right: tuple[str, str]
    texts: Mapping[str, str]
    steps: int | None
    results: tuple[tuple[str, int, int], ...]
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the comparison has shown.

    Attributes:
        ok: whether the programs agree, in at least as many results as before.
        elsewhere: whether they do so at other weights, too; None if that is not known.
        differences: the lines of each difference, left and right.
        results: how many results of each kind were compared.
        error: what failed; "" if nothing did.
    """

    ok: bool = False
    elsewhere: bool | None = None
    differences: tuple[tuple[str, str], ...] = ()
    results: Mapping[str, int] | None = None
    error: str = ""


def proof_of(task: Task) -> Proof:
    """Compare the programs of a task: the left one as its file is, the right one from the changed texts."""
    from stablenum.commands.diff.pair import Origin, built, executed
    from stablenum.diagnosis.diff.compare import examined
    from stablenum.diagnosis.diff.lockfile.loading import load_program
    from stablenum.diagnosis.diff.mending.trials import agree_elsewhere, counts_of, lacks

    path, function = Path(task.left[0]), task.left[1]
    weights: Any = "match"
    left: Any
    if function:
        module = executed(path)
        left, weights = getattr(module, function)(), getattr(module, "weights", weights)
    else:
        left = load_program(path)
    made = built(Origin(Path(task.right[0]), task.right[1]), task.texts)
    weights = made.namespace.get("weights", weights)
    report, comparison = examined(left, made.program, weights, task.steps)
    before = Counter({(kind, step): number for kind, step, number in task.results})
    if lacks(counts_of(comparison.groups), before):
        return Proof(error="fewer results are compared with the changes than without them.")
    elsewhere = None
    if report.ok:
        elsewhere = agree_elsewhere(comparison.left, comparison.right, comparison.weights)
    places = [tuple("" if p is None else p.where for p in (d.left, d.right)) for d in report.differences]
    results = Counter(g.kind for g in comparison.groups for _ in g.pairs)
    return Proof(
        ok=report.ok,
        elsewhere=elsewhere,
        differences=tuple((a, b) for a, b in places),
        results=dict(results),
    )


def main() -> None:
    """Read the task, compare, and write what was found."""
    given = json.loads(sys.stdin.buffer.read())
    task = Task(**{**given, "left": tuple(given["left"]), "right": tuple(given["right"])})
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the programs print
    sys.path[:] = task.paths
    try:
        found = proof_of(task)
    except Exception as error:  # noqa: BLE001  said to whoever asked for the proof
        found = Proof(error=f"{type(error).__name__}: {error}")
    answer.write(json.dumps(asdict(found)))
    answer.close()


if __name__ == "__main__":
    main()
