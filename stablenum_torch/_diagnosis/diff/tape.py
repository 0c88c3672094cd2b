"""The tape: every call of an aten operation, with the memory that it reads and writes.

Tensors are kept as places in numbered storages rather than as objects, so that views and writes in place come
out the same when the tape is played with other numbers or in another format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stablenum.diagnosis.replay.trace import Step
from stablenum_torch._diagnosis.replay.contexts import Context
from stablenum_torch._diagnosis.replay.recorder import Recorder, require_grad
from stablenum_torch._diagnosis.replay.schemas import Operation, numbers_in, tensors_in
from stablenum_torch._diagnosis.replay.tensor_memory import Storage

__all__ = [
    "Detaching",
    "Entry",
    "Mark",
    "Place",
    "Tape",
    "Taping",
    "draws",
    "last_uses",
    "numbers_of",
    "places_in",
]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor as a place in a storage.

    Attributes:
        live: whether gradients of the tensor are wanted. Tensors of one place may differ in this.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    conjugated: bool = False
    live: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a call returned or wrote.

    Attributes:
        place: where it lies.
        shared: whether its memory existed before the call.
        drawn: its contents, if the call drew random numbers.
        kept: whether it is kept for the backward pass alone, and its size is the kernel's affair.
    """

    place: Place
    shared: bool
    drawn: Tensor | None = None
    kept: bool = False


@dataclass(slots=True)
class Entry:
    """One call.

    Attributes:
        func: the operation.
        args, kwargs: its arguments, with a ``Place`` for each tensor.
        results: what it returned.
        written: what it wrote.
        step: the step in the recorder's trace, which has the source line, the module and the phase.
        stops: whether gradients end here: at a ``detach``, or at a call without gradients.
    """

    func: Callable[..., Any]
    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Result]
    written: list[Result]
    step: Step
    stops: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """A tensor that is a result of the program at this point of the tape."""

    kind: str
    name: str
    place: Place
    step: int


@dataclass
class Tape:
    """The calls and marks in order of execution, and the tensors that existed before.

    Attributes:
        entries: as they ran.
        outside: storage -> a tensor of it that existed before the recording.
        names: storage -> the role and the name of each place of it that has one.
        closed: the storages of tensors that the program names without being given them, such as a mean and a
            standard deviation by which it normalizes images.
        opened: whether an operation's result is that of its parts: by width, number of values before it, and
            place among its results. Filled by the first play.
    """

    entries: list[Entry | Mark] = field(default_factory=list)
    outside: dict[int, Tensor] = field(default_factory=dict)
    names: dict[Place, tuple[str, str]] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    opened: dict[tuple[bool, int, int], bool] = field(default_factory=dict)


class Taping(Recorder):
    """A recorder that also keeps the tape.

    Attributes:
        tape: the tape.
        detaching: whether the user is detaching a tensor, as autograd does with the tensors that it keeps.

    Args:
        given: the arguments of the program.
    """

    def __init__(self, *args: Any, given: Any = ()) -> None:
        super().__init__(*args)
        self.tape = Tape()
        self._given = {id(t) for t in tensors_in(given)}
        self.detaching = False
        self._numbers: dict[int, tuple[Storage, int]] = {}

    def mark(self, kind: str, name: str, tensor: Tensor, step: int) -> None:
        """Note that a tensor is a result of the program."""
        self.values.of(tensor)
        self.tape.entries.append(Mark(kind, name, self._place(tensor), step))

    def _record(
        self,
        func: Callable[..., Any],
        operation: Operation,
        context: Context,
        before: Any,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        result: Any,
        *,
        makes_node: bool,
    ) -> None:
        first = len(self.trace.steps)
        args, kwargs = self._placed(call[0]), self._placed(call[1])
        random = _is_random(func, call)
        written = [self._result(t, shared=True, drawn=random) for t in before.written]
        ids = {id(t) for t in before.written}
        returned = [t for t in tensors_in(result) if id(t) not in ids]
        shared = [self.values.memory.find(t) is not None for t in returned]
        super()._record(func, operation, context, before, call, result, makes_node=makes_node)
        kept = {id(t) for t in tensors_in(operation.kept(result))}
        results = [
            self._result(t, shared=s, drawn=random and not s, kept=id(t) in kept)
            for t, s in zip(returned, shared)
        ]
        step = self.trace.steps[first]
        ends = (operation.name == "detach" and self.detaching) or not self._grad
        stops = ends and step.phase == "forward" and not self._in_function and require_grad(*call)
        self.tape.entries.append(Entry(func, operation, args, kwargs, results, written, step, stops))

    def _result(self, tensor: Tensor, *, shared: bool, drawn: bool, kept: bool = False) -> Result:
        return Result(self._place(tensor), shared, tensor.detach().clone() if drawn else None, kept)

    def _placed(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self._place(tree)
        if isinstance(tree, tuple | list):
            return type(tree)(self._placed(x) for x in tree)
        if isinstance(tree, dict):
            return {k: self._placed(x) for k, x in tree.items()}
        return tree

    def _place(self, tensor: Tensor) -> Place:
        memory = self.values.memory
        storage = memory.find(tensor)
        if storage is None:
            storage = memory.add(tensor, outside=True)
        known = self._numbers.get(id(storage))
        if known is None:
            number = len(self._numbers)
            self._numbers[id(storage)] = (storage, number)
            if storage.outside:
                self.tape.outside[number] = tensor.detach()
        else:
            number = known[1]
        at, shape, strides = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        form = (tensor.dtype, tensor.device, tensor.is_conj(), tensor.requires_grad)
        place = Place(number, at, shape, strides, *form)
        if storage.outside and place not in self.tape.names:
            name = self.name_of(tensor)
            if name is not None:
                self.tape.names[place] = name
                if name[0] == "input" and id(tensor) not in self._given:
                    self.tape.closed.add(number)
        return place

    def name_of(self, tensor: Tensor) -> tuple[str, str] | None:
        """Return the role and the name of a tensor that the recorder knows by name."""
        return self._names.get(id(tensor))


class Detaching(TorchFunctionMode):
    """Notes in a recorder when the user detaches a tensor."""

    def __init__(self, recorder: Taping) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        outer, self._recorder.detaching = self._recorder.detaching, func in _DETACHING
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._recorder.detaching = outer


_DETACHING = (Tensor.detach, Tensor.data.__get__)


def _is_random(func: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Return whether a call draws random numbers; an attention or a layer without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    args, kwargs = call
    for i, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def draws(tape: Tape) -> bool:
    """Return whether a call of the tape drew random numbers."""
    calls = (e for e in tape.entries if isinstance(e, Entry))
    return any(r.drawn is not None for e in calls for r in (*e.results, *e.written))


def last_uses(entries: Sequence[Entry | Mark]) -> dict[int, list[int]]:
    """Return, for each position in the tape, the storages that are not used after it."""
    last: dict[int, int] = {}
    for index, entry in enumerate(entries):
        for place in places_of(entry):
            last[place.storage] = index
    found: dict[int, list[int]] = {}
    for storage, index in last.items():
        found.setdefault(index, []).append(storage)
    return found


def places_of(entry: Entry | Mark) -> list[Place]:
    """Return all places that an entry names."""
    if isinstance(entry, Mark):
        return [entry.place]
    return [*places_in((entry.args, entry.kwargs)), *(r.place for r in (*entry.results, *entry.written))]


def numbers_of(tape: Tape) -> frozenset[float]:
    """Return the plain numbers among the arguments of the calls."""
    calls = [entry for entry in tape.entries if isinstance(entry, Entry)]
    return frozenset(number for entry in calls for number in numbers_in((entry.args, entry.kwargs)))


def places_in(tree: Any) -> list[Place]:
    """Return all places in nested arguments."""
    if isinstance(tree, Place):
        return [tree]
    if isinstance(tree, tuple | list):
        return [p for x in tree for p in places_in(x)]
    if isinstance(tree, dict):
        return [p for x in tree.values() for p in places_in(x)]
    return []
