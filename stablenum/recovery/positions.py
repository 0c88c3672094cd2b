"""Positions in the data: what follows next, and how a run takes up its data again at an earlier place.

Four kinds of data are known, by what they can do:

- loaders with ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``);
- loaders whose iterators have ``get_state`` and ``set_state`` (grain), or such an iterator itself;
- a function of the batch's number, from 0, which has no end;
- anything that can be iterated again and again (a list, a ``DataLoader``). It is taken up in the middle of an
  epoch by reading the epoch again from its beginning, with the random generators as they were then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from stablenum.errors import bad_type

__all__ = ["Generators", "Place", "Position", "position_of"]

_ALLOWED = (
    "a function of the batch's number, a loader with state_dict and load_state_dict, a loader whose "
    "iterators have get_state and set_state, or something that can be iterated again and again"
)


class Place(NamedTuple):
    """Which batch it was: the epoch, and its number in the epoch; both count from 0."""

    epoch: int
    batch: int


class Generators(Protocol):
    """The random generators of the process, which the order of the data may depend on."""

    def read(self) -> Any:
        """Return their states."""

    def write(self, states: Any) -> None:
        """Put states back."""


class Position(Protocol):
    """A place in the data."""

    def next(self) -> tuple[Place, Any]:
        """Return the next batch and where it was; a new epoch begins when the data end."""

    def state(self) -> dict[str, Any]:
        """Return what :meth:`go_to` needs to come back here."""

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Make the batch that followed ``state`` the next one."""


def position_of(data: Any, generators: Generators) -> Position:
    """Return the position before the first batch.

    Raises:
        TypeError: ``data`` is none of the kinds, or an iterator that cannot go back.
    """
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
        return _Epochs(data, _LoaderState(), generators)
    if hasattr(data, "get_state") and hasattr(data, "set_state"):
        return _Epochs(_Once(data), _IteratorState(generators), generators)
    if isinstance(data, Iterator):
        hint = "A generator cannot go back: give the data that it reads, or a function of the number."
        raise bad_type("data", _ALLOWED, data, hint=hint)
    if isinstance(data, Iterable):
        return _Epochs(data, _IteratorState(generators), generators)
    if callable(data):
        return _Numbered(data)
    raise bad_type("data", _ALLOWED, data)


class _Numbered:
    """A function of the batch's number."""

    def __init__(self, batch_at: Callable[[int], Any]) -> None:
        self._batch_at, self._number = batch_at, 0

    def next(self) -> tuple[Place, Any]:
        place = Place(0, self._number)
        batch = self._batch_at(self._number)
        self._number += 1
        return place, batch

    def state(self) -> dict[str, Any]:
        return {"number": self._number}

    def go_to(self, state: Mapping[str, Any]) -> None:
        self._number = state["number"]


class _Once:
    """An iterator that can be put back, as data of a single epoch."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self._iterator


class _Way(Protocol):
    """How one kind of data is put back into the middle of an epoch."""

    def begin(self, data: Any) -> Iterator[Any]: ...

    def state(self, data: Any, iterator: Iterator[Any]) -> dict[str, Any]: ...

    def continued(self, data: Any, state: Mapping[str, Any], read: int) -> Iterator[Any]: ...


class _Epochs:
    """Data that are iterated, epoch after epoch."""

    def __init__(self, data: Any, way: _Way, generators: Generators) -> None:
        self._data, self._way, self._generators = data, way, generators
        self._epoch, self._read = 0, 0
        self._iterator: Iterator[Any] | None = None

    def next(self) -> tuple[Place, Any]:
        if self._iterator is None:
            self._iterator = self._begin()
        for batch in self._iterator:
            place = Place(self._epoch, self._read)
            self._read += 1
            return place, batch
        if not self._read:
            raise ValueError("data must give at least one batch in an epoch; got none.")
        self._epoch, self._read, self._iterator = self._epoch + 1, 0, None
        return self.next()

    def state(self) -> dict[str, Any]:
        here = {"epoch": self._epoch, "read": self._read}
        if self._iterator is None:
            return here | {"own": _read_own(self._data)}
        return here | {"iterator": copy.deepcopy(self._way.state(self._data, self._iterator))}

    def go_to(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._read = state["epoch"], state["read"]
        if "own" in state:
            _write_own(self._data, state["own"])
            self._iterator = None
        else:
            self._tell_epoch()
            kept = copy.deepcopy(state["iterator"])
            now = (
                self._generators.read()
            )  # even a loader that saves its state may draw a seed for its workers
            self._iterator = self._way.continued(self._data, kept, self._read)
            self._generators.write(now)

    def _begin(self) -> Iterator[Any]:
        self._tell_epoch()
        return self._way.begin(self._data)

    def _tell_epoch(self) -> None:
        """Samplers of several ranks shuffle by the epoch's number, which they have to be given."""
        for owner in (self._data, getattr(self._data, "sampler", None)):
            tell = getattr(owner, "set_epoch", None)
            if tell is not None:
                tell(self._epoch)


class _LoaderState:
    def begin(self, data: Any) -> Iterator[Any]:
        return iter(data)

    def state(self, data: Any, iterator: Iterator[Any]) -> dict[str, Any]:
        return {"loader": data.state_dict(), "own": _read_own(data)}

    def continued(self, data: Any, state: Mapping[str, Any], read: int) -> Iterator[Any]:
        data.load_state_dict(state["loader"])
        iterator: Iterator[Any] = iter(data)
        _write_own(data, state["own"])  # from which the order of the next epoch follows
        return iterator


class _IteratorState:
    """Asks the iterator for its state, or reads the epoch again from its beginning if that has none."""

    def __init__(self, generators: Generators) -> None:
        self._generators = generators
        self._at_the_beginning: dict[str, Any] = {}

    def begin(self, data: Any) -> Iterator[Any]:
        self._at_the_beginning = {"process": self._generators.read(), "own": _read_own(data)}
        return iter(data)

    def state(self, data: Any, iterator: Any) -> dict[str, Any]:
        if hasattr(iterator, "get_state") and hasattr(iterator, "set_state"):
            return {"state": iterator.get_state()}
        return self._at_the_beginning

    def continued(self, data: Any, state: Mapping[str, Any], read: int) -> Iterator[Any]:
        if "state" in state:
            iterator: Any = iter(data)
            iterator.set_state(state["state"])
            return iterator  # type: ignore[no-any-return]
        self._generators.write(state["process"])
        _write_own(data, state["own"])
        again = self.begin(data)
        for _ in range(read):
            next(again)
        return again


def _own_generators(data: Any) -> list[Any]:
    """Return the generators that a loader or its sampler shuffles with."""
    batches = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), getattr(batches, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    known = [g for g in found if hasattr(g, "get_state") and hasattr(g, "set_state")]
    return list({id(g): g for g in known}.values())


def _read_own(data: Any) -> list[Any]:
    return [generator.get_state() for generator in _own_generators(data)]


def _write_own(data: Any, states: list[Any]) -> None:
    for generator, state in zip(_own_generators(data), states, strict=True):
        generator.set_state(state)
