"""Watch an unmodified PyTorch script: losses, gradients and parameters, around every optimizer step.

Only the command ``stablenum explain`` installs this. Every check makes the host wait.
"""

from __future__ import annotations

import contextlib
import functools
import re
import traceback
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from stablenum.commands.explain.plan import Failure
from stablenum.commands.explain.session import Session
from stablenum.diagnosis import Report
from stablenum.diagnosis.replay.growth import Growth
from stablenum.diagnosis.replay.judge import Evidence
from stablenum_torch._diagnosis.audit import state_problems
from stablenum_torch._diagnosis.script_recorder import Window, names_by_id, names_in_modules
from stablenum_torch._step.optimizer import GuardedOptimizer

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
    # A script that checks its loss and stops never reaches the backward pass.
    for name in ("item", "__float__", "isnan", "isfinite", "isinf"):
        watcher.wrap(torch.Tensor, name, watcher.before_look)
    for name in ("isnan", "isfinite", "isinf"):
        watcher.wrap(torch, name, watcher.before_look)
    session.on_error.append(watcher.on_error)
    watcher.open_window()


class _Watcher:
    """Counts optimizer steps, and reports the first value that is not finite to the session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.outcome = session.outcome
        self.depth = 0  # an optimizer may step another one inside its own step
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.looking = False
        self.window: Window | None = None
        self.opened = 0  # the number of steps completed when the window was opened
        self.state: tuple[str, ...] = ()  # what is wrong with the optimizer's state
        self.reproduced = True if session.plan.again else None
        self.growth = Growth()
        self._named: dict[int, str] = {}
        self.scaled = False  # losses are scaled, and steps that overflow are skipped

    @property
    def step(self) -> int:
        """The number of the optimizer step that is being prepared or taken, from 0."""
        return self.outcome.steps

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """Run the body, which is neither watched nor recorded."""
        self.looking = True
        try:
            with torch.no_grad(), _disable_current_modes():
                yield
        finally:
            self.looking = False
            if self.session.over and self.window is not None:
                self.window.close()
                self.window = None

    def wrap(self, owner: Any, name: str, before: Any) -> None:
        """Replace a function by one that first passes its arguments to ``before``, except in :meth:`look`."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            if not self.looking and not self.session.over and not torch.compiler.is_compiling():
                with self.look():
                    before(*args, **kwargs)
            return inner(*args, **kwargs)

        setattr(owner, name, outer)

    def open_window(self) -> None:
        """Start recording if the next step is to be recorded."""
        begin = self.session.plan.record_from
        if begin is not None and self.step >= begin:
            self.window, self.opened = Window(), self.outcome.steps

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check the gradients."""
        if self.session.over:
            self.session.leave()
        self.depth += 1
        if self.depth > 1:
            return
        self.optimizers.add(optimizer)
        self.outcome.optimizers = len(self.optimizers)
        with self.look():
            self.note_growth(optimizer)
            if self.window is not None:
                self.state = tuple(state_problems(optimizer))
            if _will_skip(optimizer):
                return
            bad = [p for p in _parameters(optimizer) if p.grad is not None and not _finite(p.grad)]
            if bad:
                self.fail("gradient", bad, [p.grad for p in bad])

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Check the parameters."""
        self.depth -= 1
        if self.depth > 0 or self.session.over:
            return
        with self.look():
            bad = [p for p in _parameters(optimizer) if not _finite(p)]
            if bad:
                self.fail("parameter", bad, bad)
        self.outcome.steps += 1
        # With several optimizers, a step's gradients may be older than the previous step.
        if self.window is not None and self.outcome.steps - self.opened >= len(self.optimizers):
            self.window.close()
            self.window = None
        if self.window is None:
            self.open_window()

    def note_growth(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Note how large the parameters are, and the gradients if an optimizer is about to use them."""
        own = [p for o in self.optimizers for p in _parameters(o)]
        named = list(zip(self.names_of(own), own, strict=True))
        gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None] if optimizer else []
        sizes = _largest([p for _, p in named])
        self.growth.note(
            self.outcome.steps,
            {name: size for (name, _), size in zip(named, sizes, strict=True)},
            gradient=max(_largest(gradients), default=None),
            rate=_rate(optimizer),
        )

    def names_of(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return a name for each parameter; modules are searched for them once."""
        if {id(p) for p in parameters} != self._named.keys():
            known = names_by_id(parameters)
            self._named = {id(p): known.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)}
        return [self._named[id(p)] for p in parameters]

    def before_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        bad = [t for t in roots if isinstance(t, torch.Tensor) and not _finite(t)]
        # A scaled loss that overflows is left to the scaler, unless the loss itself was bad.
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
        """Check a tensor only if training could minimise it: a single number with a gradient."""
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1 or tensor.grad_fn is None:
            return
        if not _finite(tensor):
            self.fail("loss", [], [tensor])

    def on_error(self, error: BaseException) -> None:
        """Handle a script that fails with a message about NaN or inf, from a library's own check, or because
        its closure returns nothing."""
        if _is_about_a_closure(error):
            self.outcome.error += (
                "; the closure given to the optimizer's step returns None: end it with `return loss`"
            )
            return
        if not re.search(
            r"\b(nan|inf|infinite|infinity)\b|non-?finite|not finite", str(error), re.IGNORECASE
        ):
            return
        with self.look():
            self.outcome.failure = Failure(step=self.step, what="error", names=(type(error).__name__,))
            if self.window is None:
                return
            report = self.window.report_of_last(loss_finite=False, reproduced=self.reproduced)
            self.outcome.report = None if report is None else report.to_dict()

    def fail(self, what: str, parameters: Sequence[torch.Tensor], bad: Sequence[Any]) -> None:
        """End the script, with an explanation if the step was recorded."""
        names = names_in_modules(parameters)
        failure = Failure(step=self.step, what=what, names=names)
        if self.window is None:
            self.session.found(failure)
        known: dict[str, Any] = {"loss_finite": what != "loss", "reproduced": self.reproduced}
        known |= {"gradient": {"bad_gradients": names}, "parameter": {"bad_updates": names}}.get(what, {})
        if what == "parameter":
            known["state"] = self.state
        else:
            self.note_growth()
            known["exploded"] = self.growth.explosion()
        try:
            report = self.window.report(bad, **known)
        except Exception as error:  # noqa: BLE001  the failure itself is reported all the same
            note = f"the step could not be explained: {type(error).__name__}: {error}"
            report = Report.of(Evidence(framework="torch", **known), notes=(note,))
        self.session.found(failure, report)


def _is_about_a_closure(error: BaseException) -> bool:
    """Return whether an optimizer failed because its closure returned no loss."""
    if not isinstance(error, TypeError | AttributeError) or "NoneType" not in str(error):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (
        bool(frames)
        and "closure" in frames[-1].f_locals
        and isinstance(frames[-1].f_locals.get("self"), torch.optim.Optimizer)
    )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)]


def _largest(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest magnitude of each tensor. The host waits once per device and format."""
    found = [0.0] * len(tensors)
    groups: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        if t.layout is torch.strided and t.is_floating_point() and not t.is_meta and t.numel():
            groups.setdefault((t.device, t.dtype), []).append(i)
    for members in groups.values():
        sizes = torch.stack([t.amax() for t in torch._foreach_abs([tensors[i].detach() for i in members])])
        for i, size in zip(members, sizes.double().tolist(), strict=True):
            found[i] = size
    return found


def _rate(optimizer: torch.optim.Optimizer | None) -> float | None:
    rates = [] if optimizer is None else [group.get("lr") for group in optimizer.param_groups]
    return max((float(rate) for rate in rates if rate is not None), default=None)


def _will_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step with bad gradients is expected and will be skipped, because a loss scale is still
    being sought."""
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


_isfinite = torch.isfinite  # the original, not the watched one
