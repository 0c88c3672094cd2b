"""The report that ``replay`` and ``explain`` return."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any

from stablenum._support.files import write_text
from stablenum._support.pickled_fields import pickled_by_name
from stablenum.diagnosis.edits.fix import Fix
from stablenum.diagnosis.replay.causes import NOTHING_TO_TRY, Cause
from stablenum.diagnosis.replay.findings import Finding
from stablenum.diagnosis.replay.judge import Evidence, Verdict, judge
from stablenum.diagnosis.replay.values import plain
from stablenum.diagnosis.report.html import as_html, framed
from stablenum.diagnosis.report.sections import Sections, sections_of
from stablenum.diagnosis.report.text import as_text
from stablenum.errors import either

__all__ = ["Report"]


@pickled_by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a diagnosis.

    Attributes:
        evidence: everything that the replay found.
        verdict: the cause, the evidence for it, and the remedy.
        notes: descriptions of what the replay could not do, or did differently.
        seconds: how long the diagnosis took.
        fixes: changes of the source with which another run was finite, from ``stablenum explain``.

    Example:
        >>> from stablenum.diagnosis.replay.judge import Evidence
        >>> print(Report.of(Evidence(framework="torch", loss_finite=True)))
        Nothing wrong: loss, gradients and parameters are finite; any infinities inside were masked ...
    """

    evidence: Evidence
    verdict: Verdict
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    fixes: tuple[Fix, ...] = ()

    @classmethod
    def of(cls, evidence: Evidence, **rest: Any) -> Report:
        """Return the report on this evidence, with its verdict."""
        return cls(evidence=evidence, verdict=judge(evidence), **rest)

    def with_trial(self, said: str, *, patch: tuple[str, ...] = ()) -> Report:
        """Return the report with what another run of the script has shown of the remedy.

        Args:
            said: what it has shown, or why there was none.
            patch: the user's lines as they were changed.
        """
        return replace(self, verdict=replace(self.verdict, trial=said, patch=patch))

    def untried(self, why: str) -> Report:
        """Return the report with the reason for which its remedy was not tried, if it has one to try."""
        return self if self.verdict.cause in NOTHING_TO_TRY else self.with_trial(f"not tried: {why}")

    def without_function(self) -> Report:
        """Return the report whose remedy does without the safe function, which has not helped."""
        evidence = replace(self.evidence, tried="not finite")
        return replace(self, evidence=evidence, verdict=judge(evidence))

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.verdict.cause is Cause.NOTHING_WRONG

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The places where the failure began, in order of execution."""
        return self.evidence.findings

    @property
    def _sections(self) -> Sections:
        return sections_of(self.verdict, self.findings, self.notes)

    def __str__(self) -> str:
        return as_text(self._sections, ok=self.ok)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        evidence = {f.name: plain(getattr(self.evidence, f.name)) for f in fields(Evidence)}
        evidence["findings"] = [f.to_dict() for f in self.findings]
        return {
            "ok": self.ok,
            "verdict": self.verdict.to_dict(),
            "evidence": evidence,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "fixes": [asdict(fix) for fix in self.fixes],
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Report:
        """Return the object from which :meth:`to_dict` made ``d``."""
        found: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in d["evidence"].items()}
        found["findings"] = tuple(Finding.from_dict(f) for f in d["evidence"]["findings"])
        found["loss_scale"] = float(found["loss_scale"])
        verdict = {**d["verdict"], "cause": Cause(d["verdict"]["cause"])}
        verdict |= {name: tuple(verdict[name]) for name in ("evidence", "left", "patch")}
        return cls(
            evidence=Evidence(**found),
            verdict=Verdict(**verdict),
            notes=tuple(d["notes"]),
            seconds=d["seconds"],
            fixes=tuple(Fix(**fix) for fix in d.get("fixes", ())),
        )

    def to_json(self) -> str:
        """Return the report as strict JSON; inf and NaN among the statistics become strings."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_html(self) -> str:
        """Return one self-contained HTML page: no network, no script, a light and a dark theme."""
        return as_html(self._sections, ok=self.ok, framework=self.evidence.framework, seconds=self.seconds)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report in the format that the suffix names: ``.html``, ``.json`` or ``.txt``.

        The file is replaced once the new one is complete; a full disk leaves the old one.

        Raises:
            ValueError: ``path`` has another suffix.
        """
        path = Path(path)
        forms = {".html": self.to_html, ".json": self.to_json, ".txt": self.__str__}
        form = forms.get(path.suffix.lower())
        if form is None:
            raise ValueError(
                f"path must end in {either(forms)}; got {str(path)!r}. The suffix selects the format."
            )
        write_text(path, form().rstrip("\n") + "\n")

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from stablenum.diagnosis.report.terminal import as_rich

        return as_rich(self._sections, ok=self.ok)

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks."""
        return framed(self.to_html())
