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

from stablenum.diagnosis.diff.differences import Difference

__all__ = ["Proof", "Task", "places_of"]


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
        recorded: whether the left program is a recording, which cannot be run at other weights.
        differences: the lines of each difference, left and right.
        results: how many results of each kind were compared.
        error: what failed; "" if nothing did.
    """

    ok: bool = False
    elsewhere: bool | None = None
    recorded: bool = False
    differences: tuple[tuple[str, str], ...] = ()
    results: Mapping[str, int] | None = None
    error: str = ""

    @property
    def proven(self) -> bool:
        """Whether the programs agree, at other weights, too, as far as these can be tried."""
        return self.ok and (self.elsewhere is True or self.recorded)


def proof_of(task: Task) -> Proof:
    """Compare the programs of a task: the left one as its file is, the right one from the changed texts.

    Two more runs must not speak against it: the right program from its unchanged texts still differs, and the
    left one, where the texts are its own, too, gives the same with them.
    """
    from stablenum.commands.diff.pair import Origin, built
    from stablenum.diagnosis.diff.compare import examined
    from stablenum.diagnosis.diff.lockfile.loading import load_program
    from stablenum.diagnosis.diff.mending.trials import agree_elsewhere, counts_of, lacks, same_results
    from stablenum.diagnosis.diff.places.results import groups_of
    from stablenum.diagnosis.diff.sides.sides import measured

    left_at, right_at = (Origin(Path(path), function) for path, function in (task.left, task.right))
    original = built(left_at, {}) if left_at.function else None
    left: Any = load_program(left_at.path) if original is None else original.program
    unchanged, made = built(right_at, {}), built(right_at, task.texts)
    spaces = [{} if original is None else original.namespace, unchanged.namespace]
    weights = next((space["weights"] for space in spaces if "weights" in space), "match")
    report, comparison = examined(left, made.program, weights, task.steps)
    before = Counter({(kind, step): number for kind, step, number in task.results})
    if lacks(counts_of(comparison.groups), before):
        return Proof(error="fewer results are compared with the changes than without them.")
    right, steps = comparison.right, comparison.left.steps
    first = measured(unchanged.program, weights=right.weights, steps=steps)
    if report.ok and not any(g.differing for g in groups_of(comparison.left, first, comparison.weights)):
        return Proof(error="the programs also agree without the changes: they are not the same in each run.")
    if report.ok and original is not None:
        again = measured(built(left_at, task.texts).program, steps=steps)
        if not same_results(comparison.left, again):
            return Proof(error="the changes are in code of both programs, and the other one changes, too.")
    elsewhere = (
        agree_elsewhere(comparison.left, right, comparison.weights, unchanged.program) if report.ok else None
    )
    return Proof(
        ok=report.ok,
        elsewhere=elsewhere,
        recorded=original is None,
        differences=tuple(places_of(d) for d in report.differences),
        results=dict(Counter(g.kind for g in comparison.groups for _ in g.pairs)),
    )


def places_of(difference: Difference) -> tuple[str, str]:
    """Return the lines of a difference, left and right; "" for none."""
    left, right = ("" if p is None else p.where for p in (difference.left, difference.right))
    return left, right


def main() -> None:
    """Read the task, compare, and write what was found."""
    given = json.loads(sys.stdin.buffer.read())
    task = Task(**{**given, "left": tuple(given["left"]), "right": tuple(given["right"])})
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the programs print
    sys.path[:] = task.paths
    try:
        found = proof_of(task)
    except (Exception, SystemExit) as error:  # noqa: BLE001  said to whoever asked for the proof
        found = Proof(error=f"{type(error).__name__}: {error}")
    answer.write(json.dumps(asdict(found)))
    answer.close()


if __name__ == "__main__":
    main()
