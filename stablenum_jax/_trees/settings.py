"""The settings of guards, kept on the host under the number of their parameters' names.

A state holds arrays only, so its log finds the settings here, as it finds the names.
"""

from __future__ import annotations

from stablenum.guard.config import GuardConfig

__all__ = ["known_settings", "logs_skips", "register_settings"]

_SETTINGS: dict[int, GuardConfig] = {}
_SILENT: set[int] = set()


def register_settings(number: int, config: GuardConfig, *, log_skips: bool = True) -> None:
    """Remember the settings of the guard that was initialised last for parameters with these names."""
    _SETTINGS[number] = config
    (_SILENT.discard if log_skips else _SILENT.add)(number)


def known_settings(number: int) -> GuardConfig | None:
    """Return the settings registered under ``number``; None if this process has none."""
    return _SETTINGS.get(number)


def logs_skips(number: int) -> bool:
    """Return whether skipped steps of the guard registered under ``number`` are logged."""
    return number not in _SILENT
