"""Positions in the data: every kind goes on from an earlier place with the very same batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from stablenum.recovery.positions import Place, Position, position_of


class PythonsGenerator:
    """The process's generators, as an adapter hands them to the core."""

    def read(self) -> Any:
        return random.getstate()

    def write(self, states: Any) -> None:
        random.setstate(states)


class OwnGenerator(random.Random):
    get_state, set_state = random.Random.getstate, random.Random.setstate


class Shuffled:
    """As a DataLoader: shuffles at the beginning of each epoch, and augments with the process's generator."""

    def __init__(self, generator: OwnGenerator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        source = self.generator or random
        order = source.sample(range(7), 7)
        return ((index, random.random()) for index in order)


class Stateful:
    """As torchdata's StatefulDataLoader: the loader is saved, and its next iterator goes on from there."""

    def __init__(self) -> None:
        self.at, self.loaded = 0, False

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        while self.at < 7:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": [self.at]}  # nested, so that a shallow copy would change

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.loaded = state["at"][0], True


class SeedingStateful(Stateful):
    """As torch's loaders: each iterator draws a seed for its workers from the process's generator."""

    def __iter__(self) -> Iterator[int]:
        random.random()
        return super().__iter__()


class GrainIterator:
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> GrainIterator:
        return self

    def __next__(self) -> int:
        if self.at == 7:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def get_state(self) -> bytes:
        return bytes([self.at])

    def set_state(self, state: bytes) -> None:
        self.at = state[0]


class Grain:
    def __iter__(self) -> GrainIterator:
        return GrainIterator()


KINDS = {
    "function": lambda: lambda n: n * n,
    "list": lambda: list("abcdefg"),
    "shuffled": Shuffled,
    "shuffled by its own generator": lambda: Shuffled(OwnGenerator(3)),
    "stateful loader": Stateful,
    "stateful loader that draws a seed": SeedingStateful,
    "grain": Grain,
}


def taken(position: Position, count: int) -> list[Any]:
    return [position.next() for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 3, 6, 7, 8, 14, 17])
@pytest.mark.parametrize("after", [0, 2, 11])
def test_data_go_on_from_an_earlier_place_with_the_same_batches(kind: str, before: int, after: int) -> None:
    random.seed(5)
    position = position_of(KINDS[kind](), PythonsGenerator())
    taken(position, before)
    state, generators = position.state(), random.getstate()
    expected = taken(position, 20)
    for _ in range(2):  # a state may be used more than once
        taken(position, after)
        random.setstate(generators)  # as the adapter does with everything it captured
        position.go_to(state)
        assert random.getstate() == generators  # the model's random numbers follow from here
        assert taken(position, 20) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_goes_on_with_the_same_batches(kind: str) -> None:
    random.seed(5)
    position = position_of(KINDS[kind](), PythonsGenerator())
    taken(position, 10)
    state, generators = position.state(), random.getstate()
    expected = taken(position, 20)
    random.seed(99)
    other = position_of(KINDS[kind](), PythonsGenerator())
    random.setstate(generators)
    other.go_to(state)
    assert taken(other, 20) == expected


def test_places_count_epochs_and_batches() -> None:
    position = position_of(["a", "b"], PythonsGenerator())
    assert [place for place, _ in taken(position, 3)] == [Place(0, 0), Place(0, 1), Place(1, 0)]
    assert position_of(lambda n: n, PythonsGenerator()).next() == (Place(0, 0), 0)


def test_samplers_are_given_the_epoch_before_it_begins_and_after_going_back() -> None:
    class Sampler:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    class Loader:
        sampler = Sampler()

        def __iter__(self) -> Iterator[Any]:
            return iter([(self.sampler.epoch, i) for i in range(3)])

    position = position_of(Loader(), PythonsGenerator())
    taken(position, 2)
    state = position.state()
    expected = taken(position, 5)
    assert expected[1][1] == (1, 0)
    position.go_to(state)
    assert taken(position, 5) == expected


def test_nothing_is_read_before_the_first_batch() -> None:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError  # it would start workers, and draw a seed for them

    position_of(Loader(), PythonsGenerator())


def test_data_that_cannot_go_back_are_refused() -> None:
    with pytest.raises(TypeError, match=r"data must be a function of .* got generator. A generator cannot"):
        position_of((i for i in range(3)), PythonsGenerator())
    with pytest.raises(TypeError, match=r"data must be a function of .* got int"):
        position_of(3, PythonsGenerator())


def test_data_without_a_batch_are_refused_instead_of_being_read_forever() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        position_of([], PythonsGenerator()).next()
