"""Looks into an unmodified PyTorch script: losses, gradients and parameters, around every optimizer step.

Only the command ``stablenum explain`` installs this. Each look makes the host wait.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stablenum.explain.plan import Failure
from stablenum.explain.session import Session
from stablenum_torch.optimizer import GuardedOptimizer

__all__ = ["watch"]


def watch(session: Session) -> None:
    """Watch everything that this process trains from now on."""
    torch.manual_seed(session.plan.seed)
    watcher = _Watcher(session)
    register_optimizer_step_pre_hook(watcher.before_step)
    register_optimizer_step_post_hook(watcher.after_step)
    watcher.wrap(torch.autograd, "backward", watcher.before_backward)
    watcher.wrap(torch.autograd, "grad", watcher.before_backward)
    watcher.wrap(torch.amp.GradScaler, "scale", watcher.before_scale)
    watcher.wrap(GuardedOptimizer, "scale", watcher.before_scale)
    # A script that looks at its loss and gives up never comes to the backward pass.
    for name in ("item", "__float__", "isnan", "isfinite", "isinf"):
        watcher.wrap(torch.Tensor, name, watcher.before_look)
    for name in ("isnan", "isfinite", "isinf"):
        watcher.wrap(torch, name, watcher.before_look)


class _Watcher:
    """Counts optimizer steps, and tells the session of the first value that is not finite."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.outcome = session.outcome
        self.depth = 0  # an optimizer may step another one inside its own step
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.looking = False
        self.scaled = False  # somebody scales losses, and skips steps that overflow

    @property
    def step(self) -> int:
        """The optimizer step that is being prepared or taken, from 1."""
        return self.outcome.steps + 1

    def wrap(self, owner: Any, name: str, before: Any) -> None:
        """Call ``before`` with the arguments of a function first, except inside a look."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            if not self.looking and not self.session.over and not torch.compiler.is_compiling():
                self.looking = True
                try:
                    before(*args, **kwargs)
                finally:
                    self.looking = False
            return inner(*args, **kwargs)

        setattr(owner, name, outer)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.depth += 1
        if self.depth > 1 or self.session.over:
            return
        self.optimizers.add(optimizer)
        self.outcome.optimizers = len(self.optimizers)
        if _will_skip(optimizer):
            return
        bad = [p for p in _parameters(optimizer) if p.grad is not None and not _finite(p.grad)]
        if bad:
            self.fail("gradient", bad, [p.grad for p in bad])

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.depth -= 1
        if self.depth > 0 or self.session.over:
            return
        bad = [p for p in _parameters(optimizer) if not _finite(p)]
        if bad:
            self.fail("parameter", bad, bad)
        self.outcome.steps += 1

    def before_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        bad = [t for t in roots if isinstance(t, torch.Tensor) and not _finite(t)]
        # A scaled loss that overflows is the scaler's business, unless the loss was bad before.
        if bad and not (self.scaled and not any(t.isnan().any() for t in bad)):
            self.fail("loss", [], bad)

    def before_scale(self, scaler: Any, outputs: Any) -> None:
        if isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled():
            return
        self.scaled = True
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        bad = [t for t in outputs if isinstance(t, torch.Tensor) and not _finite(t)]
        if bad:
            self.fail("loss", [], bad)

    def before_look(self, tensor: Any) -> None:
        """Only at what a training minimises: one number that gradients go through."""
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1 or tensor.grad_fn is None:
            return
        if not _finite(tensor):
            self.fail("loss", [], [tensor])

    def fail(self, what: str, parameters: Sequence[torch.Tensor], bad: Sequence[Any]) -> None:
        names = _names(parameters)
        self.session.found(Failure(step=self.step, what=what, names=names))


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)]


def _will_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step with bad gradients is expected and will be refused: a loss scale is being found."""
    found = getattr(optimizer, "found_inf", None)
    if found is not None and bool(found):
        return True
    return isinstance(optimizer, GuardedOptimizer) and optimizer.loss_scale > 1.0


def _finite(tensor: torch.Tensor) -> bool:
    tensor = tensor.detach()
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return True
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    return bool(_isfinite(tensor).all())


_isfinite = torch.isfinite  # not the one that is watched


def _names(parameters: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """Of parameters, as the outermost module that holds them names them; "" for those that no module does."""
    wanted = {id(p) for p in parameters}
    if not wanted:
        return ()
    found: dict[int, str] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.nn.Module):
            continue
        for name, parameter in thing.named_parameters(remove_duplicate=False):
            # The longest name is that of the outermost module.
            if id(parameter) in wanted and len(name) > len(found.get(id(parameter), "")):
                found[id(parameter)] = name
    return tuple(name for p in parameters if (name := found.get(id(p), "")))
