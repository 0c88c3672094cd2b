"""``program``: a training step of PyTorch, recorded for ``stablenum.diff``."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stablenum._support.interrupts import and_restore
from stablenum._support.one_line import kind_of, one_line
from stablenum._support.settings_checks import check_callable
from stablenum.diagnosis.diff.sides.call_sites import CallSite, argument_site
from stablenum.diagnosis.diff.sides.exact_constants import exact_constants
from stablenum.diagnosis.diff.sides.play import Moments, Play, Visit
from stablenum.diagnosis.diff.sides.resume_points import Given
from stablenum_torch._diagnosis.diff.compiled import is_compiled, with_arrays
from stablenum_torch._diagnosis.diff.optimizer_states import begin_with, kept_by
from stablenum_torch._diagnosis.diff.player import play
from stablenum_torch._diagnosis.diff.showing import Showing
from stablenum_torch._diagnosis.diff.tape import Detaching, Tape, Taping, draws, numbers_of
from stablenum_torch._diagnosis.diff.writing import DIALECT
from stablenum_torch._diagnosis.replay.inputs import Surroundings, look_around
from stablenum_torch._diagnosis.replay.module_paths import ModulePaths
from stablenum_torch._diagnosis.replay.public_calls import PublicFunctions
from stablenum_torch._diagnosis.replay.run import eager
from stablenum_torch._diagnosis.replay.schemas import tensors_in
from stablenum_torch._diagnosis.replay.snapshot import Snapshot

__all__ = ["Program", "program"]


def program(
    loss_fn: Callable[..., Any],
    *args: Any,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    compute: torch.dtype | None = None,
) -> Program:
    """Return a program for :func:`stablenum.diff`.

    Experimental: the names of causes and the JSON may change in a minor version.

    Args:
        loss_fn: called with ``args``. If it returns a floating-point scalar, the backward pass follows, and
            with ``optimizer`` one step; anything else is compared as it is.
        *args: the batch, and whatever else ``loss_fn`` takes.
        model: the model, which gives modules and parameters their names; found by itself if ``loss_fn``
            reaches only one.
        optimizer: steps after the backward pass.
        compute: the format of autocast; None for none.

    Returns:
        The program. Nothing runs before the comparison, which leaves model, optimizer and generators as they
        were.

    Raises:
        TypeError: an argument has a wrong type.
    """
    check_callable("loss_fn", loss_fn, "a function that returns the loss")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"program(model=...) must be a torch.nn.Module or None; got {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"program(optimizer=...) must be a torch.optim.Optimizer or None; got {type(optimizer).__name__}."
        )
    if compute is not None and not isinstance(compute, torch.dtype):
        raise TypeError(f"program(compute=...) must be a torch.dtype or None; got {compute!r}.")
    made_at = argument_site(sys._getframe(1), "optimizer") if optimizer is not None else None
    return Program(loss_fn, args, model, optimizer, compute, made_at)


class Program:
    """A training step of PyTorch, or any function of tensors. Made by :func:`program`."""

    framework = "torch"
    dialect = DIALECT

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        args: tuple[Any, ...],
        model: nn.Module | None,
        optimizer: Optimizer | None,
        compute: torch.dtype | None,
        optimizer_at: CallSite | None = None,
    ) -> None:
        self.optimizer_at = optimizer_at
        self._loss_fn, self._args, self._compute = loss_fn, args, compute
        self._model, self._optimizer = model, optimizer
        self.numbers: Collection[float] = ()
        self.aside: Collection[str] = ()
        self._tapes: dict[int, Tape] = {}
        self._shown: dict[int, Showing] = {}
        self._around: Surroundings | None = None
        self._begin_with: Callable[[Mapping[str, Tensor]], None] | None = None

    def __repr__(self) -> str:
        return one_line(
            self,
            framework=self.framework,
            loss_fn=kind_of(self._loss_fn),
            args=len(self._args),
            model=kind_of(self._model),
            optimizer=kind_of(self._optimizer),
            compute=self._compute,
            recorded_steps=sorted(self._tapes),
        )

    @property
    def has_optimizer(self) -> bool:
        """Whether a step of an optimizer follows."""
        return self._optimizer is not None

    def parameters(self) -> Mapping[str, Any]:
        """Return the parameters and buffers by name, as arrays of NumPy: of buffers that hold constants, the
        numbers that were written."""
        found = self._found()
        arrays = {name: _host(t) for name, t in found.parameters.items() if t.is_floating_point()}
        buffers = {name: t for name, t in found.buffers.items() if t.is_floating_point()}
        exact = {
            name: exact_constants(_host(t), whole=True) if t.dtype == torch.float32 else _host(t)
            for name, t in buffers.items()
        }
        return {**arrays, **exact}

    def record(self, steps: int) -> None:
        """Run the user's code, unless that has been done."""
        if steps not in self._tapes:
            self._tapes[steps] = self._record(steps)

    def written(self, steps: int) -> Collection[float]:
        """Return the numbers that the recorded program computes with."""
        return numbers_of(self._tapes[steps])

    def fresh(self) -> Program:
        """Return the same program, not recorded yet."""
        made = Program(
            self._loss_fn, self._args, self._model, self._optimizer, self._compute, self.optimizer_at
        )
        made._begin_with, made.numbers = self._begin_with, self.numbers
        return made

    def optimizer_state(self) -> Mapping[tuple[str, str], Any]:
        """Return what the optimizer keeps, by parameter and role; see the core's ``Program``."""
        return {} if self._optimizer is None else kept_by(self._optimizer, self._found().parameters)

    def with_optimizer_state(self, moments: Moments | None) -> Program:
        """Return the same program with another state of the optimizer; see the core's ``Program``."""
        made = self.fresh()
        if self._optimizer is not None:
            made._begin_with = functools.partial(begin_with, self._optimizer, moments=moments)
        return made

    def play(
        self,
        visit: Visit,
        *,
        wide: bool = True,
        weights: Mapping[str, Any] | None = None,
        noise: float = 0.0,
        everywhere: bool = False,
        replace: Mapping[int, Any] | None = None,
        steps: int = 1,
        code: Collection[int] = (),
    ) -> Play:
        """Evaluate the program once; see ``stablenum.diagnosis.diff.sides.play.Program``."""
        self.record(steps)
        return play(
            self._tapes[steps],
            wide=wide,
            weights=weights or {},
            noise=noise,
            everywhere=everywhere,
            visit=visit,
            replace=replace or {},
            code=code,
        )

    def show(
        self,
        visit: Visit,
        *,
        weights: Mapping[str, Any] | None,
        replace: Mapping[int, Any],
        steps: int,
        since: int = 0,
        keep: bool = False,
    ) -> None:
        """Show the values of one more evaluation; see ``stablenum.diagnosis.diff.sides.play.Program``."""
        self.record(steps)
        showing = self._shown.setdefault(steps, Showing(self._tapes[steps]))
        showing.show(visit, Given(weights, replace), since=since, keep=keep)

    def compiled(self, weights: Mapping[str, Any] | None = None) -> Mapping[tuple[str, str], Any] | None:
        """Return loss, outputs and gradients of one step as ``torch.compile`` runs it, by kind and name; None
        if nothing is compiled, or if the step draws random numbers."""
        around = self._found()
        if not is_compiled(self._loss_fn, around.modules.values()) or any(map(draws, self._tapes.values())):
            return None
        snapshot = Snapshot(around.objects)
        return and_restore(lambda: self._run_compiled(around, snapshot, weights or {}), snapshot.restore)

    def _run_compiled(
        self, around: Surroundings, snapshot: Snapshot, weights: Mapping[str, Any]
    ) -> Mapping[tuple[str, str], Any]:
        named = {**around.parameters, **around.buffers}
        for tensor in named.values():
            snapshot.keep_memory(tensor)
            snapshot.keep_tensor(tensor)
        with_arrays(named, weights)
        with warnings.catch_warnings(), torch.enable_grad(), self._autocast():
            warnings.simplefilter("ignore")
            out = self._loss_fn(*self._args)
        loss = _loss(out)
        if loss is None:
            return {("output", name): _host(t) for name, t in _named("output", out)}
        if loss.grad_fn is not None and all(p.grad is None for p in around.parameters.values()):
            loss.backward()
        gradients = {name: p.grad for name, p in around.parameters.items() if p.grad is not None}
        return {("loss", "loss"): _host(loss), **{("gradient", n): _host(g) for n, g in gradients.items()}}

    def _found(self) -> Surroundings:
        if self._around is None:
            self._around = look_around(self._loss_fn, self._args, {}, self._model, self._optimizer)
        return self._around

    # --- recording ---

    def _record(self, steps: int) -> Tape:
        around = self._found()
        snapshot = Snapshot(around.objects)
        return and_restore(lambda: self._recorded(around, snapshot, steps), snapshot.restore)

    def _recorded(self, around: Surroundings, snapshot: Snapshot, steps: int) -> Tape:
        for tensor in (*around.parameters.values(), *around.buffers.values()):
            snapshot.keep_tensor(tensor)  # which clears its gradient
        recorder = Taping(
            snapshot, around.names, ModulePaths(around.model), _call_user.__code__, given=self._args
        )
        recorder.contexts.on_update = None
        with (
            warnings.catch_warnings(),
            eager(),
            _without_fused_rnn(around),
            torch.enable_grad(),
            recorder,
            PublicFunctions(recorder),
            Detaching(recorder),
        ):
            warnings.simplefilter("ignore")
            if self._begin_with is not None:
                self._begin_with(around.parameters)
            for step in range(1, steps + 1):
                _begin(recorder, around)
                with self._autocast():
                    out = _call_user(self._loss_fn, self._args)
                self._mark_outputs(recorder, out, step)
                loss = _loss(out)
                if loss is not None:
                    self._backward(recorder, around, loss, step)
        return recorder.tape

    def _autocast(self) -> Any:
        if self._compute is None:
            return torch.autocast("cpu", enabled=False)
        found = self._found()
        tensors = [*found.parameters.values(), *tensors_in(self._args)]
        device = tensors[0].device.type if tensors else "cpu"
        return torch.autocast(device, dtype=self._compute)

    def _mark_outputs(self, recorder: Taping, out: Any, step: int) -> None:
        loss = _loss(out)
        if loss is not None:
            recorder.mark("loss", "loss", loss, step)
            others = (n for n, t in _named("output", out) if t is not loss and t.is_floating_point())
            self.aside = list(others)
            return
        for name, tensor in _named("output", out):
            recorder.mark("output", name, tensor, step)

    def _backward(self, recorder: Taping, around: Surroundings, loss: Tensor, step: int) -> None:
        done = recorder.contexts.accumulated or recorder.roots or recorder.gradients
        if not done:
            _call_user(torch.autograd.backward, (loss,))
        for name, p in around.parameters.items():
            if p.grad is not None:
                recorder.mark("gradient", name, p.grad, step)
        if self._optimizer is not None:
            with _scalars_of(self._optimizer):
                _call_user(self._optimizer.step, ())
            for name, p in around.parameters.items():
                if p.requires_grad:
                    recorder.mark("updated", name, p, step)


@contextlib.contextmanager
def _scalars_of(optimizer: Optimizer) -> Iterator[None]:
    """Have an optimizer of torch.optim keep its running scalars in float64: it reads them with ``.item()``,
    and a number that was read cannot be widened afterwards."""
    before = torch.get_default_dtype()
    if type(optimizer).__module__.startswith("torch.optim."):
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _host(tensor: Tensor) -> Any:
    return tensor.detach().cpu().double().numpy()


def _call_user(loss_fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    # The stack is read up to this function.
    return loss_fn(*args)


def _begin(recorder: Taping, around: Surroundings) -> None:
    """Forget the backward pass of the last step."""
    for p in around.parameters.values():
        p.grad = None
    recorder.contexts.accumulated = False
    recorder.roots.clear()
    recorder.gradients.clear()


def _loss(out: Any) -> Tensor | None:
    """Return the loss: a floating-point scalar with a graph, alone or first in a tuple."""
    out = out[0] if isinstance(out, tuple) and out else out
    if isinstance(out, Tensor) and out.numel() == 1 and out.requires_grad and out.is_floating_point():
        return out
    return None


def _named(name: str, tree: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, x in tree.items():
            yield from _named(f"{name}[{key!r}]", x)
    elif isinstance(tree, list | tuple):
        for i, x in enumerate(tree):
            yield from _named(f"{name}[{i}]", x)


@contextlib.contextmanager
def _without_fused_rnn(around: Surroundings) -> Iterator[None]:
    """Run recurrent layers operation by operation."""
    recurrent = any(isinstance(m, nn.RNNBase) for top in around.modules.values() for m in top.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of devices that are not there
        with _without_fast_libraries() if recurrent else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def _without_fast_libraries() -> Iterator[None]:
    """Leave to PyTorch's own kernels what oneDNN and cuDNN would compute as one operation."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        with torch.backends.mkldnn.flags(enabled=False):
            yield
    finally:
        torch.backends.cudnn.enabled = before
