"""What an adapter supplies for a format, and what several ranks need to act as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stablenum.checkpoints.finiteness import NonFinite
from stablenum.errors import CheckpointError

__all__ = ["ALONE", "Codec", "Ranks", "on_all", "on_each"]

T = TypeVar("T")


class Codec(Protocol):
    """One format of checkpoints.

    Attributes:
        name: how manifests name the format.
    """

    name: str

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the packages that write the format, by name."""

    def write(self, folder: Path, state: Any) -> None:
        """Write a state into an empty folder; with several ranks, each rank its part.

        Raises:
            OSError: a file cannot be written.
            TypeError, ValueError: the format cannot hold the state, or could not read it back.
        """

    def read(self, folder: Path, like: Any) -> Any:
        """Return what :meth:`write` wrote, in new memory.

        Args:
            folder: a checkpoint whose files have been verified.
            like: what the state is loaded into. It is not changed.

        Raises:
            OSError, CheckpointError: the checkpoint cannot be read.
        """

    def nonfinite(self, state: Any) -> Sequence[NonFinite]:
        """Return the entries that are not finite, of a state or of what :meth:`read` returned."""


class Ranks(Protocol):
    """The processes that save and load together.

    Attributes:
        rank: this process's number, from 0.
    """

    rank: int

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks."""


class _Alone:
    """A process that saves by itself."""

    rank = 0

    def gather(self, value: Any) -> list[Any]:
        return [value]


ALONE: Ranks = _Alone()


def on_all(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Run an action on every rank and return all results; if it fails on one rank, raise on all.

    Raises:
        Exception: on a rank that failed, its own error.
        OSError, CheckpointError: on the others, with the number of the first rank that failed. It is an
            OSError only if all failures are.

    Example:
        >>> on_all(ALONE, lambda: 3)
        [3]
    """
    return ranks.gather(on_each(ranks, action))


def on_each(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run an action on every rank and return this rank's result, which is not sent to others; if it fails on
    one rank, raise on all, as :func:`on_all` does."""
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(action())
    except Exception as error:  # noqa: BLE001 - raised below, when the other ranks know of it
        failure = error
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    reports = ranks.gather((told, isinstance(failure, OSError)))
    failed = {rank: report for rank, report in enumerate(reports) if report[0] is not None}
    on_disk = all(of_os for _, of_os in failed.values())
    if failure is not None and isinstance(failure, OSError) == on_disk:
        raise failure
    for rank, (text, of_os) in failed.items():
        if of_os == on_disk:
            raise (OSError if on_disk else CheckpointError)(f"rank {rank} failed: {text}")
    return result[0]
