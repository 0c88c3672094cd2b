"""The row of one parameter in an audit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stablenum.diagnosis.audit.measured import Measured
from stablenum.diagnosis.audit.update_formulas import UpdateFormula

__all__ = ["Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The findings of an audit for one parameter; None for values that are not known.

    Attributes:
        name: the parameter's name.
        shape: the parameter's shape.
        dtype: the parameter's dtype.
        state_dtypes: the format of each entry of the state, by name.
        law: the optimizer's update formula and its hyperparameters.
        measured: counts and extremes.
        others: for each entry of the state whose meaning is unknown, or whose shape is not the parameter's,
            the number of elements that are not finite.
        second_dtype: the format of the second moment, in which the denominator is computed.
        eps_lost: whether eps is 0 in that format.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    state_dtypes: Mapping[str, str] = field(default_factory=dict)
    law: UpdateFormula = field(default_factory=UpdateFormula)
    measured: Measured = field(default_factory=Measured)
    others: Mapping[str, int] = field(default_factory=dict)
    second_dtype: str | None = None
    eps_lost: bool | None = None

    @property
    def update_rms(self) -> float | None:
        """The RMS of the update that follows from the moments at the current learning rate."""
        return self.measured.update_rms

    @property
    def vanished(self) -> float | None:
        """The fraction of the elements with v == 0 and m != 0."""
        return self._fraction(self.measured.vanished, self.measured.size)

    @property
    def below_eps(self) -> float | None:
        """The fraction of the elements that have had a gradient for which sqrt(v) < eps."""
        return self._fraction(self.measured.below_eps, self.measured.alive)

    @property
    def stalled(self) -> float | None:
        """The fraction of the elements with a nonzero update for which w + dw == w."""
        return self._fraction(self.measured.stalled, self.measured.moved)

    @staticmethod
    def _fraction(part: int | None, whole: int | None) -> float | None:
        if part is None or whole is None:
            return None
        return part / whole if whole else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; None for a number that is not known or not finite."""
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
