"""What ``replay`` and ``explain`` return."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stablenum.diagnosis.causes import Cause
from stablenum.diagnosis.findings import Finding
from stablenum.diagnosis.judge import Evidence, Verdict, judge

__all__ = ["Report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a diagnosis.

    Attributes:
        evidence: all that was found out.
        verdict: cause, evidence, remedy.
        notes: what the replay could not do, or did otherwise, in words.
        seconds: what it took.

    Example:
        >>> print(Report.of(Evidence(framework="torch", loss_finite=True)))
        Nothing wrong: loss, gradients and parameters are finite; infinities inside were masked as they ...
    """

    evidence: Evidence
    verdict: Verdict
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, evidence: Evidence, **rest: Any) -> Report:
        """The report of this evidence, judged."""
        return cls(evidence=evidence, verdict=judge(evidence), **rest)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict.cause is Cause.NOTHING_WRONG

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Where it began, first cause first."""
        return self.evidence.findings

    def __str__(self) -> str:
        from stablenum.diagnosis.text import as_text

        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON knows."""
        evidence = {name: getattr(self.evidence, name) for name in self.evidence.__slots__}
        evidence["findings"] = [f.to_dict() for f in self.findings]
        return {
            "ok": self.ok,
            "verdict": self.verdict.to_dict(),
            "evidence": {k: list(v) if isinstance(v, tuple) else v for k, v in evidence.items()},
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """Strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)
