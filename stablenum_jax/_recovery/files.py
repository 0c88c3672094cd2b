"""A checkpoint of a pytree: what is no array as JSON, and the arrays beside it in one of the formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax

import stablenum
from stablenum.checkpoints.codec import Ranks, on_each
from stablenum.checkpoints.finiteness import NonFinite
from stablenum.checkpoints.structure import put_together, taken_apart
from stablenum.errors import CheckpointError
from stablenum_jax._recovery.finiteness import nonfinite
from stablenum_jax._recovery.trees import as_dicts, is_array, put_into

__all__ = ["Arrays", "TreeFolder"]

PyTree: TypeAlias = Any

_PLAIN = "state.json"


class Arrays(Protocol):
    """Writes and reads arrays by name.

    Attributes:
        name: the name of the format.
        on_all_ranks: whether all processes write their parts; else the first writes everything.
    """

    name: str
    on_all_ranks: bool

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the packages that write, beside JAX."""

    def write(self, folder: Path, arrays: Mapping[str, Any]) -> None:
        """Write arrays.

        Raises:
            OSError: a file cannot be written.
            ValueError: the format has no such dtype.
        """

    def read(self, folder: Path, like: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays; ``like`` has those that are wanted, with their shardings.

        Raises:
            OSError, CheckpointError: they cannot be read.
        """


class TreeFolder:
    """Writes a pytree: what is no array into ``state.json``, the arrays by one of the formats.

    Args:
        arrays: the format.
        ranks: the processes that write together.
    """

    def __init__(self, arrays: Arrays, ranks: Ranks) -> None:
        self.name = arrays.name
        self._arrays, self._ranks = arrays, ranks

    def versions(self) -> Mapping[str, str]:
        own = {"stablenum": stablenum.__version__, "jax": jax.__version__}
        return own | dict(self._arrays.versions())

    def write(self, folder: Path, state: PyTree) -> None:
        first = self._ranks.rank == 0

        def prepared() -> dict[str, Any]:
            plain, arrays = taken_apart(as_dicts(state), is_array)
            if first:
                (folder / _PLAIN).write_text(json.dumps(plain, allow_nan=False), encoding="utf-8")
            if not self._arrays.on_all_ranks:
                _check_whole(arrays, self.name)
            return arrays

        arrays = on_each(self._ranks, prepared)
        if self._arrays.on_all_ranks or first:
            self._arrays.write(folder, arrays)

    def read(self, folder: Path, like: PyTree) -> PyTree:
        wanted = taken_apart(as_dicts(like), is_array)[1]
        arrays = self._arrays.read(folder, wanted)
        try:
            plain = json.loads((folder / _PLAIN).read_text(encoding="utf-8"))
            nested = put_together(plain, arrays)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{_PLAIN} cannot be read: {error!r}") from error
        return put_into(like, nested)

    def nonfinite(self, state: PyTree) -> list[NonFinite]:
        return nonfinite(state)


def _check_whole(arrays: Mapping[str, Any], name: str) -> None:
    """Check that this process has the whole of every array.

    Raises:
        ValueError: one is spread over several processes.
    """
    for of, array in arrays.items():
        if isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated):
            raise ValueError(
                f"{of} is spread over several processes, and format={name!r} would save one part. "
                'Use format="orbax".'
            )
