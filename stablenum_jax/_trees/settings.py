"""The settings of guards, kept on the host under the number of their parameters' names.

A state holds arrays only, so its log finds the settings here, as it finds the names.
"""

from __future__ import annotations

from stablenum.guard.config import GuardConfig

__all__ = ["known_settings", "register_settings"]

_SETTINGS: dict[int, GuardConfig] = {}


def register_settings(number: int, config: GuardConfig) -> None:
    """Remember the settings of the guard that was initialised last for parameters with these names."""
    _SETTINGS[number] = config


def known_settings(number: int) -> GuardConfig | None:
    """Return the settings registered under ``number``; None if this process has none."""
    return _SETTINGS.get(number)
