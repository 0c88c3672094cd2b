"""The range report in PyTorch: one instrumented forward and backward pass in float32."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import array_api_compat.torch as torch_namespace
import numpy as np
import torch
from torch import Tensor, nn

from stablenum._support.interrupts import and_restore
from stablenum._support.settings_checks import check_callable
from stablenum.diagnosis.ranges import RangeCollector, RangeReport
from stablenum.diagnosis.ranges.rows import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, WEIGHT
from stablenum.errors import bad_field, bad_type
from stablenum_torch._diagnosis.replay.modes import Modes
from stablenum_torch._step.checks import check_module
from stablenum_torch._step.measure.norms import dense_values
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["range_report"]

_WIDE = (torch.float32, torch.float64)


def range_report(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    formats: Sequence[str] = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
) -> RangeReport:
    """Report what each number format would do to the values of one training step, module by module.

    One forward and one backward pass run in float32, without autocast. The report covers the outputs of every
    module and their gradients, the weights and their gradients and, with an optimizer, the updates. It does
    not cover values inside a module's own ``forward`` (such as attention scores) that the module does not
    return.

    Afterwards parameters, buffers, gradients, the optimizer, hooks and the random states of torch, NumPy and
    Python are as before, bit for bit, even if the model raises: the step runs on copies of the values.
    What a ``forward`` writes to other attributes of its module is not undone. The report needs memory for a
    second copy of the model and, if given, of the optimizer's state.

    Args:
        model: the model, in the mode (train or eval) to be measured. DistributedDataParallel is unwrapped; a
            compiled model runs eagerly.
        batch: the model's input: a tensor, a tuple of positional arguments or a mapping of named ones; with
            ``loss_fn``, whatever that function takes. Half-precision tensors become float32.
        loss_fn: ``loss_fn(model, batch)`` returns the scalar loss. By default the model's output is the loss,
            if it is a scalar or has a scalar ``loss``; if not, there is no backward pass.
        optimizer: an optimizer of these parameters; a copy of it takes one step. Of a guarded optimizer, the
            inner one takes the step, with unscaled gradients and without clipping.
        formats: names of formats, or short names such as ``"bf16"``.

    Returns:
        A :class:`stablenum.diagnosis.RangeReport`: ``verdict``, ``loss_scale("float16")``,
        ``table()``, ``plot(path)``, ``to_json()``. Elements that are not finite in float32 are counted
        separately.

    Raises:
        TypeError: ``model``, ``loss_fn`` or ``optimizer`` has a wrong type.
        ValueError: a format is unknown, the loss is not a scalar, or a parameter is not initialised yet.

    Example:
        >>> import stablenum_torch
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> loss = lambda model, x: model(x).square().mean()
        >>> report = stablenum_torch.range_report(model, torch.ones(4, 8), loss_fn=loss)
        >>> report.verdicts["bfloat16"].sentence
        'bfloat16 works without a loss scale.'
    """
    while isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    model = getattr(model, "_orig_mod", model)
    check_module("model", model)
    if loss_fn is not None:
        check_callable("loss_fn", loss_fn, "a function loss_fn(model, batch) or None")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise bad_type("optimizer", "a torch.optim.Optimizer, guarded or not, or None", optimizer)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"model must be initialised; parameter {name!r} is still lazy. Run the model once on a batch "
                "first."
            )

    seen = RangeCollector(formats, xp=torch_namespace, cast=_cast)
    names = {p: name for name, p in model.named_parameters()}
    watch, copies = _Watch(seen), _Copies(model)

    def run() -> None:
        copies.make()
        for p, name in names.items():
            seen.add(WEIGHT, _module_of(name), _plain(p))
        watch.follow(model)
        loss = _loss(model, _floats(batch), loss_fn)
        watch.forward_done = True
        if loss is None:
            seen.note("No gradients: the model returns no scalar loss, and no loss_fn was given.")
        elif not loss.requires_grad:
            seen.note("No gradients: the loss depends on no parameter that requires a gradient.")
        else:
            _backward(loss, names, optimizer, seen)

    def run_in_float32() -> None:
        with _random_states(model), _float32_only(model):
            run()

    def restore() -> None:
        modes.restore()
        copies.restore()
        watch.remove()

    modes = Modes()
    and_restore(run_in_float32, restore)
    return RangeReport(seen.rows, seen.formats, seen.notes)


# --- restoring ---------------------------------------------------------------------------------


class _Copies:
    """Float32 copies of the values of parameters and buffers, in place of these and of the gradients.

    The tensors stay the same objects, so references to them (an RNN's flat weights, tied weights) stay valid.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [(t, t.data, t.grad) for t in dict.fromkeys([*model.parameters(), *model.buffers()])]
        tables = [t for module in model.modules() for t in (module._parameters, module._buffers)]
        self._registered = [(table, dict(table)) for table in tables]

    def make(self) -> None:
        """Put the copies in place, and clear the gradients."""
        for t, data, _ in self._kept:
            t.grad = None
            t.data = data.float() if _narrow(data) else data.clone()

    def restore(self) -> None:
        """Put everything back. May be called again."""
        for t, data, grad in self._kept:
            t.grad = None
            t.data = data
            t.grad = grad
        for table, before in self._registered:
            table.clear()
            table.update(before)


@contextlib.contextmanager
def _random_states(model: nn.Module) -> Iterator[None]:
    """Restore the random states of torch (the CPU and the model's devices), NumPy and Python."""
    devices = {t.device.index for t in [*model.parameters(), *model.buffers()] if t.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=sorted(i for i in devices if i is not None)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _float32_only(model: nn.Module) -> Iterator[None]:
    """Run the body without autocast and compilation, and with gradients.

    Autocast is switched off without a context of its own: one that is left halfway keeps the casts of weights
    for good. :class:`Modes` switches it on again.
    """
    for kind in {"cpu", *(t.device.type for t in model.parameters())} - {"meta"}:
        torch.set_autocast_enabled(kind, False)
    with torch.compiler.set_stance("force_eager"), torch.enable_grad():
        yield


# --- the step ----------------------------------------------------------------------------------


class _Watch:
    """Hooks on every module, which count the values in the module's outputs and in the outputs' gradients."""

    def __init__(self, seen: RangeCollector) -> None:
        self.forward_done = False
        self._seen = seen
        self._handles: list[Any] = []

    def follow(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_hook(self._after(path)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _after(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def count(grad: Tensor) -> None:
            self._seen.add(ACTIVATION_GRADIENT, path, _plain(grad))

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in _tensors(output):
                # In the backward pass, activation checkpointing runs a part of the forward pass again.
                if not self.forward_done:
                    self._seen.add(ACTIVATION, path, _plain(tensor))
                # Registered now, because a later change in place would give the tensor another gradient.
                if tensor.requires_grad:
                    self._handles.append(tensor.register_hook(count))

        return hook


def _loss(model: nn.Module, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor] | None) -> Tensor | None:
    if loss_fn is not None:
        loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else loss
            raise bad_field("loss_fn", "a function that returns a tensor with one element", got)
        return loss
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    held = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for found in (held, output):
        if isinstance(found, Tensor) and found.numel() == 1 and found.is_floating_point():
            return found
    return None


def _backward(
    loss: Tensor, names: dict[Tensor, str], optimizer: torch.optim.Optimizer | None, seen: RangeCollector
) -> None:
    if not torch.isfinite(loss).all():
        seen.note("The loss is not finite in float32.")
    trained = [p for p in names if p.requires_grad]
    # Unlike backward(), this accumulates nothing, and DistributedDataParallel does not wait for other ranks.
    grads = dict(zip(trained, torch.autograd.grad(loss.sum(), trained, allow_unused=True)))
    missing = [names[p] for p in trained if grads[p] is None]
    if missing:
        seen.note(f"No gradient reaches {', '.join(missing[:5])}{' and others' if missing[5:] else ''}.")
    for p, grad in grads.items():
        if grad is not None:
            seen.add(GRADIENT, _module_of(names[p]), _plain(grad))
    if optimizer is not None:
        _update(optimizer, names, grads, seen)


def _update(
    optimizer: torch.optim.Optimizer,
    names: dict[Tensor, str],
    grads: dict[Tensor, Tensor | None],
    seen: RangeCollector,
) -> None:
    """Take a step with a copy of the optimizer, on copies of its parameters."""
    if isinstance(optimizer, GuardedOptimizer):
        optimizer = optimizer.inner
        seen.note("The update is that of the inner optimizer, without clipping.")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    copies = {p: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in held}
    # copy.deepcopy finds each parameter already copied; hooks and schedulers are not part of the copy.
    copied = copy.deepcopy(optimizer, {id(p): other for p, other in copies.items()})
    for p, state in copied.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and _narrow(value):
                copied.state[p][key] = value.float()
    for p, other in copies.items():
        other.grad = None if grads.get(p) is None else grads[p].clone()  # type: ignore[union-attr]
    copied.step()
    foreign = sum(p not in names for p in held)
    if foreign:
        seen.note(f"{foreign} parameters of the optimizer do not belong to the model.")
    for p, other in copies.items():
        if p in names and other.grad is not None:
            seen.add_update(_module_of(names[p]), _plain(p), _plain(other) - _plain(p))


# --- tensors -----------------------------------------------------------------------------------


def _cast(x: Tensor, name: str) -> Tensor:
    return x.to(getattr(torch, name)).to(x.dtype)


def _narrow(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype not in _WIDE


def _plain(x: Tensor) -> Tensor:
    """Return the tensor, made dense and detached, in float32 or wider."""
    x = dense_values(x.detach())
    return x.float() if _narrow(x) else x


def _floats(batch: Any) -> Any:
    """Return the batch with its narrow tensors in float32; containers of other types are left as they are."""
    if isinstance(batch, Tensor):
        return batch.float() if _narrow(batch) else batch
    if type(batch) in (list, tuple):
        return type(batch)(_floats(part) for part in batch)
    if type(batch) is dict:
        return {key: _floats(part) for key, part in batch.items()}
    return batch


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _tensors(part)
    elif isinstance(output, (list, tuple)):
        for part in output:
            yield from _tensors(part)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]
