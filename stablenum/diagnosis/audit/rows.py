"""One parameter of an audit, and the audit: rows sorted by risk, as data, text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stablenum.diagnosis.audit.laws import Law
from stablenum.diagnosis.audit.telemetry import Measured

if TYPE_CHECKING:
    from stablenum.diagnosis.audit.risks import Risk

__all__ = ["Audit", "Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What an audit found of one parameter; what is not known is None.

    Attributes:
        name: the parameter's.
        shape, dtype: the parameter's.
        state_dtypes: name of a state entry -> its format.
        law: the optimizer's rule and numbers.
        measured: counts and extremes.
        others: name of a state entry that is not understood, or not of the parameter's shape -> how many of
            its elements are not finite.
        second_dtype: the format of the second moment, in which the denominator is computed.
        eps_lost: whether eps is 0 in that format.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    state_dtypes: Mapping[str, str] = field(default_factory=dict)
    law: Law = field(default_factory=Law)
    measured: Measured = field(default_factory=Measured)
    others: Mapping[str, int] = field(default_factory=dict)
    second_dtype: str | None = None
    eps_lost: bool | None = None

    @property
    def update_rms(self) -> float | None:
        """RMS of the update that the moments make at the present learning rate."""
        return self.measured.update_rms

    @property
    def vanished(self) -> float | None:
        """frac(v == 0 and m != 0)."""
        return self._fraction(self.measured.vanished, self.measured.size)

    @property
    def below_eps(self) -> float | None:
        """The part with sqrt(v) < eps, of the elements that have seen a gradient."""
        return self._fraction(self.measured.below_eps, self.measured.alive)

    @property
    def stalled(self) -> float | None:
        """The part with w + dw == w, of the elements whose update is not 0."""
        return self._fraction(self.measured.stalled, self.measured.moved)

    @staticmethod
    def _fraction(part: int | None, whole: int | None) -> float | None:
        if part is None or whole is None:
            return None
        return part / whole if whole else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values; None where a number is not known or JSON does not know it."""
        measured = {k: _plain(v) for k, v in asdict(self.measured).items()}
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "state_dtypes": dict(self.state_dtypes),
            "law": {k: _plain(v) for k, v in asdict(self.law).items()},
            "eps_lost": self.eps_lost,
            **measured,
            "vanished_fraction": self.vanished,
            "below_eps_fraction": self.below_eps,
            "stalled_fraction": self.stalled,
            "others": dict(self.others),
        }


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What :func:`stablenum_torch.audit` and :func:`stablenum_jax.audit` return.

    Attributes:
        optimizer: its name.
        rows: one a parameter, the riskiest first.
        risks: what is wrong, the worst first; empty if nothing is.
        notes: what could not be known, in words.

    Example:
        >>> audit = Audit.of("Adam", [Row(name="w", shape=(2,), dtype="float32")])
        >>> audit.ok
        True
    """

    optimizer: str
    rows: tuple[Row, ...]
    risks: tuple[Risk, ...]
    notes: tuple[str, ...] = ()
    # What the adapter needs to repair in place; None where a repair returns a new state.
    _repair: Callable[[], int] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        optimizer: str,
        rows: Iterable[Row],
        *,
        notes: Iterable[str] = (),
        repair: Callable[[], int] | None = None,
    ) -> Audit:
        """The rows, judged and sorted."""
        from stablenum.diagnosis.audit.risks import risks_of

        given = list(rows)
        found = {id(row): risks_of(row) for row in given}
        worst = {key: max((r.weight for r in risks), default=(0, 0.0)) for key, risks in found.items()}
        given.sort(key=lambda row: worst[id(row)], reverse=True)
        risks = sorted((r for row in given for r in found[id(row)]), key=lambda r: r.weight, reverse=True)
        return cls(
            optimizer=optimizer, rows=tuple(given), risks=tuple(risks), notes=tuple(notes), _repair=repair
        )

    @property
    def ok(self) -> bool:
        """Whether no rule of risk fits any parameter."""
        return not self.risks

    @property
    def poisoned(self) -> dict[str, int]:
        """Name -> how many elements of its state a repair resets."""
        return {row.name: row.measured.poisoned for row in self.rows if row.measured.poisoned}

    def problems(self) -> tuple[str, ...]:
        """What can make the next update wrong, in words, the worst first."""
        return tuple(str(risk) for risk in self.risks if risk.breaks_update)

    def repair(self) -> int:
        """Reset the poisoned elements of the optimizer's state to 0, in place; all else keeps every bit.

        An element is poisoned if an entry of its state is not finite, or a second moment is negative. All of
        its entries that are understood are reset, also AMSGrad's maximum. Step counts stay, so bias
        correction is that of a late step, and the first update of such an element is
        lr (1 - beta1) / sqrt(1 - beta2), 3.2 lr with Adam's defaults, then it settles. Parameters are never
        invented: one that is not finite stays so.

        Returns:
            How many elements were reset.

        Raises:
            TypeError: the audit is of a state that cannot be written: use ``stablenum_jax.repair``.
        """
        if self._repair is None:
            raise TypeError(
                "this audit has no optimizer that can be changed in place: in JAX write "
                "opt_state = stablenum_jax.repair(opt_state, audit); an audit that was copied or loaded must "
                "be made anew."
            )
        return self._repair()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy or a pickle is the record alone, without the optimizer that it is of.
        return _rebuilt, (self.optimizer, self.rows, self.risks, self.notes)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, limit: int = 20) -> str:
        """A table of the ``limit`` riskiest parameters and the risks in words, as plain text."""
        from stablenum.diagnosis.audit.rendering import as_text

        return as_text(self, limit=limit)

    def __rich__(self) -> Any:
        from stablenum.diagnosis.audit.rendering import as_rich

        return as_rich(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON knows."""
        return {
            "optimizer": self.optimizer,
            "ok": self.ok,
            "risks": [risk.to_dict() for risk in self.risks],
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def _rebuilt(optimizer: str, rows: tuple[Row, ...], risks: tuple[Risk, ...], notes: tuple[str, ...]) -> Audit:
    return Audit(optimizer=optimizer, rows=rows, risks=risks, notes=notes)
