"""A replayed step as a program: what was computed from what, and which values were not finite.

Adapters record the program while they replay the step; all conclusions are drawn in the core.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stablenum.diagnosis.replay.outliers import Outliers
from stablenum.diagnosis.replay.values import Place, TensorStats

__all__ = ["Step", "Trace", "Value"]


@dataclass(slots=True, kw_only=True)
class Value:
    """One tensor at one point in time. A tensor that is written in place is a new value after each write.

    Attributes:
        id: the value's index in ``Trace.values``.
        nan, posinf, neginf: whether the value holds any NaN, inf or -inf.
        producer: the index of the step that made the value; None if the value came from outside.
        role: for a value from outside, "parameter", "buffer", "state", "input" or "constant".
        name: for a value from outside, a parameter's name or a path into the arguments.
        stats: the statistics, which are kept for values that are not finite and for the inputs of the steps
            that made them.
        maker: for a value from outside, what is known to have made it.
        entrance: for a value from outside, the step that brought it, if it is known.
        outliers: the entries that are far from the rest, which are looked for in inputs from outside and in
            those of the steps that made a value that is not finite.
    """

    id: int
    nan: bool = False
    posinf: bool = False
    neginf: bool = False
    producer: int | None = None
    role: str = ""
    name: str = ""
    stats: TensorStats | None = None
    maker: str = ""
    entrance: Step | None = None
    outliers: Outliers | None = None

    @property
    def inf(self) -> bool:
        """Whether the value holds inf or -inf."""
        return self.posinf or self.neginf

    @property
    def finite(self) -> bool:
        """Whether the value holds neither NaN nor an infinity."""
        return not (self.nan or self.inf)


@dataclass(slots=True, kw_only=True)
class Step:
    """One operation of the replay.

    Attributes:
        index: the step's place in the order of execution.
        operation: the name by which users call the operation, such as "log", "softmax", "matmul" or "div";
            for a backward step, the forward operation that it differentiates ("sqrt" for the division in the
            derivative of sqrt).
        primitive: the framework's own name, such as "aten.div.Tensor" or "div".
        phase: "forward", "backward" or "update".
        inputs, outputs: indices into ``Trace.values``.
        scalars: plain numbers among the arguments, such as the -inf of a ``masked_fill`` or an exponent.
        module: the path of the module, or the name stack; "" at top level.
        place: the user's line; for a backward step, the line of the forward operation, unless the user wrote
            the backward pass.
        frames: the user's call stack, outermost first, ``place`` last.
        forward: for a backward step, the index of the forward step that it differentiates; None for a step
            that the user wrote (a custom backward), which is judged as if it were a forward step.
        where: the place inside a loop, such as "iteration 3 of scan"; "" elsewhere.
        library: the library's function through which the user's line called the step; "" for none.
        compute_dtype: the format in which the step computes, if it differs from that of its outputs.
        options: of a function over rows, the "axis", "keepdims", "correction" and "ord" of the user's call,
            and the "count" of elements that it takes together, as far as they are known.
        roles: of a product, a convolution or a look-up in a table: for each input, what becomes of each of
            its axes, "summed", "kept", "batch" or "window 0"; a row that is looked up is "summed". Empty for
            other operations, and for those that are not compared.
        shards: for a step that each shard of a mesh (or each rank) runs for itself, the numbers of those that
            ran it; empty elsewhere.
        collective: whether the step takes values of several shards to those in ``shards``.
    """

    index: int
    operation: str
    primitive: str = ""
    phase: str = "forward"
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    scalars: tuple[float, ...] = ()
    module: str = ""
    place: Place | None = None
    frames: tuple[Place, ...] = ()
    forward: int | None = None
    where: str = ""
    compute_dtype: str = ""
    library: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    roles: tuple[tuple[str, ...], ...] = ()
    shards: tuple[int, ...] = ()
    collective: bool = False

    @property
    def writes(self) -> bool:
        """Whether the step writes into memory that was there before, as PyTorch's functions in place do."""
        name, _, overload = self.primitive.removeprefix("aten.").partition(".")
        return overload == "out" or (name.endswith("_") and not name.endswith("__"))


@dataclass(slots=True)
class Trace:
    """The steps in order of execution, and the values that they read and wrote.

    Attributes:
        values, steps: as they were added.
        begin: the index of the first step that is not a preparation, such as that of the data.
        of_the_user: index of a backward step -> statistics of what the forward operation read, which the user
            wrote.
    """

    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    begin: int = 0
    of_the_user: dict[int, tuple[TensorStats, ...]] = field(default_factory=dict)

    def add_value(
        self,
        *,
        flags: tuple[bool, bool, bool] = (False, False, False),
        role: str = "",
        name: str = "",
        stats: TensorStats | None = None,
    ) -> int:
        """Add a value that came from outside or whose step follows, and return its id.

        Args:
            flags: whether the value holds any NaN, inf and -inf.
            role, name, stats: as in :class:`Value`.
        """
        nan, posinf, neginf = flags
        value = Value(
            id=len(self.values), nan=nan, posinf=posinf, neginf=neginf, role=role, name=name, stats=stats
        )
        self.values.append(value)
        return value.id

    def add_step(
        self,
        operation: str,
        *,
        inputs: Sequence[int],
        outputs: Sequence[int],
        primitive: str = "",
        phase: str = "forward",
        scalars: Sequence[float] = (),
        module: str = "",
        place: Place | None = None,
        frames: Sequence[Place] = (),
        forward: int | None = None,
        where: str = "",
        compute_dtype: str = "",
        library: str = "",
        options: Mapping[str, Any] | None = None,
        shards: Sequence[int] = (),
    ) -> Step:
        """Add the next step. Its outputs are values that have just been added."""
        step = Step(
            index=len(self.steps),
            operation=operation,
            primitive=primitive or operation,
            phase=phase,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            scalars=tuple(scalars),
            module=module,
            place=place,
            frames=tuple(frames),
            forward=forward,
            where=where,
            compute_dtype=compute_dtype,
            library=library,
            options=options or {},
            shards=tuple(shards),
        )
        self.steps.append(step)
        for output in step.outputs:
            self.values[output].producer = step.index
        return step

    def inputs_of(self, step: Step) -> list[Value]:
        """Return the values that a step read."""
        return [self.values[i] for i in step.inputs]

    def outputs_of(self, step: Step) -> list[Value]:
        """Return the values that a step wrote."""
        return [self.values[i] for i in step.outputs]

    def places_infinity(self, step: Step) -> bool:
        """Return whether an infinity is among the plain numbers of a step, so that the step places it rather
        than computing it."""
        return any(math.isinf(s) for s in step.scalars)
