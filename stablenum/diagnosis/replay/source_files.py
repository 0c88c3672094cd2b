"""Tell a user's files from those of frameworks, wherever these are installed."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec

__all__ = ["SITE", "STANDARD", "folders_of"]

# The folders of the standard library, and of installed packages (which may lie inside them).
STANDARD = tuple({sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib")})
SITE = tuple({sysconfig.get_paths()[key] + os.sep for key in ("purelib", "platlib")})


def folders_of(packages: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of those packages that are installed, each with a separator at the end.

    A package may be in an environment that this one extends, in a user's own folder, or on ``PYTHONPATH``.
    None of the packages is imported.

    Example:
        >>> import os, stablenum
        >>> folders_of(["stablenum", "no_such_package"]) == (os.path.dirname(stablenum.__file__) + os.sep,)
        True
    """
    specs = (find_spec(package) for package in packages)
    found = (place for spec in specs if spec for place in spec.submodule_search_locations or ())
    return tuple(os.path.abspath(place) + os.sep for place in found)
