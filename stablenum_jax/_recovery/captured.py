"""A captured state: copies of its leaves, and the random generators of the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from stablenum.errors import CheckpointError
from stablenum_jax._recovery.copies import Copy, copies_of, copy_from, is_data
from stablenum_jax._recovery.states import flattened, names_of, put_back

__all__ = ["Captured"]

PyTree: TypeAlias = Any


class Captured(NamedTuple):
    """A captured state.

    Attributes:
        leaves: copies of the leaves, which may still be under way.
        structure: the structure of the state.
        generators: the states of the random generators, as plain values and arrays.
    """

    leaves: list[Copy]
    structure: Any
    generators: dict[str, Any]

    @classmethod
    def of(cls, state: PyTree, generators: dict[str, Any]) -> Captured:
        """Start copying a state."""
        leaves, structure = flattened(state)
        return cls(copies_of(leaves), structure, generators)

    def put_into(self, state: PyTree) -> PyTree:
        """Return the captured state; the nnx objects of the present one are changed in place."""
        return put_back(state, [copy.again() for copy in self.leaves], self.structure)

    def to_plain(self) -> dict[str, Any]:
        """Return plain values and NumPy arrays."""
        named = zip(names_of(self.structure), (copy.to_plain() for copy in self.leaves), strict=True)
        leaves = {name: plain for name, plain in named if plain is not None}
        return {"leaves": leaves, "generators": self.generators}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], like: PyTree) -> Captured:
        """Return what :meth:`to_plain` described.

        Args:
            plain: what it returned.
            like: a state of the same training, which gives structure and shardings.

        Raises:
            CheckpointError: it is the state of another training.
        """
        leaves, structure = flattened(like)
        saved = dict(plain["leaves"])
        copies = [
            _copy(name, leaf, saved.pop(name, None))
            for name, leaf in zip(names_of(structure), leaves, strict=True)
        ]
        if saved:
            raise CheckpointError(f"it has {next(iter(saved))}, which is not in this state")
        return cls(copies, structure, plain["generators"])


def _copy(name: str, leaf: Any, saved: Any) -> Copy:
    if saved is None and is_data(leaf):
        raise CheckpointError(f"{name} is not in it")
    try:
        return copy_from(saved, leaf)
    except ValueError as error:
        raise CheckpointError(f"{name} does not fit: {error}") from error
