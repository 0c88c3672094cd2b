"""The sizes of a state's buffers after each step, measured without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from stablenum.recovery.buffers import Noted, Part, is_judged, sizes
from stablenum_jax._recovery.findings import buffers_in, devices_of, norms

__all__ = ["BufferSizes"]

PyTree: TypeAlias = Any

# As flax names running statistics. A "mean" is one beside a "var".
_MEAN, _VARIANCE = "mean", "var"


class _Place(NamedTuple):
    """Where a buffer is among the leaves of a state."""

    name: str  # of the buffer, or of the layer whose running statistics it belongs to
    part: Part
    elements: int
    leaf: int


class _Measured(NamedTuple):
    """The norms of some buffers, still on their devices."""

    places: list[_Place]
    norms: jax.Array


class BufferSizes:
    """Measures the floating-point arrays of states that are neither parameters nor an optimizer's."""

    def __init__(self) -> None:
        self._structure: Any = None
        self._places: list[list[_Place]] = []  # those on the same devices together
        self._noted: list[tuple[int, list[_Measured]]] = []

    def note(self, step: int, state: PyTree) -> None:
        """Measure after a step; the device is not waited for."""
        leaves, structure = jax.tree.flatten(state)
        # To find the names takes longer than the norms. A structure cannot be compared with None.
        if self._structure is None or structure != self._structure:
            self._structure, self._places = structure, _places(state, leaves)
        measured = [
            _Measured(together, norms([leaves[place.leaf] for place in together]))
            for together in self._places
        ]
        self._noted.append((step, measured))

    def noted(self) -> list[Noted]:
        """Return what was measured since the last call."""
        noted, self._noted = self._noted, []
        return [
            Noted(
                step,
                sizes(
                    (place.name, place.part, place.elements, norm)
                    for together in measured
                    for place, norm in zip(together.places, np.asarray(together.norms).tolist(), strict=True)
                ),
            )
            for step, measured in noted
        ]


def _places(state: PyTree, leaves: Sequence[Any]) -> list[list[_Place]]:
    index_of = {id(leaf): i for i, leaf in enumerate(leaves)}
    found = buffers_in(state)
    names = {name for name, _ in found}
    on: dict[Any, list[_Place]] = {}
    for name, leaf in found:
        layer, part = _layer_and_part(name, names)
        if is_judged(leaf.shape, part):
            on.setdefault(devices_of(leaf), []).append(_Place(layer, part, leaf.size, index_of[id(leaf)]))
    return list(on.values())


def _layer_and_part(name: str, names: set[str]) -> tuple[str, Part]:
    layer, _, own = name.rpartition(".")
    if own == _VARIANCE:
        return layer, Part.VARIANCE
    if own == _MEAN and f"{layer}.{_VARIANCE}".lstrip(".") in names:
        return layer, Part.MEAN
    return name, Part.WHOLE
