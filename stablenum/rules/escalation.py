"""Escalation: after several non-finite steps in a row, compute in the next wider format for a while."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from stablenum._support.settings_checks import check_field
from stablenum.arrays import at_least
from stablenum.errors import bad_field
from stablenum.precision.policy import parse_format, wider

__all__ = ["EscalatePrecision", "EscalationState"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


class EscalationState(NamedTuple):
    """The state that the rule carries from step to step.

    Attributes:
        level: () int32, how many formats wider than its policy the next step computes.
        bad: () int32, the number of non-finite steps in a row at this level.
        left: () int32, the number of good steps still to take at this level before it falls by one.
    """

    level: Array
    bad: Array
    left: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class EscalatePrecision:
    """After ``after`` non-finite steps in a row, compute in the next wider format for a while.

    ``formats`` lists the formats, for example float8 -> bfloat16 -> float32 or float16 -> float32. After
    ``for_steps`` good steps in a wider format, the rule returns to the previous format; after ``after``
    non-finite steps in a row, it goes on to the next one. In the widest format, non-finite steps are only
    skipped.

    Args:
        after: the number of non-finite steps in a row before the rule goes on to the next format.
        for_steps: the number of good steps in a wider format before the rule returns to the previous one.
        formats: two or more formats, beginning with the policy's own, each wider in range than the one
            before.

    Raises:
        ValueError: a field is out of its range, or a format is not wider than the one before.

    Example:
        >>> EscalatePrecision(after=3, for_steps=100).formats
        ('float16', 'float32')
    """

    after: int = 3
    for_steps: int = 100
    formats: tuple[str, ...] = ("float16", "float32")

    def __post_init__(self) -> None:
        check_field(self, "after", whole=True, at_least=1)
        check_field(self, "for_steps", whole=True, at_least=1)
        given = self.formats
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) < 2:
            raise bad_field("EscalatePrecision.formats", "two or more formats, from narrow to wide", given)
        names = tuple(parse_format(name) for name in given)
        if any(wider(a, b) == a for a, b in itertools.pairwise(names)):
            raise bad_field("EscalatePrecision.formats", "formats that increase in range", given)
        object.__setattr__(self, "formats", names)

    def check_begins_with(self, compute: str) -> None:
        """Check that the policy computes in the first of ``formats``.

        Args:
            compute: the format that the policy computes in.

        Raises:
            ValueError: ``compute`` is not the first of ``formats``.

        Example:
            >>> EscalatePrecision(formats=("bf16", "f32")).check_begins_with("bfloat16")
        """
        if self.formats[0] != compute:
            allowed = f"formats that begin with the policy's own, {compute}"
            raise bad_field("EscalatePrecision.formats", allowed, self.formats)

    def init(self, *, xp: Namespace, device: Any = None) -> EscalationState:
        """Return the state before the first step, at the level of the policy's own format."""
        return EscalationState(*(xp.asarray(0, dtype=xp.int32, device=device) for _ in range(3)))

    def update(self, state: EscalationState, *, finite: Array, xp: Namespace) -> EscalationState:
        """Return the state after one step.

        Args:
            state: the state before.
            finite: () bool, whether the loss and the gradients of the step were finite.
            xp: the array namespace.
        """
        zero, top = xp.zeros_like(state.level), len(self.formats) - 1
        bad = xp.where(finite, zero, state.bad + 1)
        rise = (bad >= self.after) & (state.level < top)
        left = xp.where(finite, at_least(state.left - 1, 0, xp=xp), xp.full_like(state.left, self.for_steps))
        fall = finite & (state.level > 0) & (left == 0)
        level = xp.where(rise, state.level + 1, xp.where(fall, state.level - 1, state.level))
        begins = rise | fall
        return EscalationState(
            level=level,
            bad=xp.where(begins, zero, bad),
            left=xp.where(begins & (level > 0), xp.full_like(left, self.for_steps), left),
        )
