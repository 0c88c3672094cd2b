"""The dispatch mode that records a Trace: every operation below autograd and autocast, as it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stablenum.diagnosis.replay.trace import Step, Trace, Value
from stablenum_torch._diagnosis.replay.collectives import (
    Collective,
    collective_of,
    faked,
    wait_of,
    wrapped,
)
from stablenum_torch._diagnosis.replay.contexts import Context, Contexts, last_of
from stablenum_torch._diagnosis.replay.flags import (
    CLEAN,
    Flags,
    bad_positions,
    flags_of,
    outliers_of,
    stats_of,
)
from stablenum_torch._diagnosis.replay.graph import nodes_below
from stablenum_torch._diagnosis.replay.in_float32 import finite_in_float32
from stablenum_torch._diagnosis.replay.kept_arguments import KeptArguments
from stablenum_torch._diagnosis.replay.labels import check_labels, is_index_error, without_valid_target
from stablenum_torch._diagnosis.replay.loaders import brings_storage, takes_from_workers
from stablenum_torch._diagnosis.replay.module_paths import ModulePaths
from stablenum_torch._diagnosis.replay.naming import operation_name
from stablenum_torch._diagnosis.replay.schemas import (
    Operation,
    describe,
    numbers_in,
    options_in,
    tensors_in,
    written_by,
)
from stablenum_torch._diagnosis.replay.snapshot import Snapshot
from stablenum_torch._diagnosis.replay.source_lines import survey
from stablenum_torch._diagnosis.replay.tensor_values import TensorValues

__all__ = ["Failure", "Recorder", "rejects_numbers", "require_grad"]

# Overwritten tensors are cloned only to be described; cloning more elements than this costs too much.
_MOST_CLONED = 2**24
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Failure:
    """An operation that raised."""

    error: Exception
    step: Step
    labels: str = ""


@dataclass(slots=True)
class _Before:
    """The values to keep before a call runs."""

    inputs: list[int]
    written: list[Tensor]
    clones: dict[int, Tensor] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records a Trace.

    Args:
        snapshot: keeps everything that is about to be written.
        names: id of a tensor -> (role, name).
        paths: finds the paths of modules.
        stop: the code object of the function that calls the user's function; the stack is read up to it.

    Attributes:
        trace: what is recorded.
        values: the value of each tensor.
        failure: the last operation that raised.
        labels: what is wrong with the labels that a step read, by step.
        wide: whether a step in low precision is finite in float32, by step.
        kept: the arguments of operations with an edge, or that a function of ours can replace.
        contexts: where the operations run.
        gradients: results of ``torch.autograd.grad``, with names.
        public: the public function that is running.
        public_options: the axis that it was given.
        roots: tensors from which backward passes started.
        most: after so many steps nothing more is recorded; None for no limit.
        sent: collectives that took a value that is not finite from this rank.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        snapshot: Snapshot,
        names: dict[int, tuple[str, str]],
        paths: ModulePaths,
        stop: CodeType,
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.values = TensorValues(self.trace, snapshot, names)
        self.failure: Failure | None = None
        self.labels: dict[int, str] = {}
        self.wide: dict[int, bool] = {}
        self.kept = KeptArguments()
        self.contexts = Contexts(self.trace, paths)
        self.gradients: list[tuple[str, Value]] = []
        self.public = ""
        self.public_options: dict[str, Any] = {}
        self.roots: list[Tensor] = []
        self.most: int | None = None
        self.sent: list[Step] = []
        # An operation on a DTensor that requires a gradient, and whether the running one is its local part.
        self._wrapped: Callable[..., Any] | None = None
        self._below = False
        self._snapshot, self._names, self._paths, self._stop = snapshot, names, paths, stop
        self._grad, self._in_function = True, False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if wrapped(types):  # the operations below follow
            self._wrapped = func if torch.is_grad_enabled() and require_grad(args, kwargs) else None
            return NotImplemented
        if (self.most is not None and len(self.trace.steps) >= self.most) or faked():
            return func(*args, **kwargs)
        if wait_of(func):  # what is waited for is read later
            return func(*args, **kwargs)
        collective = collective_of(func)
        if collective is not None:
            return self._communicate(func, collective, args, kwargs)
        self._grad = torch.is_grad_enabled()
        with torch.no_grad():
            operation = describe(func)
            seen = survey(self._stop)
            self._in_function = seen.function and not self._grad
            context = self.contexts.of(operation, seen, self.public, grad=self._grad)
            before = self._before(operation, args, kwargs)
        try:
            check_labels(operation.name, args, kwargs)
            result = func(*args, **kwargs)
        except Exception as error:
            with torch.no_grad():
                self._failed(operation, context, before, args, error)
            raise
        makes_node = self._in_function or (self._grad and require_grad(args, kwargs))
        self._below = func is self._wrapped
        with torch.no_grad():
            self._record(func, operation, context, before, (args, kwargs), result, makes_node=makes_node)
        return result

    def _communicate(
        self,
        func: Callable[..., Any],
        collective: Collective,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record a collective. What it writes is known when it is read, after the program has waited."""
        with torch.no_grad():
            read = collective.reads(args, kwargs)
            inputs = [self.values.of(t) for t in read]
            for value, tensor in zip(inputs, read, strict=True):
                # A sum may overflow although no rank gives it a bad value.
                if (not value.finite or collective.adds) and value.stats is None:
                    value.stats = stats_of(tensor, name=value.name, at=bad_positions(tensor))
            seen = survey(self._stop)
            context = self.contexts.of(describe(func), seen, "", grad=torch.is_grad_enabled())
        result = func(*args, **kwargs)
        frames = seen.frames or seen.outer or context.frames
        step = self.trace.add_step(
            collective.name,
            inputs=[value.id for value in inputs],
            outputs=(),
            primitive=str(func),
            phase="backward" if seen.engine else context.phase,
            module=context.module,
            place=last_of(frames),
            frames=frames,
        )
        step.collective = True
        for tensor in collective.writes(args, result):
            self.values.note_pending(tensor, step)
        if not all(value.finite for value in inputs):
            self.sent.append(step)
        return result

    def begin_again(self, names: dict[int, tuple[str, str]]) -> None:
        """Prepare for recording after a pause: of what was seen before, tensors that are not finite are
        still known."""
        self.trace.begin = len(self.trace.steps)
        self._names.clear()
        self._names.update(names)
        self.values.forget_good()
        self.failure = None
        self.gradients.clear()
        self.roots.clear()

    def begin_backward(self, roots: Sequence[Tensor]) -> None:
        """Note the parameters that a backward pass reaches, even through a graph older than the replay."""
        self.roots += [t.detach() for t in roots]
        for node in nodes_below(roots):
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self.values.note_leaf(leaf)

    def note_gradients(self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Note the results of ``torch.autograd.grad``, which are not stored in any ``p.grad``."""
        for i, (of, gradient) in enumerate(zip(inputs, gradients)):
            if gradient is not None:
                name = self._names.get(id(of), ("", ""))[1] or f"result {i} of torch.autograd.grad"
                self.gradients.append((name, self.values.of(gradient)))

    # --- around a call -----------------------------------------------------------------------------

    def _before(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Before:
        given = [] if operation.shapes_only else list(tensors_in((args, kwargs)))
        written = written_by(operation, args, kwargs)
        fills = operation.name == "fill_" and all(map(self.values.holds_data, written))
        skipped = {id(t) for t in written} if operation.overwrites and not fills else set()
        # Literals (torch.tensor(...)) pass through a separate operation; a list of numbers is data.
        literal = operation.name.startswith("lift") and all(t.numel() <= 1 for t in given)
        role = "constant" if literal else ""
        asked = [t for t in given if id(t) not in skipped]
        inputs = [self.values.of(t, role=role, reads=not operation.view).id for t in asked]
        before = _Before(inputs, written)
        for generator in (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)):
            self._snapshot.keep_generator(generator)
        for tensor in written:
            self.values.before_write(tensor)
            if not operation.overwrites and tensor.is_floating_point() and tensor.numel() <= _MOST_CLONED:
                before.clones[id(tensor)] = tensor.detach().clone()
        return before

    def _record(
        self,
        func: Callable[..., Any],
        operation: Operation,
        context: Context,
        before: _Before,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        result: Any,
        *,
        makes_node: bool,
    ) -> None:
        results = list(tensors_in(result))
        written_ids = {id(t) for t in before.written}
        outputs = before.written + [t for t in results if id(t) not in written_ids]
        if operation.each and before.written:
            self._record_each(operation, context, before, call, outputs)
            return
        if brings_storage(operation, *call):
            step = self._add(operation, context, before.inputs, (), (), call, set())
            self.values.note_entrance(before.written, step)
            return
        flags = self._output_flags(operation, before, outputs)
        step = self._add(operation, context, before.inputs, outputs, flags, call, written_ids)
        if operation.name == "where":
            self._join_logdet(step, outputs)
        if takes_from_workers(operation, call[0]):
            self.values.taking = step
        news = not all(flag == CLEAN for flag in flags)
        if (step.phase == "forward" and (makes_node or self._below)) or (step.phase != "backward" and news):
            self.kept.keep(step, before.inputs, tensors_in(call), before.clones)
        self.contexts.nodes.record(step.index, operation.name, sure=makes_node)
        self._describe(func, operation, step, before, call, outputs)

    def _join_logdet(self, step: Step, outputs: Sequence[Tensor]) -> None:
        """Take the last part of ``torch.logdet``, NaN for a negative determinant, for the whole function."""
        parts = [self.trace.steps[v.producer] for v in self.trace.inputs_of(step) if v.producer is not None]
        here = [s for s in parts if s.place == step.place]
        whole = next((s for s in here if s.operation == "slogdet"), None)
        if whole is None or not any(math.isnan(x) for s in here for x in s.scalars):
            return
        step.operation, step.inputs = "logdet", whole.inputs
        if any(v.nan for v in self.trace.outputs_of(step)):
            self._keep_stats(step, outputs, list(zip(whole.inputs, self.kept.of(whole.index) or ())))

    def _output_flags(self, operation: Operation, before: _Before, outputs: Sequence[Tensor]) -> list[Flags]:
        if operation.empty:
            return [CLEAN] * len(outputs)
        if operation.view and not before.written and before.inputs:
            base = self.trace.values[before.inputs[0]]
            if base.finite or self.values.is_pending(outputs):
                return [CLEAN] * len(outputs)
        return [flags_of(t) for t in outputs]

    def _add(
        self,
        operation: Operation,
        context: Context,
        inputs: Sequence[int],
        outputs: Sequence[Tensor],
        flags: Sequence[Flags],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        written: set[int],
    ) -> Step:
        values = [self.trace.add_value(flags=f) for f in flags]
        forward = context.forward
        name = forward.operation if forward else operation_name(operation.name, context.public)
        if operation.name == "copy_" and len(inputs) == 1 and outputs:
            name = "cast" if _narrows(call[0]) else name
        if operation.name == "fill_" and len(inputs) > 1:  # x[:] = number writes into data, as x[0] does
            name = "copy"
        step = self.trace.add_step(
            name,
            inputs=inputs,
            outputs=values,
            primitive=operation.full,
            phase=context.phase,
            scalars=list(numbers_in(call)),
            module=context.module,
            place=context.place,
            frames=context.frames,
            forward=forward.index if forward else None,
            library=context.library,
            options=self.public_options or options_in(operation, *call),
        )
        for tensor, value in zip(outputs, values, strict=True):
            self.values.note(tensor, value, written=id(tensor) in written, uninitialised=operation.empty)
        return step

    def _record_each(
        self,
        operation: Operation,
        context: Context,
        before: _Before,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        outputs: Sequence[Tensor],
    ) -> None:
        """Record a step per element of a list, so that a failure in one is not attributed to the others."""
        given = [*call[0], *call[1].values()]
        lists = [list(tensors_in(x)) for x in given if isinstance(x, list | tuple)]
        n = max((len(x) for x in lists), default=0)
        known = {id(t): i for t, i in zip(tensors_in(call), before.inputs)}
        common = [known[id(x)] for x in given if isinstance(x, Tensor) and id(x) in known]
        written = {id(t) for t in before.written}
        for i in range(n):
            row = [x[i] for x in lists if len(x) == n]
            wrote = [t for t in row if id(t) in written]
            made = wrote or outputs[i : i + 1]
            read = [known[id(t)] for t in row if id(t) in known]
            step = self._add(
                operation, context, read + common, made, [flags_of(t) for t in made], call, written
            )
            if self._is_origin(step):
                self._keep_stats(step, made, [(v, before.clones.get(id(t), t)) for v, t in zip(read, row)])

    def _describe(
        self,
        func: Callable[..., Any],
        operation: Operation,
        step: Step,
        before: _Before,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        outputs: Sequence[Tensor],
    ) -> None:
        """Keep statistics of a step at which bad values first appear, while its inputs still exist."""
        if not self._is_origin(step):
            return
        read = [] if operation.shapes_only else list(tensors_in(call))
        written = {id(t) for t in before.written}
        if operation.overwrites:
            read = [t for t in read if id(t) not in written]
        known = before.inputs[max(0, len(before.inputs) - len(read)) :]  # what was filled comes first
        pairs = [(v, before.clones.get(id(t), t)) for v, t in zip(known, read)]
        changed = {v: self.values.changed(v, t) for v, t in pairs}
        step.inputs = tuple(changed.get(v, v) for v in step.inputs)
        pairs = [(changed[v], t) for v, t in pairs]
        self._keep_stats(step, outputs, pairs)
        if step.forward is not None:
            at = next((bad_positions(t) for t in outputs if any(flags_of(t))), None)
            self.trace.of_the_user[step.index] = self.kept.stats(self.trace, step.forward, at)
        said = without_valid_target(operation.name, call[0])
        if said:
            self.labels[step.index] = said
        if any(t.dtype in _LOW_PRECISION for t in outputs):
            wide = finite_in_float32(func, call, before.clones, written)
            if wide is not None:
                self.wide[step.index] = wide

    def _is_origin(self, step: Step) -> bool:
        """Return whether a step makes a NaN or an infinity although it read none."""
        made, read = self.trace.outputs_of(step), self.trace.inputs_of(step)
        nan = any(v.nan for v in made) and not any(v.nan for v in read)
        return nan or (any(v.inf for v in made) and not any(v.inf for v in read))

    def _keep_stats(
        self, step: Step, outputs: Sequence[Tensor], inputs: Sequence[tuple[int, Tensor]]
    ) -> None:
        at, shape = None, None
        for value, tensor in zip(self.trace.outputs_of(step), outputs):
            if not value.finite:
                positions = bad_positions(tensor)
                value.stats = stats_of(tensor, at=positions)
                if at is None:
                    at, shape = positions, tensor.shape
        for index, tensor in inputs:
            value = self.trace.values[index]
            if value.stats is None:
                value.stats = stats_of(tensor, name=value.name, at=at if tensor.shape == shape else None)
                value.outliers = value.outliers or outliers_of(tensor)

    def _failed(
        self,
        operation: Operation,
        context: Context,
        before: _Before,
        args: tuple[Any, ...],
        error: Exception,
    ) -> None:
        step = self._add(operation, context, before.inputs, (), (), (args, {}), set())
        if operation.name == "_linalg_check_errors":  # reports on the operation whose result it checks
            made_by = self.trace.values[before.inputs[0]].producer
            step = step if made_by is None else self.trace.steps[made_by]
        for index, tensor in zip(before.inputs, tensors_in(args)):
            value = self.trace.values[index]
            value.stats = value.stats or stats_of(tensor, name=value.name)
        labels = f"{step.operation}: {error}" if is_index_error(operation.name, error) else ""
        self.failure = Failure(error, step, labels.splitlines()[0] if labels else "")

    def public_failed(self, name: str, error: Exception) -> None:
        """Note that a public function rejected its arguments before any operation ran."""
        if self.failure is not None and self.failure.error is error:
            return
        if not is_index_error(name, error):
            return
        seen = survey(self._stop)
        step = self.trace.add_step(
            operation_name(name, name),
            inputs=(),
            outputs=(),
            module=self._paths.path(seen.modules),
            place=last_of(seen.frames),
            frames=seen.frames,
        )
        self.failure = Failure(error, step, f"{name}: {error}".splitlines()[0])


def rejects_numbers(error: BaseException) -> bool:
    """Return whether finite numbers were rejected: a singular matrix, a probability of 2."""
    said = str(error)
    return isinstance(error, torch.linalg.LinAlgError) or "between 0 and 1" in said or "multinomial" in said


def _narrows(args: tuple[Any, ...]) -> bool:
    """Return whether a copy goes to a format with less range."""
    if len(args) < 2 or not isinstance(args[1], Tensor):
        return False
    target, source = args[0], args[1]
    if not (target.is_floating_point() and source.is_floating_point()):
        return False
    return bool(torch.finfo(target.dtype).max < torch.finfo(source.dtype).max)


def require_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether gradients of an argument are wanted."""
    return any(t.requires_grad for t in tensors_in((args, kwargs)))
