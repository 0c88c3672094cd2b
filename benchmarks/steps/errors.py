"""Why a benchmark stops without a result."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

__all__ = ["BenchmarkError", "MissingPeerError", "NoisyError", "WrongResultError", "require"]


class BenchmarkError(Exception):
    """A benchmark has no trustworthy result; the process exits with ``exit_code``."""

    exit_code = 1


class MissingPeerError(BenchmarkError):
    """A package to compare with is not installed."""


class WrongResultError(BenchmarkError):
    """A variant did not compute what its name says."""


class NoisyError(BenchmarkError):
    """The timings vary too much to be compared."""

    exit_code = 3


def require(packages: Sequence[str]) -> None:
    """Check that all peers can be imported.

    Raises:
        MissingPeerError: a peer cannot be imported.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPeerError(
            f"peers to measure against are not installed: {', '.join(missing)}. Install them with "
            f"`python -m pip install {' '.join(missing)}`; nothing is measured without them."
        )
