"""What the command tells the process that runs the script, and what it hears back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Failure", "Outcome", "Plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run the script.

    Attributes:
        script: its path, or the module's name if ``module``.
        arguments: what it finds in ``sys.argv[1:]``.
        module: run it as ``python -m`` does.
        seed: of Python's, NumPy's and torch's global generators, before the script's first line.
        record_from: the optimizer step from which each step is recorded; None: none is.
        again: a run before this one has failed.
    """

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    seed: int = 0
    record_from: int | None = None
    again: bool = False

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The inverse of :meth:`write`."""
        d = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**d, "arguments": tuple(d["arguments"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first value that was not finite.

    Attributes:
        step: the optimizer step, from 1: the one that was being prepared or taken.
        what: "loss", "gradient", "parameter", "output" or "error".
        names: which, if they have names.
        unit: what ``step`` counts: "step", or "call" of a watched function.
    """

    step: int
    what: str
    names: tuple[str, ...] = ()
    unit: str = "step"

    def __str__(self) -> str:
        shown = ", ".join(self.names[:3]) + (
            f" and {len(self.names) - 3} more" if len(self.names) > 3 else ""
        )
        when = f"{self.unit} {self.step}"
        return {
            "loss": f"the loss of {when} is not finite",
            "gradient": f"gradients of {shown or 'parameters'} are not finite in {when}",
            "parameter": f"{shown or 'parameters'} not finite after {when}",
            "error": f"{shown} in {when} speaks of values that are not finite",
            "output": f"what {shown} returns is not finite in {when}",
        }[self.what]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        steps: optimizer steps that were taken (PyTorch).
        calls: calls that were watched (JAX).
        watched: what was looked at: "torch", "jax".
        optimizers: how many optimizers took steps.
        failure: what was not finite first; None: nothing.
        report: the diagnosis as plain values; None if the failing step was not recorded.
        exit_code: the script's own; None if it was ended at the failure.
        error: the last line of the exception that ended it.
    """

    steps: int = 0
    calls: int = 0
    watched: list[str] = field(default_factory=list)
    optimizers: int = 0
    failure: Failure | None = None
    report: dict[str, Any] | None = None
    exit_code: int | None = None
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Outcome:
        """The inverse of :meth:`to_dict`."""
        failure = d["failure"]
        if failure is not None:
            failure = Failure(**{**failure, "names": tuple(failure["names"])})
        return cls(**{**d, "failure": failure})
