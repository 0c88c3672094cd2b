"""Where a parameter of the right program comes from, and in which layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Gathered", "Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a parameter of the right side comes from.

    Attributes:
        names: the parameters of the left side; several are put together along ``axis`` of the result,
            stacked if ``stacked``, or added if ``axis`` is None.
        part: (i, n, axis) for the i-th of n equal parts of the left parameter.
        axes: the permutation of the axes before the reshape.
        shape: that of the right parameter.
        others: further permutations that fit.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    part: tuple[int, int, int] | None = None
    axis: int | None = None
    stacked: bool = False
    others: tuple[tuple[int, ...], ...] = ()

    @property
    def invertible(self) -> bool:
        """Whether gradients and updates of the two sides correspond as the parameters do: those of a sum do
        not."""
        return len(self.names) == 1 or self.stacked or self.axis is not None

    def of(self, arrays: Mapping[str, Any]) -> Any:
        """Return the right side's array, given the left side's."""
        made = [self._one(arrays[name]) for name in self.names]
        if len(made) == 1:
            return made[0].reshape(self.shape)
        if self.stacked:
            return np.stack(made).reshape(self.shape)
        if self.axis is None:
            return np.asarray(sum(made)).reshape(self.shape)
        piece = [n // len(made) if i == self.axis else n for i, n in enumerate(self.shape)]
        return np.concatenate([x.reshape(piece) for x in made], axis=self.axis)

    def _one(self, array: Any) -> Any:
        x = np.asarray(array)
        if self.part is not None:
            i, n, axis = self.part
            x = np.split(x, n, axis=axis)[i]
        return x.transpose(self.axes) if len(self.axes) == x.ndim else x

    def __str__(self) -> str:
        said = (" + " if self.axis is None and not self.stacked else ", ").join(self.names)
        if self.stacked:
            said = f"{said}, stacked"
        if self.part is not None:
            said += f", part {self.part[0] + 1} of {self.part[1]}"
        if self.axes != tuple(range(len(self.axes))):
            said += ", transposed" if len(self.axes) == 2 else f", axes {self.axes}"
        return said


@dataclass(frozen=True, slots=True)
class Gathered:
    """The elements of parameters of the left side from which a function of the user's makes one of the right.

    Attributes:
        names: the parameters of the left side.
        shape: that of the right parameter.
        index: for each element, its place in the left parameters one after another.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    index: Any

    @property
    def invertible(self) -> bool:
        """Whether gradients and updates correspond as the parameters do."""
        return True

    def of(self, arrays: Mapping[str, Any]) -> Any:
        """Return the right side's array, given the left side's."""
        whole = np.concatenate([np.ravel(arrays[name]) for name in self.names])
        return whole[self.index].reshape(self.shape)

    def __str__(self) -> str:
        return f"{', '.join(self.names)}, by the function given as weights"
