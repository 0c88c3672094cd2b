"""The audit: rows sorted by risk, as data, text and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stablenum.diagnosis.audit.rendering import as_rich, as_text
from stablenum.diagnosis.audit.risk_rules import Risk, risks_of
from stablenum.diagnosis.audit.rows import Row
from stablenum.diagnosis.report.html import preformatted

__all__ = ["Audit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What :func:`stablenum_torch.audit` and :func:`stablenum_jax.audit` return.

    Attributes:
        optimizer: the optimizer's name.
        rows: one per parameter, the one at the highest risk first.
        risks: what is wrong, the worst first; empty if nothing is.
        notes: descriptions of what could not be determined.

    Example:
        >>> audit = Audit.of("Adam", [Row(name="w", shape=(2,), dtype="float32")])
        >>> audit.ok
        True
    """

    optimizer: str
    rows: tuple[Row, ...]
    risks: tuple[Risk, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        optimizer: str,
        rows: Iterable[Row],
        *,
        notes: Iterable[str] = (),
    ) -> Audit:
        """Return the audit with these rows, judged and sorted."""
        given = list(rows)
        found = {id(row): risks_of(row) for row in given}
        worst = {key: max((r.weight for r in risks), default=(0, 0.0)) for key, risks in found.items()}
        given.sort(key=lambda row: worst[id(row)], reverse=True)
        risks = sorted((r for row in given for r in found[id(row)]), key=lambda r: r.weight, reverse=True)
        return cls(optimizer=optimizer, rows=tuple(given), risks=tuple(risks), notes=tuple(notes))

    @property
    def ok(self) -> bool:
        """Whether no parameter is at risk."""
        return not self.risks

    @property
    def poisoned(self) -> dict[str, int]:
        """For each poisoned parameter, by name, how many elements of its state a repair resets."""
        return {row.name: row.measured.poisoned for row in self.rows if row.measured.poisoned}

    def problems(self) -> tuple[str, ...]:
        """Descriptions of what can make the next update wrong, the worst first."""
        return tuple(str(risk) for risk in self.risks if risk.breaks_update)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, limit: int = 20) -> str:
        """Return, as plain text, a table of the ``limit`` parameters at the highest risk, and the risks."""
        return as_text(self.optimizer, self.rows, self.risks, self.notes, limit=limit)

    def _repr_html_(self) -> str:
        """Return the text, for notebooks."""
        return preformatted(str(self))

    def __rich__(self) -> Any:
        return as_rich(self.optimizer, self.rows, self.risks, self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "optimizer": self.optimizer,
            "ok": self.ok,
            "risks": [risk.to_dict() for risk in self.risks],
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return the audit as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)
