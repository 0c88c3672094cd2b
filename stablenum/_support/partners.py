"""Importing what need not be there: the error of a partner or an extra that is missing, or too old."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["imported", "of_extra"]


def imported(needed_by: str, partners: Mapping[str, str], oldest: str) -> Any:
    """Import the first module that is installed.

    Args:
        needed_by: the module of the integration.
        partners: for each module, in order of preference, the name by which it is installed.
        oldest: the oldest version with which the integration works.

    Raises:
        ImportError: none is installed, or the one found is older. The message says what to install.

    Example:
        >>> imported("mine", {"nowhere": "partner"}, "2.6")
        Traceback (most recent call last):
        ImportError: mine needs partner 2.6 or newer: pip install 'partner>=2.6'
    """
    for module, distribution in partners.items():
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and not module.startswith(error.name):
                raise  # the partner is there, but something that it needs itself is not
            continue
        if _numbers(found.__version__) < _numbers(oldest):
            raise _missing(needed_by, distribution, oldest, f"; found {found.__version__}")
        return found
    raise _missing(needed_by, next(iter(partners.values())), oldest, "")


def of_extra(needed_by: str, module: str, distribution: str) -> Any:
    """Import a module that one of stablenum's extras installs.

    Args:
        needed_by: what needs it.
        module: the module.
        distribution: the name by which it is installed.

    Raises:
        ImportError: it is not installed. The message says what to install.

    Example:
        >>> of_extra("plot", "nowhere", "drawing")
        Traceback (most recent call last):
        ImportError: plot needs drawing: pip install drawing
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # it is there, but something that it needs itself is not
        raise ImportError(
            f"{needed_by} needs {distribution}: pip install {distribution}", name=module
        ) from error


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _missing(needed_by: str, distribution: str, oldest: str, found: str) -> ImportError:
    install = f"pip install '{distribution}>={oldest}'"
    return ImportError(
        f"{needed_by} needs {distribution} {oldest} or newer{found}: {install}", name=needed_by
    )
