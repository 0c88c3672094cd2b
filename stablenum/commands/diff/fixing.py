"""``stablenum diff --fix``: change one side's source until both agree, and prove it in another process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from stablenum.commands.diff.pair import FILES, Origin, Pair, built
from stablenum.commands.diff.proof import Proof, Task, places_of
from stablenum.diagnosis.diff.compare import examined
from stablenum.diagnosis.diff.differences import Difference
from stablenum.diagnosis.diff.mending.proposals import lines_of
from stablenum.diagnosis.diff.mending.search import Mended, Mending, mended
from stablenum.diagnosis.diff.mending.trials import counts_of
from stablenum.diagnosis.diff.places.comparison import Comparison
from stablenum.diagnosis.diff.places.results import Group
from stablenum.diagnosis.diff.report.report import DiffReport
from stablenum.diagnosis.diff.sides.dump import Dump
from stablenum.diagnosis.edits.files import readable
from stablenum.diagnosis.edits.fix import Fix, patch_of, texts_after

__all__ = ["Fixed", "check_fixable", "fixed"]

# Changes for a difference are tried for so many times as long as the command took so far. With the proof,
# which takes less than that, --fix takes up to three times as long for one difference. The proof is given up
# after so many times as long, and so many seconds more. Chosen.
_TIMES, _MOST_TIMES, _MORE_SECONDS = 1.2, 5.0, 120.0


class Fixed(NamedTuple):
    """What was found.

    Attributes:
        fixes: the changes, those that help first.
        before, after: the text of each file as it is, and with the changes that are proven.
        agrees: whether the programs agree with these, as another process has shown.
        tried: how many changes were tried, and for how long.
    """

    fixes: tuple[Fix, ...]
    before: Mapping[str, str]
    after: Mapping[str, str]
    agrees: bool
    tried: str

    @classmethod
    def without(cls, why: str) -> Fixed:
        """Return that nothing was found, and why."""
        return cls((), {}, {}, False, why)


@dataclass(slots=True)
class _Sides:
    """The program that stays as it is, and the one that is changed."""

    fixed: Origin
    changed: Origin
    program: Any
    weights: Any
    steps: int | None

    def again(self, texts: Mapping[str, str]) -> tuple[DiffReport, Comparison]:
        """Compare the programs, the changed one made from these texts."""
        return examined(self.program, built(self.changed, texts).program, self.weights, self.steps)


def check_fixable(pair: Pair, side: str) -> None:
    """Check that a side can be changed.

    Raises:
        ValueError: it is a recording; the other one holds named arrays only; it is the left one, and
            ``weights`` are given for the right one; or libcst is not installed.
    """
    if importlib.util.find_spec("libcst") is None:
        raise ValueError("--fix needs libcst: pip install libcst")
    changed, other = pair.origins[::-1] if side == "right" else pair.origins
    if changed.path.suffix.lower() in FILES:
        raise ValueError(f"--fix changes source, and {changed.path} is a recording: give it as LEFT.")
    if other.path.suffix.lower() == ".npz" or isinstance(pair.left, Dump):
        raise ValueError("--fix needs a program, or a recording of one, beside that which is changed.")
    if side == "left" and not isinstance(pair.weights, str):
        raise ValueError(
            "--side left needs a map of the weights that is inferred: leave weights out of the file."
        )


def fixed(
    pair: Pair,
    found: tuple[DiffReport, Comparison],
    steps: int | None,
    *,
    side: str,
    took: float,
    say: Callable[[str], object],
) -> Fixed:
    """Return changes of one side's source, and what another process has shown of them.

    Args:
        pair: the two programs.
        found: the report and the comparison.
        steps: how many training steps are compared.
        side: "left" or "right", the side that is changed.
        took: how many seconds the command took so far.
        say: called with messages about the progress.
    """
    origins = pair.origins if side == "right" else pair.origins[::-1]
    sides = _Sides(*origins, pair.left if side == "right" else pair.right, pair.weights, steps)
    if side == "left":
        say("comparing the programs the other way round")
        found = sides.again({})
    texts = _texts(sides.changed.path.resolve(), found[0])
    begun = time.monotonic()
    mending = mended(
        found,
        pair.weights,
        texts,
        lambda changed: built(sides.changed, changed),
        sides.again,
        seconds=_TIMES * took,
        say=say,
    )
    tried = f"{mending.tried} changes were tried in {time.monotonic() - begun:.0f} s"
    tried = f"{tried}; {mending.ended}" if mending.ended else tried
    return _proven(sides, found[1].groups, mending, texts, took, tried, say)


def _texts(path: Path, report: DiffReport) -> dict[str, str]:
    """Return the text of each file that may be changed: of those that make the program, and of others in its
    folder in which it differs."""
    named = {file for d in report.differences for file in lines_of(d, "right")}
    found = {str(file): readable(file, path.parent) for file in (path, *map(Path, sorted(named)))}
    return {file: text for file, text in found.items() if text is not None}


def _proven(
    sides: _Sides,
    groups: Sequence[Group],
    mending: Mending,
    texts: Mapping[str, str],
    took: float,
    tried: str,
    say: Callable[[str], object],
) -> Fixed:
    """Compare the changed programs in a process of their own."""
    after = {**texts, **texts_after(mending.rewrites)}
    likely = tuple(_fix(m, proven=False, evidence=_LIKELY) for m in mending.likely[:_MOST_LIKELY])
    if not mending.mended:
        return Fixed(likely, texts, texts, False, tried)
    say("comparing the mended programs in another process")
    proof = _proof(sides, groups, after, _MOST_TIMES * took + _MORE_SECONDS)
    fixes = tuple(_fix(m, proven=proof.proven, evidence=_said(m.difference, proof)) for m in mending.mended)
    if proof.proven:
        return Fixed(fixes, texts, after, True, tried)
    return Fixed((*fixes, *likely), texts, texts, False, tried)


# Of changes with which programs agree at their own weights only, so many are shown. Chosen, not measured.
_MOST_LIKELY = 2
_LIKELY = "The programs agree with it at their own weights, and not at others or in one more step."


def _fix(mended: Mended, *, proven: bool, evidence: str) -> Fix:
    rewrite, difference = mended
    cause = difference.causes[0] if difference.causes else None
    old, new = (" ".join(text.split()) for text in (rewrite.old, rewrite.new))
    said = f"{Path(rewrite.file).name}:{rewrite.line}: {old} becomes {new}"
    return Fix(
        patch=patch_of({rewrite.file: rewrite.before}, {rewrite.file: rewrite.after}),
        explanation=said if cause is None else f"{said} ({cause.code}: {cause.sentence})",
        proven=proven,
        evidence=evidence,
    )


def _said(difference: Difference, proof: Proof) -> str:
    """Return what the other process has shown, in a sentence."""
    if proof.error:
        return f"It could not be tried in a separate process: {proof.error}"
    if not proof.ok:
        gone = places_of(difference) not in proof.differences
        where = " and ".join(filter(None, proof.differences[0])) if proof.differences else ""
        return (
            f"In a separate process, the programs no longer differ at this place; they differ at {where}."
            if gone
            else "In a separate process, the programs still differ at this place."
        )
    counts = proof.results or {}
    said = ", ".join(f"{n} {_NAMES[kind][n > 1]}" for kind, n in counts.items() if n)
    also = ", at the programs' own weights and, for one more step, at others" if proof.elsewhere else ""
    tail = "; at other weights, or in one more step, they differ" if proof.elsewhere is False else ""
    tail = "; other weights could not be tried" if proof.elsewhere is None else tail
    return f"In a separate process, all results agree in float64: {said}{also}{tail}."


_NAMES = {
    "loss": ("loss", "losses"),
    "output": ("output", "outputs"),
    "gradient": ("gradient", "gradients"),
    "updated": ("updated parameter", "updated parameters"),
}


def _proof(sides: _Sides, groups: Sequence[Group], texts: Mapping[str, str], seconds: float) -> Proof:
    """Compare the programs in another process, which an interrupt ends, too."""
    task = Task(
        left=(str(sides.fixed.path), sides.fixed.function),
        right=(str(sides.changed.path), sides.changed.function),
        texts=texts,
        steps=sides.steps,
        results=tuple((*key, number) for key, number in counts_of(groups).items()),
        paths=tuple(sys.path),
    )
    command = [sys.executable, "-P", "-m", "stablenum.commands.diff.proof"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asdict(task)).encode(),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Proof(error=f"the comparison took more than {seconds:.0f} s.")
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return Proof(error=f"the process ended with the code {done.returncode}. {last}".strip())
    try:
        found = json.loads(done.stdout)
    except ValueError:
        return Proof(error="the process gave no answer.")
    places = tuple((a, b) for a, b in found["differences"])
    return replace(Proof(), **{**found, "differences": places})
