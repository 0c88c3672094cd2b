"""The row of one parameter in an audit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stablenum.diagnosis.audit.measured import Measured
from stablenum.diagnosis.audit.update_formulas import Law

__all__ = ["Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The findings of an audit for one parameter; None for values that are not known.

    Attributes:
        name: the parameter's name.
        shape, dtype: the parameter's.
        state_dtypes: name of a state entry -> its format.
        law: the optimizer's rule with its numbers.
        measured: counts and extremes.
        others: name of a state entry of unknown meaning, or of another shape than the parameter's -> how
            many of its elements are not finite.
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
        """RMS of the update from the moments at the current learning rate."""
        return self.measured.update_rms

    @property
    def vanished(self) -> float | None:
        """The fraction with v == 0 and m != 0."""
        return self._fraction(self.measured.vanished, self.measured.size)

    @property
    def below_eps(self) -> float | None:
        """The fraction with sqrt(v) < eps, of the elements that have had a gradient."""
        return self._fraction(self.measured.below_eps, self.measured.alive)

    @property
    def stalled(self) -> float | None:
        """The fraction with w + dw == w, of the elements whose update is not 0."""
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
