"""Models that no optimizer has, of the same shapes as a trained one: averages and target networks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stablenum.diagnosis.checkup.course import Copy
from stablenum_torch._diagnosis.checkup.updates import is_measurable, wide
from stablenum_torch._diagnosis.watch.script_recorder import existing_modules

__all__ = ["Copies"]

Print = tuple[float, float]
# Other buffers may be counters, queues or tables, which a copy need not have.
_STATISTICS = ("running_mean", "running_var")


class Copies:
    """Compares such models with what they were when the training began."""

    def __init__(self) -> None:
        self._first: dict[weakref.ref[nn.Module], dict[str, Print]] = {}
        self._pairs: list[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = []
        self._ran: set[int] = set()
        self.found: tuple[Copy, ...] = ()

    def begin(self) -> None:
        """Note what all models are before the first step."""
        known: dict[int, Print] = {}
        for module in existing_modules():
            if next(module.parameters(), None) is not None:
                self._first[weakref.ref(module)] = _prints(module, known)

    def note_call(self, module: nn.Module) -> None:
        """Note that a module is called."""
        self._ran.add(id(module))

    def look(self, trained: Collection[int]) -> None:
        """Compare the copies with what they were.

        Args:
            trained: the ids of the parameters of all optimizers.
        """
        if not self._pairs:
            self._pairs = list(self._matching(trained))
        found = []
        for model, copy in self._pairs:
            one, other = model(), copy()
            if one is not None and other is not None:
                found.append(self._compared(one, other, self._first[model], self._first[copy]))
        self.found = tuple(found) or self.found

    def _compared(self, one: nn.Module, other: nn.Module, first: Any, first_of_copy: Any) -> Copy:
        now, now_of_copy = _prints(one), _prints(other)
        weights = {name for name, _ in other.named_parameters()}
        still = tuple(
            name
            for name in now_of_copy.keys() - weights
            if name.rpartition(".")[2] in _STATISTICS
            and now_of_copy[name] == first_of_copy[name]
            and now[name] != first[name]
        )
        return Copy(
            name=_name_of(other),
            of=_name_of(one),
            equal=all(first[name] == first_of_copy[name] for name in weights),
            moved=any(now_of_copy[name] != first_of_copy[name] for name in weights),
            still=tuple(sorted(still)),
            runs=any(id(part) in self._ran for part in other.modules()),
        )

    def _matching(
        self, trained: Collection[int]
    ) -> Iterator[tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]]:
        """Return each trained model with each of its copies; of models inside one another the outermost."""
        alive = [(ref, module) for ref in self._first if (module := ref()) is not None]
        alive.sort(key=lambda pair: -sum(1 for _ in pair[1].modules()))
        inside: set[int] = set()
        for ref, module in alive:
            if id(module) in inside or any(id(p) in trained for p in module.parameters()):
                continue
            match = next((m for m in alive if _is_copy(module, m[1], trained)), None)
            if match is not None:
                inside.update(id(part) for part in module.modules())
                yield match[0], ref


def _is_copy(module: nn.Module, of: nn.Module, trained: Collection[int]) -> bool:
    """Return whether a model has the shapes of another one that is trained."""
    if type(module) is not type(of) or not any(id(p) in trained for p in of.parameters()):
        return False
    return _shapes(module) == _shapes(of)


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(t.shape)) for name, t in _tensors(module)]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from ((name, b) for name, b in module.named_buffers() if b.is_floating_point() and not b.is_meta)


def _prints(module: nn.Module, known: dict[int, Print] | None = None) -> dict[str, Print]:
    """Return two sums over each tensor, which tell whether it has changed.

    Args:
        module: the module.
        known: the sums of tensors that other modules have, by id; those of this one are added.
    """
    known = {} if known is None else known
    found = {}
    for name, tensor in _tensors(module):
        if id(tensor) not in known:
            numbers = wide(tensor.detach()) if is_measurable(tensor) else torch.zeros(())
            known[id(tensor)] = float(numbers.sum()), float(numbers.square().sum())
        found[name] = known[id(tensor)]
    return found


def _name_of(module: nn.Module) -> str:
    """Return the name under which the script, an object or another module has a module; "" if none does."""
    names: list[str] = []
    for holder in gc.get_referrers(module):
        names += _names_in(holder, module)
    return max(names, key=len, default="")


def _names_in(holder: Any, module: nn.Module) -> list[str]:
    known = holder if type(holder) is dict else getattr(holder, "f_locals", None)
    if known is None:
        known = getattr(holder, "__dict__", None)
    items = list(known.items()) if type(known) is dict else []
    return [
        name for name, value in items if value is module and isinstance(name, str) and name.isidentifier()
    ]
