"""The data that the command exchanges with the process that runs the script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Failure", "Outcome", "Plan", "Sent", "again_from"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run the script.

    Attributes:
        script: the script's path, or the module's name if ``module`` is True.
        arguments: the script's ``sys.argv[1:]``.
        module: whether to run a module, as ``python -m`` does.
        seed: the seed of the global generators of Python, NumPy and torch, set before the script starts.
        record_from: the number, from 0, of the first optimizer step to record; all later ones are recorded
            too. None for no recording.
        again: whether an earlier run has failed.
        settings: whether that run has failed by a setting of an optimizer, whose line is looked for.
        ignore: names of functions and of entries of their results that are not judged.
        strict: whether a value that is not finite is a failure even if the script copes with it.
        checkup: whether what is finite is measured, too.
        finite: whether values that are not finite are looked for.
        steps: end the script after so many optimizer steps; None to run it to its end.
        remedy: a change to the training that is tried, as plain values; then only losses are noted.
        edits: changes of the source that are tried, as plain values.
        rank: the number of this process among those that train together.
        marks: a folder in which each of these notes that it has failed; "" if there are no others.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    seed: int = 0
    record_from: int | None = None
    again: bool = False
    settings: bool = False
    ignore: tuple[str, ...] = ()
    strict: bool = False
    checkup: bool = False
    finite: bool = True
    steps: int | None = None
    remedy: dict[str, Any] | None = None
    edits: tuple[dict[str, Any], ...] = ()
    rank: int = 0
    marks: str = ""

    def write(self, path: Path) -> None:
        """Write the plan as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Return the plan that :meth:`write` wrote."""
        d = json.loads(path.read_text(encoding="utf-8"))
        several = {name: tuple(d[name]) for name in ("arguments", "edits", "ignore")}
        return cls(**{**d, **several})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first value that was not finite.

    Attributes:
        step: the number, from 0, of the optimizer step that was being prepared or taken.
        what: "loss", "gradient", "by hand" (gradients that no optimizer uses), "parameter", "setting",
            "buffer", "output", "operation" (outside of every watched call) or "error".
        names: the names of the values, if they have names.
        unit: what ``step`` counts: "step", or "call" of a watched function.
        reporter: the process that reports the failure, if it is another one than this, such as "process 0".
    """

    step: int
    what: str
    names: tuple[str, ...] = ()
    unit: str = "step"
    reporter: str = ""

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (
            f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        )
        when, verb = f"{self.unit} {self.step}", "is" if len(self.names) == 1 else "are"
        return {
            "loss": f"the loss of {when} is not finite",
            "gradient": f"gradients of {shown or 'parameters'} are not finite in {when}",
            "by hand": f"gradients{' of ' * bool(shown)}{shown} that no optimizer uses are not finite",
            "parameter": f"{shown or 'parameters'} {verb} not finite after {when}",
            "setting": f"{shown}, in {when}",
            "buffer": f"{shown} {verb} NaN since {when}, for good, although its batch was left out",
            "error": f"{shown} in {when} failed with a message about its numbers",
            "operation": f"the result of {shown} is not finite before {when}",
            "output": f"the result of {shown} is not finite in {when}",
        }[self.what]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a process gave to a collective that was not finite, although nothing failed in this process.

    Attributes:
        step: the number of the optimizer step, from 0.
        report: where the value was born, as plain values.
    """

    step: int
    report: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: the number of optimizer steps that were taken (PyTorch).
        calls: the number of calls that were watched (JAX).
        watched: the frameworks that were watched: "torch", "jax".
        optimizers: the number of optimizers that took steps.
        failure: the first value that was not finite; None if there was none.
        report: the diagnosis as plain values; None if the failing step was not recorded.
        exit_code: the script's own exit code; None if the script was stopped at the failure.
        error: the last line of the exception that ended the script.
        relative_import: whether that was a relative import of a script that was not run as a module.
        trouble: the first error of the watcher itself, and where it was.
        troubles: the number of such errors.
        harmless: what was not finite first, if the script has coped with it or trained without it.
        checkup: what the checkup has found, as plain values; None if nothing was measured.
        losses: the losses of its steps.
        remedy: the change to the training by which the first cure can be tried, as plain values.
        applied: whether the change that is tried was made.
        sizes: of a trial, the sizes of activations and gradients in the first step.
        sent: what this process gave to the others that was not finite; None if it gave them nothing such.
        cut_short: whether the script was ended because another process had failed.
        lost: whether the process ended before it could say what it had seen.
    """

    steps: int = 0
    calls: int = 0
    watched: list[str] = field(default_factory=list)
    optimizers: int = 0
    failure: Failure | None = None
    report: dict[str, Any] | None = None
    exit_code: int | None = None
    error: str = ""
    relative_import: bool = False
    trouble: str = ""
    troubles: int = 0
    harmless: str = ""
    checkup: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)
    remedy: dict[str, Any] | None = None
    applied: bool = False
    sizes: str = ""
    sent: Sent | None = None
    cut_short: bool = False
    lost: bool = False

    def note_trouble(self, where: str, error: str) -> None:
        """Note an error of the watcher itself."""
        when = f"step {self.steps}" if self.steps or not self.calls else f"call {self.calls}"
        self.trouble = self.trouble or f"{where} in {when}: {error}"
        self.troubles += 1

    def unwatched(self) -> str:
        """Describe what the watcher could not do."""
        times = "once" if self.troubles == 1 else f"{self.troubles} times"
        return f"watching failed {times} and left the script alone there, first in {self.trouble}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Outcome:
        """Return the object from which :meth:`to_dict` made ``d``."""
        failure = d["failure"]
        if failure is not None:
            failure = Failure(**{**failure, "names": tuple(failure["names"])})
        sent = d["sent"]
        return cls(**{**d, "failure": failure, "sent": None if sent is None else Sent(**sent)})


def again_from(failure: Failure, optimizers: int) -> int:
    """Return the number of the step from which another run records, to see a failure: its gradients may have
    been computed before other optimizers took their steps."""
    return max(0, failure.step - max(0, optimizers - 1))
