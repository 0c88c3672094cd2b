"""Where a parameter of the right program comes from, and in which layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

__all__ = ["Added", "Cut", "Gathered", "Joined", "Origin", "Piece", "Said", "Source", "elements_of"]


class Source(Protocol):
    """Where a parameter of the right side comes from.

    Attributes:
        pieces: what is taken of the left side.
        names: the parameters of the left side.
        shape: that of the right parameter.
        invertible: whether gradients and updates of the two sides correspond as the parameters do.
        ways: the permutations of the axes that fit, the one in use first; empty if there is no choice.
    """

    @property
    def pieces(self) -> tuple[Piece, ...]: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def invertible(self) -> bool: ...
    @property
    def ways(self) -> tuple[tuple[int, ...], ...]: ...

    def of(self, arrays: Mapping[str, Any]) -> Any:
        """Return the right side's array, given the left side's."""

    def laid(self, way: tuple[int, ...]) -> Source:
        """Return the source with its axes permuted in another way that fits."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The entries from ``begin`` to ``end`` along an axis: the ``part``-th of ``count`` parts.

    With ``layer`` the axis goes away: it counts the layers of a stack.
    """

    begin: int
    end: int
    axis: int
    part: int
    count: int
    layer: bool = False

    def of(self, x: Any) -> Any:
        """Return what is left of an array."""
        return x.take(self.begin if self.layer else range(self.begin, self.end), axis=self.axis)

    def __str__(self) -> str:
        return f"{'layer' if self.layer else 'part'} {self.part + 1} of {self.count}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter of the left side, or what one or more cuts leave of it."""

    name: str
    cuts: tuple[Cut, ...] = ()

    def of(self, arrays: Mapping[str, Any]) -> Any:
        """Return the piece of the parameter's array."""
        x = np.asarray(arrays[self.name])
        for cut in self.cuts:
            x = cut.of(x)
        return x

    def lies_in(self, other: Piece) -> bool:
        """Return whether this is a piece of another one, or all of it."""
        return self.name == other.name and self.cuts[: len(other.cuts)] == other.cuts

    def __str__(self) -> str:
        return ", ".join([self.name, *map(str, self.cuts)])


@dataclass(frozen=True, slots=True)
class Origin:
    """A piece of a parameter of the left side, in another layout.

    Attributes:
        piece: what is taken.
        shape: that of the right parameter.
        axes: the permutation of the axes before the reshape.
        others: further permutations that fit.
    """

    piece: Piece
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The one piece."""
        return (self.piece,)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameter of the left side."""
        return (self.piece.name,)

    @property
    def invertible(self) -> bool:
        """Always."""
        return True

    @property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """The permutations that fit, the one in use first."""
        return (self.axes, *self.others)

    def laid(self, way: tuple[int, ...]) -> Origin:
        """Return the origin with its axes permuted in another way that fits."""
        if way not in self.others:
            return self
        return replace(self, axes=way, others=tuple(w for w in self.ways if w != way))

    def of(self, arrays: Mapping[str, Any]) -> Any:
        """Return the right side's array, given the left side's."""
        x = self.piece.of(arrays)
        return (x.transpose(self.axes) if len(self.axes) == x.ndim else x).reshape(self.shape)

    def __str__(self) -> str:
        return f"{self.piece}{_layout(self.axes)}"


@dataclass(frozen=True, slots=True)
class Joined:
    """Several sources put together along an axis of the right parameter."""

    parts: tuple[Source, ...]
    shape: tuple[int, ...]
    axis: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Those of all parts."""
        return tuple(piece for part in self.parts for piece in part.pieces)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the left side."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    @property
    def invertible(self) -> bool:
        """Whether gradients and updates correspond as the parameters do."""
        return all(part.invertible for part in self.parts)

    @property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """The permutations that fit every part, the one in use first."""
        return tuple(w for w in self.parts[0].ways if all(w in part.ways for part in self.parts))

    def laid(self, way: tuple[int, ...]) -> Joined:
        """Return the parts with their axes permuted in another way that fits."""
        return replace(self, parts=tuple(part.laid(way) for part in self.parts))

    def of(self, arrays: Mapping[str, Any]) -> Any:
        """Return the right side's array, given the left side's."""
        shape = [-1 if i == self.axis else n for i, n in enumerate(self.shape)]
        return np.concatenate([part.of(arrays).reshape(shape) for part in self.parts], axis=self.axis)

    def __str__(self) -> str:
        ways = {getattr(part, "axes", None) for part in self.parts}
        same = len(ways) == 1 and all(isinstance(part, Origin) for part in self.parts)
        said = [str(part.piece) if isinstance(part, Origin) and same else str(part) for part in self.parts]
        return ", ".join(said) + (_layout(ways.pop() or ()) if same else "")


@dataclass(frozen=True, slots=True)
class Added:
    """The sum of two sources, such as the two biases of a recurrent layer of PyTorch."""

    parts: tuple[Source, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Those of all parts."""
        return tuple(piece for part in self.parts for piece in part.pieces)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the left side."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the right parameter."""
        return self.parts[0].shape

    @property
    def invertible(self) -> bool:
        """Never: a sum's update is the sum of two updates only without an optimizer that rescales."""
        return False

    @property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """None to choose from."""
        return ()

    def laid(self, way: tuple[int, ...]) -> Added:
        """Return the sum as it is."""
        return self

    def of(self, arrays: Mapping[str, Any]) -> Any:
        """Return the right side's array, given the left side's."""
        return np.asarray(sum(part.of(arrays) for part in self.parts))

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts))


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
    def pieces(self) -> tuple[Piece, ...]:
        """The parameters, whole."""
        return tuple(Piece(name) for name in self.names)

    @property
    def invertible(self) -> bool:
        """Whether gradients and updates correspond as the parameters do."""
        return True

    @property
    def ways(self) -> tuple[tuple[int, ...], ...]:
        """None to choose from."""
        return ()

    def laid(self, way: tuple[int, ...]) -> Gathered:
        """Return the elements as they are."""
        return self

    def of(self, arrays: Mapping[str, Any]) -> Any:
        """Return the right side's array, given the left side's."""
        whole = np.concatenate([np.ravel(arrays[name]) for name in self.names])
        return whole[self.index].reshape(self.shape)

    def __str__(self) -> str:
        return f"{', '.join(self.names)}, by the function given as weights"


class Said(str):
    """What a report says of where a parameter comes from, and the source itself, so that the map of a report
    can be given again."""

    __slots__ = ("source",)
    source: Source

    def __new__(cls, source: Source) -> Said:
        """Make the words."""
        made = super().__new__(cls, str(source))
        made.source = source
        return made


def elements_of(source: Source, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return, for each element of the right parameter, in order, which of the source's names it comes from
    and its place in that parameter. The source must be invertible."""
    ends = np.cumsum([0, *(np.size(arrays[name]) for name in source.names)])
    numbers = {
        name: np.arange(begin, begin + np.size(arrays[name])).reshape(np.shape(arrays[name]))
        for name, begin in zip(source.names, ends, strict=False)
    }
    places = np.ravel(source.of(numbers))
    of = np.searchsorted(ends, places, side="right") - 1
    return of, places - ends[of]


def _layout(axes: tuple[int, ...]) -> str:
    if axes == tuple(range(len(axes))):
        return ""
    return ", transposed" if len(axes) == 2 else f", axes {axes}"
