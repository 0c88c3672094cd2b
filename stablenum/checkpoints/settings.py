"""The settings of a folder of checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stablenum._support.settings_checks import check_choice, check_int
from stablenum.errors import bad_field, bad_type

__all__ = ["StoreSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """How checkpoints are saved and kept.

    Args:
        keep: how many are kept; None for all.
        on_poisoned: ``"refuse"`` raises an error for a state that is not finite; ``"set aside"`` writes it as
            a post-mortem, which is never loaded.
        on_error: ``"raise"`` raises an error if a checkpoint cannot be written; ``"go on"`` logs it.
        allow: patterns, as in file names, of entries that may be not finite.

    Raises:
        TypeError, ValueError: a setting is not allowed; the message names it.
    """

    keep: int | None = 3
    on_poisoned: Literal["refuse", "set aside"] = "refuse"
    on_error: Literal["raise", "go on"] = "raise"
    allow: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.keep is not None:
            check_int("keep", self.keep, at_least=1)
        check_choice("on_poisoned", self.on_poisoned, ("refuse", "set aside"))
        check_choice("on_error", self.on_error, ("raise", "go on"))
        if isinstance(self.allow, str):
            raise bad_field("allow", f"a sequence of patterns, such as ({self.allow!r},)", self.allow)
        if not all(isinstance(pattern, str) for pattern in self.allow):
            raise bad_type("allow", "a sequence of strings", self.allow)
        object.__setattr__(self, "allow", tuple(self.allow))

    def fields(self) -> dict[str, object]:
        """Return the settings by name, for the line that shows a folder of checkpoints."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
