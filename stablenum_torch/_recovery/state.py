"""The whole state of a run: what is captured, put back, and written to the disk."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from stablenum_torch._devices.generators import rng_state, set_rng_state
from stablenum_torch._devices.host_copies import HostCopies
from stablenum_torch._devices.waits import capturing
from stablenum_torch._recovery.guards import capture_guard, plain_guard, restore_guard
from stablenum_torch._recovery.modules import ModulePart, inside, tensors_of
from stablenum_torch._recovery.optimizers import OptimizerPart
from stablenum_torch._recovery.random_states import from_plain, to_plain
from stablenum_torch._recovery.trees import brought_back, copied_tree
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["Captured", "RunState"]


class _Part(Protocol):
    def capture(self, copied: Any, *, moved: Any) -> Any: ...

    def check(self, kept: Any) -> None: ...

    def restore(self, kept: Any) -> None: ...


class _StatefulPart:
    """Anything else with a state dict, such as a scheduler; or a generator."""

    def __init__(self, thing: Any) -> None:
        generator = isinstance(thing, torch.Generator)
        self._read = thing.get_state if generator else thing.state_dict
        self._write = thing.set_state if generator else thing.load_state_dict

    def capture(self, copied: Any, *, moved: Any) -> Any:
        return copied_tree(self._read(), copied)

    def check(self, kept: Any) -> None:
        """Nothing is known of what it takes."""

    def restore(self, kept: Any) -> None:
        # Some load what they are given without a copy.
        self._write(brought_back(kept, self._read()))


def _part_of(thing: Any) -> _Part:
    if isinstance(thing, nn.Module):
        return ModulePart(thing)
    if isinstance(thing, Optimizer) and not isinstance(thing, GuardedOptimizer):
        return OptimizerPart(thing)
    return _StatefulPart(thing)


class Captured:
    """A captured state.

    Args:
        parts: plain values and copies, by the name of the part.
        guard: copies of the guard's tensors, or its state dict.
        generators: the states of the random generators of the process, as plain values.
        copies: what the copies are waiting for.
    """

    def __init__(
        self, parts: dict[str, Any], guard: Any, generators: dict[str, Any], copies: HostCopies
    ) -> None:
        self._parts, self._guard, self._generators, self._copies = parts, guard, generators, copies

    def read(self) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """Return parts, guard and generators, as soon as the copies are complete."""
        self._copies.wait()
        return self._parts, self._guard, self._generators

    def to_plain(self, opt: GuardedOptimizer) -> dict[str, Any]:
        """Return plain values and tensors."""
        parts, guard, generators = self.read()
        guard = guard if isinstance(guard, dict) else plain_guard(opt, guard)
        return {"parts": parts, "guard": guard, "generators": generators}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Captured:
        """Return what :meth:`to_plain` described."""
        return cls(plain["parts"], plain["guard"], plain["generators"], HostCopies())


class RunState:
    """The state of a run: the model, its optimizer, and whatever else a step changes.

    Args:
        model: the model.
        opt: its guarded optimizer.
        others: other things with a state, by name.
    """

    def __init__(self, model: nn.Module, opt: GuardedOptimizer, others: Mapping[str, Any]) -> None:
        self._opt = opt
        whole = inside(model)
        self._parts: dict[str, _Part] = {
            "model": ModulePart(whole),
            "optimizer": OptimizerPart(opt.inner, lambda: tensors_of(whole).values()),
            **{name: _part_of(thing) for name, thing in others.items()},
        }
        self._latest: HostCopies | None = None
        self._stepped = False
        if torch.cuda.is_available():
            opt.inner.register_step_pre_hook(self._before_step)

    def capture(self) -> Captured:
        """Return a copy of the state in host memory.

        On CUDA the host does not wait. Parameters and moments are copied beside the forward and backward
        passes that follow, and the next step is held back until that is done; but only if this step is sure
        to be seen here, which one in a captured graph or a compiled program is not.
        """
        copies = HostCopies()
        moved = functools.partial(copies.of, beside=self._stepped)
        parts = {name: part.capture(copies.of, moved=moved) for name, part in self._parts.items()}
        guard = capture_guard(self._opt, copies.of)
        copies.begun()
        self._latest, self._stepped = copies, False
        return Captured(parts, guard, to_plain(rng_state()), copies)

    def restore(self, state: Captured) -> None:
        """Put a captured state back, in place.

        Raises:
            RuntimeError: the model or an optimizer is another one; nothing is changed.
        """
        parts, guard, generators = state.read()
        for name, part in self._parts.items():
            part.check(parts[name])
        for name, part in self._parts.items():
            part.restore(parts[name])
        restore_guard(self._opt, guard)
        set_rng_state(from_plain(generators))

    def _before_step(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or capturing():
            return
        self._stepped = True
        if self._latest is not None:
            self._latest.hold_back()
            self._latest = None
