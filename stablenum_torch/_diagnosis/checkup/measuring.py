"""Record one step of a running script, and measure the values that its operations read and make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor

from stablenum.diagnosis.checkup.signals import BOUNDED, Signal, measure_signal
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.replay.values import Place
from stablenum_torch._diagnosis.replay.recorder import Recorder
from stablenum_torch._diagnosis.replay.schemas import Operation, tensors_in
from stablenum_torch._diagnosis.watch.script_recorder import recorder_of
from stablenum_torch._step.measure.norms import dense_values

__all__ = ["MeasuredStep", "MeasuringRecorder"]

# So many operations of a step are recorded at most, with the sizes of all their results. Chosen, not
# measured.
MOST = 20_000


class MeasuringRecorder(Recorder):
    """A recorder that also measures tensors, until the optimizer begins to step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.signals: dict[int, Signal] = {}

    def _before(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = super()._before(operation, args, kwargs)
        written = {id(t) for t in before.written} if operation.overwrites else set()
        read = (
            [] if operation.shapes_only else [t for t in tensors_in((args, kwargs)) if id(t) not in written]
        )
        for index, tensor in zip(before.inputs, read):
            if self.trace.values[index].producer is None:
                self._measure(index, tensor, "")
        return before

    def _add(
        self,
        operation: Operation,
        context: Any,
        inputs: Sequence[int],
        outputs: Sequence[Tensor],
        *rest: Any,
    ) -> Step:
        step = super()._add(operation, context, inputs, outputs, *rest)
        if operation.view and step.inputs:
            self._pass_on(step, outputs)
        elif context.phase != "update" and not operation.empty:
            for index, tensor in zip(step.outputs, outputs, strict=True):
                self._measure(index, tensor, step.operation if step.phase == "forward" else "")
        return step

    def _pass_on(self, step: Step, outputs: Sequence[Tensor]) -> None:
        """Take what is known of a tensor for a view of all its elements."""
        known = self.signals.get(step.inputs[0])
        for index, tensor in zip(step.outputs, outputs, strict=True):
            if known is not None and known.size == tensor.numel():
                self.signals[index] = known._replace(shape=tuple(tensor.shape))

    def _measure(self, index: int, tensor: Tensor, operation: str) -> None:
        value = self.trace.values[index]
        if index in self.signals or not value.finite or not tensor.is_floating_point() or tensor.is_meta:
            return
        numbers = dense_values(tensor.detach())
        if not numbers.numel():
            return
        wide = numbers if numbers.dtype is torch.float64 else numbers.float()
        measured = measure_signal(
            wide,
            operation if operation in BOUNDED else "",
            unit_axis=1 if wide.ndim in (4, 5) else -1,
            xp=torch_namespace,
        )
        self.signals[index] = Signal.of(
            tensor.shape, str(tensor.dtype).removeprefix("torch."), measured.tolist()
        )

    def written_on(self, tensor: Tensor) -> Place | None:
        """Return the line that wrote the present numbers of a tensor; None if it is not known."""
        made = self.values.of(tensor).producer
        while made is not None and not self.trace.steps[made].writes:  # a view of what was written
            made = next((self.trace.values[i].producer for i in self.trace.steps[made].inputs), None)
        return None if made is None else self.trace.steps[made].place


class MeasuredStep:
    """Records from now on until :meth:`close`. Compiled functions run eagerly during that time.

    Args:
        names: id of a tensor -> (role, name).
    """

    def __init__(self, names: dict[int, tuple[str, str]]) -> None:
        self._recorder: Any = recorder_of(names, MeasuringRecorder)
        self._recorder.most = MOST
        torch.compiler.set_stance("force_eager")
        self._recorder.__enter__()

    def close(self) -> None:
        """Stop recording."""
        self._recorder.__exit__(None, None, None)
        torch.compiler.set_stance("default")

    def written_on(self, tensor: Tensor) -> Place | None:
        """Return the line that wrote the present numbers of a tensor; None if it is not known."""
        return self._recorder.written_on(tensor)

    @property
    def trace(self) -> Trace:
        """The operations of the step."""
        return self._recorder.trace

    @property
    def signals(self) -> dict[int, Signal]:
        """What was measured, by the ids of the trace's values."""
        return self._recorder.signals

    @property
    def leaves(self) -> Iterable[int]:
        """The ids of the parameters that were seen."""
        return self._recorder.values.leaves.keys()
