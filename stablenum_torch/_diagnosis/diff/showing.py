"""Show the values of a tape once more, from one of them on."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stablenum.diagnosis.diff.sides.play import Visit
from stablenum.diagnosis.diff.sides.resume_points import Given, Stand, Stands
from stablenum.diagnosis.replay.trace import Step, Value
from stablenum_torch._diagnosis.diff.player import Player, evaluating
from stablenum_torch._diagnosis.diff.tape import Tape, last_uses
from stablenum_torch._diagnosis.replay.schemas import Operation
from stablenum_torch._diagnosis.replay.tensor_memory import Storage

__all__ = ["Showing"]


class _State(NamedTuple):
    """What an evaluation goes on with.

    Attributes:
        entry: the number of the next entry of the tape.
        bases, kept: the memory that is read later, and results that a backward pass reads, by storage.
        storages: what is known of both.
        detached: value -> the value without gradients in the same memory.
        values, steps: those of the trace so far.
    """

    entry: int
    bases: dict[int, Tensor]
    kept: dict[int, Tensor]
    storages: Mapping[int, Storage]
    detached: dict[int, int]
    values: list[Value]
    steps: list[Step]

    def copy(self) -> _State:
        """Return what stays as it is when the evaluation goes on, with memory of its own."""
        bases, kept = copy.deepcopy((self.bases, self.kept))
        known = {number: _copied(storage) for number, storage in self.storages.items()}
        return _State(
            self.entry, bases, kept, known, dict(self.detached), list(self.values), list(self.steps)
        )

    def sizes(self) -> Mapping[int, int]:
        """Return the bytes of each array."""
        return {id(t): t.untyped_storage().nbytes() for t in (*self.bases.values(), *self.kept.values())}


def _copied(storage: Storage) -> Storage:
    return replace(storage, reference=None, views=dict(storage.views), writes=list(storage.writes))


@dataclass
class Showing:
    """Shows the values of a tape in float64, and keeps how far an evaluation has come."""

    tape: Tape
    _stands: Stands[_State] = field(default_factory=Stands)

    def show(self, visit: Visit, given: Given, *, since: int, keep: bool) -> None:
        """Show the values; see ``show`` of ``stablenum.diagnosis.diff.sides.play.Program``."""
        stand = self._stands.before(since, given)
        if keep:
            self._stands.only(given)
        with evaluating(torch.float64):
            shower = _Shower(self.tape, True, given.weights or {}, 0.0, visit, given.replaced)
            for index in shower.entries(None if stand is None else stand.state.copy(), self._last_uses):
                count = len(shower.trace.values)
                if keep and self._stands.wants(count):
                    state = shower.state(index)
                    self._stands.add(Stand(count, given.before(count), state, state.sizes()))

    @cached_property
    def _last_uses(self) -> Mapping[int, list[int]]:
        return last_uses(self.tape.entries)


class _Shower(Player):
    """A player that records of the steps only what they give."""

    def entries(self, state: _State | None, last: Mapping[int, list[int]]) -> Iterator[int]:
        """Evaluate the entries from a state on, and yield the number of each before it is evaluated."""
        if state is not None:
            self._take_up(state)
        for index in range(0 if state is None else state.entry, len(self._tape.entries)):
            yield index
            self._entry(index)
            self._forget(last.get(index, ()))

    def state(self, entry: int) -> _State:
        """Return what the evaluation goes on with before an entry."""
        found = {n: self._values.memory.find(t) for n, t in (*self._bases.items(), *self._kept.items())}
        known = {n: storage for n, storage in found.items() if storage is not None}
        trace = self.trace
        return _State(entry, self._bases, self._kept, known, self._detached, trace.values, trace.steps).copy()

    def _take_up(self, state: _State) -> None:
        _, self._bases, self._kept, storages, self._detached, values, steps = state
        self.trace.values, self.trace.steps, self._seen = values, steps, len(values)
        for number, tensor in (*self._bases.items(), *self._kept.items()):
            if number in storages:
                self._values.memory.take_up(tensor, storages[number])

    def _add_step(
        self,
        operation: Operation,
        name: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        call: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        self.trace.add_step("", inputs=inputs, outputs=outputs)
