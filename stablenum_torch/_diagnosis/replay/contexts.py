"""Where, and in which phase, each operation runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.replay.values import Place
from stablenum_torch._diagnosis.replay.module_paths import ModulePaths
from stablenum_torch._diagnosis.replay.phases import NodeMap
from stablenum_torch._diagnosis.replay.schemas import Operation
from stablenum_torch._diagnosis.replay.source_lines import Survey

__all__ = ["Context", "Contexts", "last_of"]


@dataclass(slots=True)
class Context:
    """Where, and in which phase, an operation runs."""

    phase: str
    place: Place | None
    frames: tuple[Place, ...]
    module: str
    public: str
    forward: Step | None = None
    library: str = ""


class Contexts:
    """Finds the contexts of operations, one after another.

    Args:
        trace: what is recorded.
        paths: finds the paths of modules.

    Attributes:
        nodes: the steps that made autograd's nodes.
        accumulated: whether a backward pass has written gradients of parameters.
        on_update: called when an optimizer begins to step.
    """

    def __init__(self, trace: Trace, paths: ModulePaths) -> None:
        self.nodes = NodeMap()
        self.accumulated = False
        self.on_update: Callable[[], None] | None = None
        self._trace, self._paths = trace, paths
        self._updating = False
        self._last: Context | None = None
        self._lines: dict[tuple[str, str], tuple[Place | None, tuple[Place, ...]]] = {}

    def of(self, operation: Operation, seen: Survey, public: str, *, grad: bool) -> Context:
        """Return the context of the operation that is about to run.

        Args:
            operation: the operation.
            seen: what the stack shows.
            public: the public function that is running, if the stack does not show it.
            grad: whether gradients are enabled.
        """
        node = torch._C._current_autograd_node()
        public = seen.public or public
        module = self._paths.path(seen.modules)
        if node is not None:
            return self._in_backward(operation, seen, node, module, public)
        updating = seen.update and not seen.modules and not grad
        if updating and not self._updating and self.on_update is not None:
            self.on_update()
        self._updating = updating
        context = Context(
            "update" if updating else "forward",
            last_of(seen.frames),
            seen.frames,
            module,
            public,
            library=seen.library,
        )
        if context.place is None and self._last is not None and not updating:
            context.place, context.frames = self._last.place, self._last.frames
        if not updating:
            self._last = context
            self._lines[module, operation.name] = (context.place, context.frames)
        return context

    def _in_backward(
        self, operation: Operation, seen: Survey, node: Any, module: str, public: str
    ) -> Context:
        self.accumulated = self.accumulated or "AccumulateGrad" in node.name()
        place = last_of(seen.frames)
        if seen.checkpoint:
            # The forward pass is running again. If the stack has no frame of the user's code, the line is
            # that of the first run.
            frames = seen.frames
            if place is None:
                place, frames = self._lines.get((module, operation.name), (None, ()))
            return Context("forward", place, frames, module, public)
        made_by = self.nodes.step_of(node)
        step = None if made_by is None else self._trace.steps[made_by]
        if place is not None:
            where = module or (step.module if step else "")
            return Context("backward", place, (*seen.outer, *seen.frames), where, public)
        if step is None:
            return Context("backward", last_of(seen.outer), seen.outer, module, public)
        # The derivative of a derivative belongs to the same forward operation.
        root = step if step.forward is None else self._trace.steps[step.forward]
        return Context("backward", root.place, root.frames, root.module, "", root, root.library)


def last_of(frames: Sequence[Place]) -> Place | None:
    """Return the innermost of the frames."""
    return frames[-1] if frames else None
