"""``checkup``: a few steps on one batch, measured in full and undone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from stablenum._support.interrupts import and_restore
from stablenum._support.settings_checks import check_callable
from stablenum.diagnosis.checkup.course import Course, Loss, ParameterSeen, Probe
from stablenum.diagnosis.checkup.report import Checkup
from stablenum.diagnosis.checkup.schedule import BY_HAND
from stablenum.diagnosis.watch.session import FAILED
from stablenum.errors import bad_field, bad_type
from stablenum_torch._diagnosis.audit import setting_problems, state_problems
from stablenum_torch._diagnosis.checkup.custom_functions import CustomFunctions
from stablenum_torch._diagnosis.checkup.measuring import MeasuringRecorder
from stablenum_torch._diagnosis.checkup.updates import copies_of, parameters_seen, settings_of
from stablenum_torch._diagnosis.replay.inputs import Surroundings, look_around
from stablenum_torch._diagnosis.replay.module_paths import ModulePaths
from stablenum_torch._diagnosis.replay.run import eager
from stablenum_torch._diagnosis.replay.snapshot import Snapshot
from stablenum_torch._diagnosis.watch.optimizers import parameters_of, rate_of
from stablenum_torch._step.checks import check_module, needs_closure
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["checkup"]


def checkup(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *args: Any,
    optimizer: Optimizer | None = None,
) -> Checkup:
    """Take a few steps on one batch, and report what keeps the model from learning although no number is NaN.

    With an optimizer, three steps are taken on the same batch, and the loss is computed once more. Without
    one, there is one forward and one backward pass, and nothing is known about steps. If the cure of the
    first finding can be tried (another initialisation, a lower rate), it is, with one more pass. Every
    operation is recorded and measured; compiled modules run eagerly. Findings, with their causes first, are
    those of ``stablenum checkup``, which also sees how a whole training goes.

    Afterwards parameters, buffers, gradients, optimizer state, random generators, modes and hooks are what
    they were, bit for bit, even if ``loss_fn`` raises. Objects of your own (a list of losses, a counter) are
    not restored.

    Args:
        model: the model, in the mode (train or eval) in which it is trained.
        loss_fn: ``loss_fn(model, *args)`` returns the loss, a tensor with one element.
        *args: further arguments of ``loss_fn``, such as one batch.
        optimizer: the optimizer of the model, guarded or not. One whose ``step`` needs a closure takes no
            step.

    Returns:
        A :class:`stablenum.diagnosis.Checkup`: ``ok``, ``complaints`` (root causes first), ``notes``,
        ``to_json()``, ``to_html()``; ``str`` gives its text. A loss that is not finite is one of the
        complaints.

    Raises:
        TypeError: ``model``, ``loss_fn`` or ``optimizer`` has a wrong type.
        ValueError: the loss is not a floating-point tensor with one element.
        Exception: what ``loss_fn`` raised.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8, bias=False), nn.Tanh())]
        >>> for linear in layers[::2]:
        ...     _ = nn.init.normal_(linear.weight, std=0.01)
        >>> model = nn.Sequential(*layers)
        >>> report = checkup(model, lambda model, x: (model(x) - x).square().mean(), torch.randn(16, 8))
        >>> report.complaints[0].symptom.value, report.ok
        ('vanishing_activations', False)
    """
    check_module("model", model)
    check_callable("loss_fn", loss_fn, "a function loss_fn(model, *args) that returns the loss")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise bad_type("optimizer", "a torch.optim.Optimizer, guarded or not, or None", optimizer)
    with torch.inference_mode(False):
        around = look_around(loss_fn, (model, *args), {}, model, optimizer)
        snapshot = Snapshot(around.objects)
        few = _FewSteps(lambda: _call_user(loss_fn, model, args), around, snapshot, optimizer)
        return and_restore(few.checkup, snapshot.restore)


def _call_user(loss_fn: Callable[..., Any], model: nn.Module, args: tuple[Any, ...]) -> Any:
    # The stack is read up to this function.
    return loss_fn(model, *args)


class _Aside:
    """Does something that is not recorded; an error of it becomes a note."""

    def __init__(self, notes: list[str]) -> None:
        self._notes, self.looking = notes, False

    def look(self, action: Callable[..., Any], *args: Any) -> Any:
        """Return what ``action`` returns; FAILED if it fails."""
        self.looking = True
        try:
            with _disable_current_modes(), torch.no_grad():
                return action(*args)
        except Exception as error:  # noqa: BLE001 (the checkup goes on without it)
            self._notes.append(f"a custom derivative was not compared: {type(error).__name__}: {error}")
            return FAILED
        finally:
            self.looking = False


class _FewSteps:
    """Takes the steps, and collects what is seen of them."""

    def __init__(
        self,
        loss_of: Callable[[], Any],
        around: Surroundings,
        snapshot: Snapshot,
        optimizer: Optimizer | None,
    ) -> None:
        self.loss_of, self.around, self.snapshot, self.optimizer = loss_of, around, snapshot, optimizer
        self.course = Course(framework="torch")
        self.starts: list[dict[int, Tensor]] = []  # copies of the parameters before each step
        self.notes: list[str] = []
        self.custom = CustomFunctions(_Aside(self.notes))
        if optimizer is not None and needs_closure(optimizer):
            self.notes.append(f"the step of {type(optimizer).__name__} needs a closure, so none was taken")
            self.optimizer = None

    def checkup(self) -> Checkup:
        """Take the steps, and judge them."""
        for tensor in [*self.around.parameters.values(), *self.around.buffers.values()]:
            self.snapshot.keep_tensor(tensor)
        if self.optimizer is not None:
            problems = state_problems(self.optimizer, self.around.parameters.items())
            self.course.bad_state = (*setting_problems(self.optimizer), *problems)
            self.course.bad_state_since = 0
        for _ in range(1 if self.optimizer is None else BY_HAND):
            self.take_step()
            if self.course.groundless is not None:
                break
        else:
            if self.optimizer is not None:
                self.look_at_optimizer(self.optimizer)
                _, loss = self.run(lambda loss: None)
                self.course.losses.append(Loss(self.course.steps, loss))
        self.course.custom, self.course.cut = self.custom.found, tuple(self.custom.cut)
        return Checkup.of(self.course, first=self, notes=tuple(self.notes))

    def take_step(self) -> None:
        """Take and measure a step."""
        groups, optimizer = self.groups(), self.optimizer
        before = copies_of((p for group in groups for p in group["params"]), optimizer)
        self.starts.append(before)
        recorder, loss = self.run(self.step)
        self.course.losses.append(Loss(self.course.steps, loss))
        seen = parameters_seen(groups, before, self.around.names, optimizer)
        self.course.probes.append(self.probe(recorder, seen))
        self.course.steps += optimizer is not None

    def run(self, then: Callable[[Tensor], object]) -> tuple[MeasuringRecorder, float]:
        """Compute the loss, and do what comes then, under a recorder; return that, and the loss."""
        for p in self.around.parameters.values():
            p.grad = None
        recorder = MeasuringRecorder(
            self.snapshot, self.around.names, ModulePaths(self.around.model), _call_user.__code__
        )
        # However many operations there are: what is not recorded would not be restored.
        self.custom.step, self.custom.written_on = self.course.steps, recorder.written_on
        with warnings.catch_warnings(), eager(), torch.enable_grad(), recorder, self.custom.installed():
            warnings.simplefilter("ignore")  # they are shown when the training runs
            loss = _checked(self.loss_of())
            if loss.requires_grad:
                then(loss if loss.ndim == 0 else loss.sum())
            elif recorder.trace.steps:
                self.course.groundless = recorder.trace.steps[-1].place
        return recorder, float(loss.detach())

    def probe(self, recorder: MeasuringRecorder, parameters: tuple[ParameterSeen, ...] = ()) -> Probe:
        """Return what was measured."""
        return Probe(
            step=self.course.steps, trace=recorder.trace, signals=recorder.signals, parameters=parameters
        )

    # --- trials: see ``FirstStep`` ---

    def with_weights(self, deviations: Mapping[str, float]) -> Probe:
        """Measure the first step with some parameters drawn afresh."""
        generator = torch.Generator("cpu").manual_seed(0)

        def value(p: Tensor, name: str) -> Tensor:
            if name not in deviations:
                return self.starts[0][id(p)]
            return deviations[name] * torch.randn(p.shape, generator=generator, device="cpu")

        self.set_parameters(value)
        return self.probe(self.run(self.backward)[0])

    def loss_after(self, part: float) -> float:
        """Return the loss after a part of the first update."""
        first, second = self.starts[:2]
        self.set_parameters(lambda p, name: torch.lerp(first[id(p)], second[id(p)], part))
        return self.run(lambda loss: None)[1]

    def set_parameters(self, value: Callable[[Tensor, str], Tensor]) -> None:
        """Set the parameters that were copied before the first step."""
        with torch.no_grad():
            for name, p in self.around.parameters.items():
                if id(p) in self.starts[0]:
                    self.snapshot.keep_memory(p)
                    p.copy_(value(p, name))

    # --- the optimizer ---

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass."""
        if isinstance(self.optimizer, GuardedOptimizer):
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def step(self, loss: Tensor) -> None:
        """Run the backward pass and, with an optimizer, its step."""
        self.backward(loss)
        if self.optimizer is not None:
            self.optimizer.step()

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups, or the model's parameters as one."""
        if self.optimizer is None:
            return [{"params": list(self.around.parameters.values())}]
        return self.optimizer.param_groups

    def look_at_optimizer(self, optimizer: Optimizer) -> None:
        """Note which parameters the optimizer has, and its settings."""
        course, names = self.course, self.around.names
        own = list(parameters_of(optimizer))
        ids = {id(p) for p in own}
        course.inside = tuple(dict.fromkeys(names[id(p)][1] for p in own if id(p) in names))
        course.outside = tuple(
            name
            for name, p in self.around.parameters.items()
            if p.grad is not None and id(p) not in ids and isinstance(p, nn.Parameter)
        )
        in_model = {id(p) for p in self.around.model.parameters()} if self.around.model is not None else ids
        course.strangers = sum(id(p) not in in_model and p.grad is None and p.requires_grad for p in own)
        course.settings = (settings_of(optimizer),)
        rate = rate_of(optimizer)
        if rate == 0:
            self.notes.append("the learning rate is 0 here, so nothing moved")
        elif rate is not None:
            course.rates = [(step, rate) for step in range(course.steps)]


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = f"{loss.dtype}{list(loss.shape)}" if isinstance(loss, Tensor) else loss
        raise bad_field("loss_fn", "a function that returns a floating-point tensor with one element", got)
    return loss
