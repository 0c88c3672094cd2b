"""One operation that went wrong, as reports show it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stablenum._support.pickled_fields import pickled_by_name
from stablenum.diagnosis.replay.constants import infinite_constant, infinite_in, is_placed_nan
from stablenum.diagnosis.replay.operations import ANSWERING, MOVING, SELECTING
from stablenum.diagnosis.replay.patterns import by_hand, is_squared, lost_number, rows_of
from stablenum.diagnosis.replay.source_files import lines_around, package_of
from stablenum.diagnosis.replay.trace import Step, Trace, Value
from stablenum.diagnosis.replay.upstream import Upstream, outlier_before, upstream_of
from stablenum.diagnosis.replay.values import MOST_VALUES, Place, TensorStats, plain
from stablenum.diagnosis.replay.walk import Origin, is_clipped, is_healed, is_selected, reads_data
from stablenum.diagnosis.replay.written import is_written_data

__all__ = ["Finding", "finding_of", "places_left", "refusal_of"]


@pickled_by_name
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The operation at which a value was first not finite.

    Attributes:
        operation: the name by which users call the operation; "input", "parameter", "buffer" or "state" for a
            value that was bad before anything was computed.
        phase: "forward", "backward" or "update"; "before" for a value that was bad before.
        kind: "nan" or "inf"; "error" for an operation that raised.
        primitive: the framework's own name for the operation.
        name: for a value that was bad before, the parameter's name or the path into the arguments.
        warned: what it warned of.
        module: the path of the module, or the name stack.
        maker: what is known to have made a value that was bad before, such as "NumPy's log".
        place: the user's line; for a backward operation, the line of the forward operation.
        around: the numbered lines of source around the place.
        frames: the user's call stack, outermost first.
        where: the place inside a loop, such as "iteration 3 of scan".
        inputs: statistics of the tensors that were read; for a derivative, those that the user's operation
            read, if they are known.
        outputs: statistics of the tensors that were made.
        received: for a derivative whose ``inputs`` are the user's, what the derivative itself read.
        scalars: plain numbers among the arguments (for a derivative, of the user's operation), at most four.
        placed: whether the operation read infinities that a mask or a constant put there.
        selected: whether a later ``where`` or mask discards part of the result, so that a gradient of 0 comes
            back.
        value_finite: for a derivative, whether the value of the operation itself is finite.
        healed: whether nothing bad is left after it in the forward pass.
        clipped: whether a later clip does so, and no ``where`` or mask.
        squared: whether the result is squared before anything selects from it.
        constant: what is said of a single number of +inf: a constant with which the operation computes, or a
            value that was bad before.
        lost: what is said of a small number (eps) before the operation that is 0 in its format.
        options: of a function over rows, arguments of the user's call, as the steps of the trace have them.
        by_hand: the function of which the operation is a part, written by hand, such as "softplus".
        library: the library's function, or the installed package, that called the operation.
        derivative: whether the operation belongs to the framework's derivative, not to one that the user
            wrote.
        wide_finite: whether the operation is finite in float32; None if this was not tried.
        data: whether the infinities that it read are the data of a layer, which is never masked.
        upstream: what made the numbers that it read.
        outlier: which input holds entries that are far from the rest, if it reads such.
        shard: of a program that runs in several places, that in which the value was born, such as "the shard
            data=2 (device 2)" or "rank 3"; "" elsewhere.
        rank: its number, if it is a single one: of the device in JAX, of the process in PyTorch.
        spread: the operations through which the value reached other shards, such as "psum (line 24)".

    Example:
        >>> x = TensorStats(dtype="float32", shape=(1,), size=1, min=0.0, max=0.0, amax=0.0, zero=1)
        >>> f = Finding(operation="log", phase="forward", kind="inf", inputs=(x,), place=Place("a.py", 3))
        >>> str(f)
        'a.py:3: log gives inf (forward)'
    """

    operation: str
    phase: str
    kind: str
    primitive: str = ""
    name: str = ""
    maker: str = ""
    warned: str = ""
    module: str = ""
    place: Place | None = None
    around: tuple[tuple[int, str], ...] = ()
    frames: tuple[Place, ...] = ()
    where: str = ""
    inputs: tuple[TensorStats, ...] = ()
    outputs: tuple[TensorStats, ...] = ()
    received: tuple[TensorStats, ...] = ()
    scalars: tuple[float, ...] = ()
    placed: bool = False
    selected: bool = False
    healed: bool = False
    clipped: bool = False
    value_finite: bool = True
    squared: bool = False
    constant: str = ""
    lost: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    by_hand: str = ""
    library: str = ""
    derivative: bool = False
    wide_finite: bool | None = None
    data: bool = False
    upstream: Upstream = field(default_factory=Upstream)
    outlier: str = ""
    shard: str = ""
    rank: int | None = None
    spread: tuple[str, ...] = ()

    @property
    def own_derivative(self) -> bool:
        """Whether the operation is part of a derivative that the user wrote."""
        return self.phase == "backward" and not self.derivative

    @property
    def gives(self) -> str:
        """What it gives, in words, such as "NaN" or "-inf"."""
        if self.kind == "nan":
            return "NaN"
        made = self.outputs[:1]
        return "-inf" if any(s.neginf and not s.posinf for s in made) else "inf"

    @property
    def own_frame(self) -> Place | None:
        """The innermost frame of the user's own code, which is not in an installed package."""
        return next((p for p in reversed(self.frames) if not package_of(p.file)), None)

    def __str__(self) -> str:
        return f"{self._said} on {self.shard}" if self.shard else self._said

    @property
    def _said(self) -> str:
        what = self.gives
        if self.phase == "before":
            captured = self.name.startswith("captured ")
            named = (
                self.name if captured else f"{self.operation} {self.name!r}" if self.name else self.operation
            )
            text = f"{named} holds {what} before the step"
            if self.maker:
                text = f"{self.maker} gives the {what} that {named} holds before the step"
            return f"{self.place}: {text}" if self.place else text
        if self.maker:
            read = "the bad data" if self.data else f"the {what} of a setting"
            return f"{self.place}: {self.maker} gives {read} that {self.operation} reads ({self.phase})"
        of = "the derivative of " if self.derivative else ""
        details = ", ".join(d for d in (self.phase, self.module and f"in {self.module}", self.where) if d)
        does = "rejects its arguments" if self.kind == "error" else f"gives {what}"
        return f"{self.place or 'unknown place'}: {of}{self.operation} {does} ({details})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        d = {k: getattr(self, k) for k in self.__slots__}
        d["place"] = None if self.place is None else asdict(self.place)
        d["frames"] = [asdict(f) for f in self.frames]
        d["scalars"] = plain(self.scalars)
        d["options"] = {k: plain(v) for k, v in self.options.items()}
        d["inputs"] = [s.to_dict() for s in self.inputs]
        d["outputs"] = [s.to_dict() for s in self.outputs]
        d["received"] = [s.to_dict() for s in self.received]
        d["upstream"] = asdict(self.upstream)
        d["spread"] = list(self.spread)
        return d

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Finding:
        """Return the object from which :meth:`to_dict` made ``d``."""
        return cls(
            **{
                **d,
                "place": None if d["place"] is None else Place(**d["place"]),
                "around": tuple((int(n), text) for n, text in d["around"]),
                "frames": tuple(Place(**f) for f in d["frames"]),
                "scalars": tuple(float(x) for x in d["scalars"]),
                "options": {k: tuple(v) if isinstance(v, list) else v for k, v in d["options"].items()},
                "inputs": tuple(TensorStats.from_dict(s) for s in d["inputs"]),
                "outputs": tuple(TensorStats.from_dict(s) for s in d["outputs"]),
                "received": tuple(TensorStats.from_dict(s) for s in d["received"]),
                "upstream": Upstream.from_dict(d["upstream"]),
                "spread": tuple(d["spread"]),
            }
        )


def places_left(findings: Sequence[Finding], steps: Iterable[Step]) -> tuple[str, ...]:
    """Return the places of other operations than that of the first finding, in words.

    Args:
        findings: the first cause first.
        steps: those that go wrong on the way from it.
    """
    if not findings:
        return ()
    first, *others = findings
    places = [(f.place, f.operation) for f in others] + [(s.place, s.operation) for s in steps]
    left = dict.fromkeys(p for p in places if p[0] is not None and p != (first.place, first.operation))
    if first.by_hand:  # the function takes the place of the whole line
        left = {p: None for p in left if p[0] != first.place}
    same = first.place.file if first.place else ""
    return tuple(f"{f'line {p.line}' if p.file == same else p} ({what})" for p, what in left if p is not None)


def refusal_of(trace: Trace, step: Step) -> Finding:
    """Return the finding to show for a step that raised an error over its arguments."""
    return Finding(
        operation=step.operation,
        phase=step.phase,
        kind="error",
        primitive=step.primitive,
        module=step.module,
        place=step.place,
        around=lines_around(step.place) if step.place else (),
        frames=step.frames,
        inputs=tuple(v.stats for v in trace.inputs_of(step) if v.stats),
    )


def _meets_zero(trace: Trace, step: Step) -> bool:
    """Return whether a gradient of 0 arrived at a derivative. It gives NaN (0 x inf or 0 / 0); other
    gradients give inf."""
    if step.forward is None:
        return True
    reached: set[int] = set()
    for s in trace.steps[step.index :]:
        # In between, the value may be moved: a loop stacks it, and the backward loop unstacks it.
        same = s.forward == step.forward or s.operation in MOVING - SELECTING
        if s is step or (same and reached.intersection(s.inputs)):
            reached.update(s.outputs)
    return any(trace.values[i].nan for i in reached)


def _moves_nan(trace: Trace, origin: Origin) -> bool:
    """Return whether a step moves, or computes with, a NaN that it read, which then is a constant."""
    step = origin.step
    if step is None or origin.kind != "nan":
        return False
    read = [v for v in trace.inputs_of(step) if v.nan]
    if step.operation in MOVING | {"add", "div", "mul", "sub"}:
        return bool(read)
    # Libraries hold a NaN ready for where no result is defined; data into which one was written are not such.
    return step.phase == "forward" and any(not is_placed_nan(trace, v) for v in read)


# What makes a batch of data.
_BATCHING = {"cat", "gather", "index", "slice", "stack"}
_CARRYING = MOVING - SELECTING | {"cast"}


def _reader(trace: Trace, value: int) -> Step | None:
    """Return the first step that computes with a value, which may have been moved before, as into a batch;
    if there is none, the first that reads it. A parameter is looked up where it is read."""
    first, moved = None, {value}
    batching = _BATCHING if trace.values[value].role == "input" else ()
    split: Step | None = None
    for step in trace.steps:
        if moved.isdisjoint(step.inputs):
            continue
        if _splits(step, value, split):
            split = step
            moved.update(step.outputs)
            continue
        if first is None or first.index < trace.begin:
            first = step
        prepares = step.index < trace.begin and step.operation in _CARRYING
        if step.shards and step.operation in _CARRYING:  # split into shards, without its first axis perhaps
            prepares |= value in step.inputs or step.place == first.place
        if prepares or step.operation in batching:
            moved.update(step.outputs)
        elif step.operation in MOVING - SELECTING:
            return first
        elif any(not v.finite for v in trace.outputs_of(step)):  # not a test of finiteness
            return step
    return first or split


def _splits(step: Step, value: int, before: Step | None) -> bool:
    """Return whether a step gives a shard its part of a value, or takes off the first axis of that part."""
    if not step.shards or step.operation not in _CARRYING:
        return False
    whole = step.operation == "index" and value in step.inputs
    return whole or (before is not None and step.place == before.place)


def _shown(trace: Trace, value: Value) -> Step | None:
    """Return the step whose line is shown for a value from outside: that which brought it, if it is known and
    the line is the user's own, or else that which first computes with it."""
    reader = _reader(trace, value.id)
    known = [s for s in (value.entrance, reader) if s is not None and s.place is not None]
    own = [s for s in known if s.place is not None and not package_of(s.place.file)]
    return next(iter(own + known), reader)


def _own_part(step: Step | None, *, entrance: bool) -> tuple[Place | None, tuple[Place, ...]]:
    """Return the line and the call stack of a step; of one that brings data, down to the user's own code."""
    if step is None:
        return None, ()
    own = [i for i, place in enumerate(step.frames, 1) if not package_of(place.file)]
    frames = step.frames[: own[-1]] if entrance and own else step.frames
    return (frames[-1] if entrance and own else step.place), frames


def finding_of(trace: Trace, origin: Origin, *, wide_finite: bool | None = None) -> Finding:
    """Return the finding to show for an origin."""
    step = origin.step
    if step is None:
        reader = _shown(trace, origin.value)
        place, frames = _own_part(reader, entrance=reader is origin.value.entrance)
        stats = origin.value.stats
        number = origin.value.role in ("input", "constant") and stats is not None and stats.size == 1
        return Finding(
            operation=origin.value.role or "input",
            phase="before",
            kind=origin.kind,
            name=origin.value.name,
            maker="" if origin.placed else origin.value.maker,
            module=reader.module if reader else "",
            place=place,
            around=lines_around(place) if place else (),
            frames=frames,
            outputs=(stats,) if stats else (),
            placed=origin.placed,
            constant=infinite_in(stats.dtype) if stats and number and stats.posinf else "",
        )
    written = any(math.isnan(x) for x in step.scalars) and step.operation not in ANSWERING
    if written or _moves_nan(trace, origin) or is_written_data(trace, step):
        # A NaN or an infinity written in the user's code.
        return Finding(
            operation="constant",
            phase="before",
            kind=origin.kind,
            module=step.module,
            place=step.place,
            around=lines_around(step.place) if step.place else (),
            frames=step.frames,
        )
    derivative = step.phase == "backward" and step.forward is not None
    forward = trace.steps[step.forward] if step.forward is not None else step
    own = tuple(v.stats for v in trace.inputs_of(step) if v.stats)
    users = trace.of_the_user.get(step.index, ()) if derivative else ()
    zero = _meets_zero(trace, step)
    selected = zero and is_selected(trace, forward)
    read = users or own
    whole = by_hand(trace, forward) if forward.phase == "forward" else ""
    return Finding(
        operation=step.operation,
        phase=step.phase,
        kind=origin.kind,
        primitive=step.primitive,
        name=origin.source.name if origin.source is not None else "",
        module=step.module,
        place=step.place,
        around=lines_around(step.place) if step.place else (),
        frames=step.frames,
        where=step.where,
        inputs=read,
        received=own if users else (),
        outputs=tuple(v.stats for v in trace.outputs_of(step) if v.stats),
        scalars=forward.scalars[:MOST_VALUES],
        placed=origin.placed,
        data=origin.placed and not derivative and reads_data(trace, step),
        selected=selected,
        healed=selected and is_healed(trace, forward),
        value_finite=not derivative or all(v.finite for v in trace.outputs_of(forward)),
        constant=str(infinite_constant(trace, step) or ""),
        squared=zero and is_squared(trace, forward),
        lost=lost_number(trace, forward, read),
        options=rows_of(trace, forward) if whole else forward.options,
        by_hand=whole,
        library=step.library or (package_of(step.place.file) if step.place else ""),
        clipped=zero and not selected and is_clipped(trace, forward),
        derivative=derivative,
        wide_finite=wide_finite,
        upstream=upstream_of(trace, step),
        outlier=outlier_before(trace, step),
    )
