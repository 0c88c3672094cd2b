"""One run of the user's step under the recorder; everything is restored afterwards."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stablenum._support.interrupts import and_restore
from stablenum.diagnosis import Finding
from stablenum.diagnosis.replay.findings import finding_of, places_left, refusal_of
from stablenum.diagnosis.replay.ranks import is_received, made_here, own_first, sent_through
from stablenum.diagnosis.replay.source_files import raised_by_us
from stablenum.diagnosis.replay.trace import Trace, Value
from stablenum.diagnosis.replay.trials import Read
from stablenum.diagnosis.replay.walk import first_causes, on_the_way
from stablenum.diagnosis.watch.script_errors import last_line
from stablenum.errors import NonFiniteError
from stablenum_torch._devices.generators import RngState, set_rng_state
from stablenum_torch._diagnosis.replay.collectives import as_rank, local_of, own_rank
from stablenum_torch._diagnosis.replay.inputs import Surroundings
from stablenum_torch._diagnosis.replay.labels import BadLabelsError
from stablenum_torch._diagnosis.replay.module_paths import ModulePaths
from stablenum_torch._diagnosis.replay.public_calls import PublicFunctions
from stablenum_torch._diagnosis.replay.recorder import Recorder, rejects_numbers
from stablenum_torch._diagnosis.replay.snapshot import Snapshot

__all__ = ["Call", "Run", "run"]


@dataclass(frozen=True, slots=True)
class Call:
    """The step to be replayed."""

    step_fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    around: Surroundings


@dataclass(slots=True)
class Run:
    """The results of one run.

    Attributes:
        trace: all operations.
        bad: values that should be finite and are not.
        findings: the first causes of these values.
        loss_finite: whether the loss is finite; None if no loss is known.
        bad_parameters: the parameters that were not finite before the step.
        bad_gradients, bad_updates: the gradients and updates of this step that are not finite.
        labels: what is wrong with the labels.
        read: what the operation of the first finding read; for a derivative, what the user's operation read.
        left: further places that give NaN or inf of their own.
        received: whether a collective brought the first bad value in.
        norm: the norm of all gradients, in float64.
        backward: whether any gradient was computed.
        unreplayed: the error by which the replay itself failed.
        unjudged: whether the step returned nothing and computed no gradient, which leaves nothing to judge.
        notes: further remarks, as text.
    """

    trace: Trace
    bad: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    loss_finite: bool | None = None
    bad_parameters: list[str] = field(default_factory=list)
    bad_gradients: list[str] = field(default_factory=list)
    bad_updates: list[str] = field(default_factory=list)
    labels: str = ""
    read: Read | None = None
    left: tuple[str, ...] = ()
    received: bool = False
    norm: float = 0.0
    backward: bool = False
    unreplayed: str = ""
    unjudged: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def went_wrong(self) -> bool:
        """Whether anything that should be finite was not."""
        return bool(self.bad or self.findings or self.labels or self.loss_finite is False or self.unreplayed)


def run(call: Call, *, loss_scale: float | None, rng: RngState | Tensor | None) -> Run:
    """Run the step once, and restore everything.

    Args:
        call: the step.
        loss_scale: the loss scale for a backward pass that is run here, and for guards with a loss scale;
            None changes neither.
        rng: the generators' states at the start; None for the present ones.

    Raises:
        Exception: what the step raised, unless the error is about numbers or labels.
    """
    snapshot = Snapshot(call.around.objects)
    return and_restore(lambda: _run(call, snapshot, loss_scale, rng), snapshot.restore)


def _run(call: Call, snapshot: Snapshot, loss_scale: float | None, rng: RngState | Tensor | None) -> Run:
    around = call.around
    known = {**around.parameters, **around.buffers}
    for tensor in known.values():
        snapshot.keep_tensor(tensor)
    if rng is not None:
        set_rng_state(rng)
    _set_scales(around, snapshot, loss_scale)
    recorder = Recorder(snapshot, around.names, ModulePaths(around.model), _call_user.__code__)
    result = Run(recorder.trace)
    judged = _Judge(recorder, around, result)
    recorder.contexts.on_update = judged.look_at_gradients
    with torch.no_grad():
        before = {name: recorder.values.of(t) for name, t in known.items()}
    result.bad_parameters = [name for name in around.parameters if not before[name].finite]
    loss, error = None, None
    with warnings.catch_warnings(), eager(), torch.enable_grad(), recorder, PublicFunctions(recorder):
        warnings.simplefilter("ignore")  # warnings were shown when the step first ran
        try:
            loss = loss_in(_call_user(call.step_fn, call.args, call.kwargs))
            done = recorder.contexts.accumulated or recorder.roots or recorder.gradients
            if isinstance(loss, Tensor) and loss.requires_grad and not done:
                _backward(loss, loss_scale)
        except NonFiniteError as stopped:  # a guard has halted this training, which is already known
            result.notes.append(f"the step raised {type(stopped).__name__}")
        except Exception as raised:  # noqa: BLE001 (raised again below unless numbers caused it)
            error = raised
    with torch.no_grad():
        judged.look_at_loss(loss)
        judged.look_at_gradients()
        judged.look_at_parameters(before)
        result.unjudged = loss is None and error is None and not (result.backward or recorder.roots)
        if error is not None:
            judged.look_at_error(error)
        judged.conclude()
    recorder.contexts.on_update = None  # a cycle of references would keep the copies of written memory alive
    return result


def _call_user(step_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    # The stack is read up to this function.
    return step_fn(*args, **kwargs)


def _backward(loss: Tensor, loss_scale: float | None) -> None:
    root = loss.sum() if loss.numel() != 1 else loss
    if loss_scale is not None and loss_scale != 1.0:
        root = (root if root.dtype == torch.float64 else root.float()) * loss_scale
    _call_user(torch.autograd.backward, (root,), {})  # callers of the replay are not its callers


def loss_in(result: Any) -> Any:
    """Return the loss in the result of a step: itself, "loss" in a dict, or the first scalar of a tuple."""
    if isinstance(result, Mapping):
        return result["loss"] if "loss" in result else loss_in(list(result.values()))
    if isinstance(result, list | tuple):
        tensors = [x for x in result if isinstance(x, Tensor) and x.is_floating_point()]
        scalars = [x for x in tensors if x.numel() == 1]
        return next(iter(scalars + tensors), None)
    if hasattr(result, "loss"):  # model outputs of some libraries
        return result.loss
    return result


def eager() -> contextlib.AbstractContextManager[None]:
    """Return a context in which compiled functions and modules run eagerly."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def _set_scales(around: Surroundings, snapshot: Snapshot, loss_scale: float | None) -> None:
    """Give guards and scalers the loss scale of the step that failed; the snapshot restores their own."""
    if loss_scale is None:
        return
    for scaler in around.scalers:
        scaler._init_scale = loss_scale
        if scaler._scale is not None:  # the scaler has scaled before
            snapshot.keep_memory(scaler._scale)
            scaler._scale.fill_(loss_scale)
    for optimizer in around.optimizers:
        if getattr(optimizer, "scales_loss", False):  # a guarded optimizer
            optimizer.guard_state.loss_scale.scale.fill_(loss_scale)


class _Judge:
    """Finds the values that should have been finite and are not."""

    def __init__(self, recorder: Recorder, around: Surroundings, result: Run) -> None:
        self.recorder, self.around, self.result = recorder, around, result

    def _parameters(self) -> list[tuple[str, Tensor]]:
        known = list(self.around.parameters.items())
        ids = {id(p) for _, p in known}
        more = [p for p in self.recorder.values.leaves.values() if id(p) not in ids]
        return known + [(f"parameter {i}", p) for i, p in enumerate(more)]

    def look_at_loss(self, loss: Any) -> None:
        tensors = [loss] if isinstance(loss, Tensor) else self.recorder.roots
        tensors = [t for t in tensors if t.is_floating_point()]
        for tensor in tensors:
            value = self.recorder.values.of(tensor)
            if not value.finite:
                self.result.bad.append(value.id)
        if tensors:
            self.result.loss_finite = all(self.recorder.values.of(t).finite for t in tensors)
        elif isinstance(loss, float):
            self.result.loss_finite = math.isfinite(loss)
            if not self.result.loss_finite:
                self._blame_last_read()

    def _blame_last_read(self) -> None:
        """Blame the last non-finite value that was read into a Python number, because the loss is one."""
        trace = self.recorder.trace
        for step in reversed(trace.steps):
            bad = [v for v in trace.inputs_of(step) if not v.finite]
            if bad and "_local_scalar_dense" in step.primitive:
                self.result.bad.append(bad[0].id)
                return

    def look_at_gradients(self) -> None:
        """Check gradients at the end, and before each optimizer step, after which they may be cleared."""
        if self.result.bad_gradients:
            return
        squares = 0.0
        for name, p in self._parameters():
            if p.grad is None:
                continue
            self.result.backward = True
            value = self.recorder.values.of(p.grad)
            if value.finite:
                squares += _square(local_of(p.grad))
            else:
                self.result.bad.append(value.id)
                self.result.bad_gradients.append(name)
        for name, value in self.recorder.gradients:
            self.result.backward = True
            if not value.finite:
                self.result.bad.append(value.id)
                self.result.bad_gradients.append(name)
        self.result.norm = max(self.result.norm, squares**0.5)

    def look_at_parameters(self, before: Mapping[str, Value]) -> None:
        if self.result.bad_gradients:
            return  # the update only spreads these values
        for name, p in self.around.parameters.items():
            value = self.recorder.values.of(p)
            if not value.finite and before[name].finite:
                self.result.bad.append(value.id)
                self.result.bad_updates.append(name)

    def look_at_error(self, error: Exception) -> None:
        """Turn an error about labels, or about non-finite or invalid numbers, into a finding.

        Raises:
            Exception: the error, if it is about something else.
        """
        failure = self.recorder.failure
        if raised_by_us(error) and not (failure and failure.error is error):
            self.result.unreplayed = f"the replay failed with {last_line(error)}"
            return
        if failure is None or failure.error is not error:
            raise error
        if not isinstance(error, BadLabelsError):
            said = str(error).splitlines()[0] if str(error) else ""
            self.result.notes.append(f"the step raised {type(error).__name__}: {said}")
        if failure.labels:
            self.result.labels = failure.labels
            self.result.findings = [refusal_of(self.recorder.trace, failure.step)]
            return
        unfit = [v for v in self.recorder.trace.inputs_of(failure.step) if not v.finite]
        for value in unfit:
            self.result.bad.append(value.id)
        if not unfit:
            if not rejects_numbers(error):
                raise error
            self.result.findings = [refusal_of(self.recorder.trace, failure.step)]

    def conclude(self) -> None:
        """Trace the bad values back to their origins."""
        if self.result.findings:
            return
        trace, recorder, rank = self.recorder.trace, self.recorder, own_rank()
        if not self.result.bad:
            self._look_at_what_was_sent()
        origins = own_first(first_causes(trace, self.result.bad))
        self.result.received = rank is not None and bool(origins) and is_received(origins[0])
        for origin in origins:
            wide = recorder.wide.get(origin.step.index) if origin.step else None
            finding = finding_of(trace, origin, wide_finite=wide)
            if rank is not None:
                spread = (
                    () if is_received(origin) else sent_through(trace, recorder.sent, origin, finding.place)
                )
                finding = replace(finding, shard=as_rank(rank), rank=rank, spread=spread)
            self.result.findings.append(finding)
        if origins and origins[0].step is not None:
            steps = on_the_way(trace, self.result.bad, recorder.kept.at_edge)
            self.result.left = places_left(self.result.findings, steps)
            self.result.read = recorder.kept.of_operation(trace, origins[0].step)
            self.result.labels = recorder.labels.get(origins[0].step.index, "")

    def _look_at_what_was_sent(self) -> None:
        """Blame what this rank made and gave to a collective, although its own part of the gradients is
        finite."""
        trace = self.recorder.trace
        for step in self.recorder.sent:
            bad = made_here(trace, step)
            if bad:
                self.result.bad += bad
                self.result.notes.append(f"a value went to other ranks through {step.operation}")
                return


def _square(tensor: Tensor) -> float:
    x = tensor._values() if tensor.is_sparse else tensor
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.numel() or not x.is_floating_point():
        return 0.0
    norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return norm * norm
