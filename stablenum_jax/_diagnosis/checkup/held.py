"""What a model holds beside its parameters: running statistics, and weights that nothing trains."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from stablenum.diagnosis.checkup.course import UNTRAINED, Running
from stablenum.diagnosis.checkup.signals import Signal
from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.names import path_name

__all__ = ["held_in", "loss_scales", "numbers_in", "running_statistics"]

# A step that is given more numbers than this has its parameters among them. Chosen, not measured.
_MOST = 16

_PASSING = ("convert_element_type", "copy", "name", "reshape", "broadcast_in_dim", "squeeze")


def held_in(arguments: Any) -> list[tuple[str, str]]:
    """Return the role and the name of each leaf of a call's arguments.

    The role is "input"; "buffer" for what flax calls running statistics; and that of plain arrays for what a
    module of flax.nnx keeps as a plain ``nnx.Variable``, which is no parameter.
    """
    known = _variables()
    held = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(arguments)[0]:
        name = path_name(path)
        ours = "buffer" if name.rpartition(".")[2] in ("mean", "var") else "input"
        held.append(known.get(id(leaf), (ours, name)))
    return held


def loss_scales(held: Sequence[tuple[str, str]], leaves: Sequence[Any]) -> list[float]:
    """Return the loss scale among the inputs of a call, by its name; no more than one. An array of one
    element is the gain of a layer."""
    known = zip(held, leaves, strict=True)
    named = [leaf for (_, name), leaf in known if name.rpartition(".")[2] in ("scale", "loss_scale")]
    return [float(leaf) for leaf in named if is_floating(leaf) and jax.numpy.ndim(leaf) == 0][:1]


def numbers_in(held: Sequence[tuple[str, str]], leaves: Sequence[Any]) -> dict[str, float]:
    """Return the single floating-point numbers among the inputs of a call, by their names."""
    known = ((name, leaf) for (_, name), leaf in zip(held, leaves, strict=True))
    single = {n: x for n, x in known if isinstance(x, float) or (is_floating(x) and jax.numpy.ndim(x) == 0)}
    return {name: float(number) for name, number in single.items() if name} if len(single) <= _MOST else {}


def _variables() -> dict[int, tuple[str, str]]:
    """Return the roles and names of what existing modules of flax.nnx hold, by the ids of the arrays."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return {}
    roles = {nnx.BatchStat: "buffer", nnx.Variable: UNTRAINED}
    found: dict[int, tuple[str, str]] = {}
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nnx.Module)]
    for module in modules:
        for path, node in nnx.iter_graph(module):
            role, name = roles.get(type(node)), ".".join(map(str, path))
            if role is None:
                continue
            array = node.get_raw_value()
            if len(name) > len(found.get(id(array), ("", ""))[1]):
                found[id(array)] = role, name
    return found


def running_statistics(trace: Trace, signals: Mapping[int, Signal]) -> tuple[Running, ...]:
    """Return the running means and variances that a step has read, with those of the batch where it computes
    new ones."""
    held = {v.name: v.id for v in trace.values if v.producer is None and v.role == "buffer"}
    readers: dict[int, list[Step]] = {}
    for step in trace.steps:
        for i in step.inputs:
            readers.setdefault(i, []).append(step)
    found = []
    for name, variance in held.items():
        module, _, last = name.rpartition(".")
        mean = held.get(f"{module}.mean" if module else "mean")
        first = next(iter(readers.get(variance, [])), None)
        if last != "var" or mean is None or first is None or variance not in signals or mean not in signals:
            continue
        of_batch = [_new(trace, signals, readers, i) for i in (mean, variance)]
        seen = [None if new is None else signals.get(new[0]) for new in of_batch]
        found.append(
            Running(
                name=module,
                place=first.place,
                frames=first.frames,
                mean=signals[mean],
                variance=signals[variance],
                batch_mean=math.nan if seen[0] is None else seen[0].rms,
                batch_variance=math.nan if seen[1] is None else seen[1].mean,
                momentum=math.nan if of_batch[1] is None else of_batch[1][1],
            )
        )
    return tuple(found)


def _new(
    trace: Trace, signals: Mapping[int, Signal], readers: Mapping[int, Sequence[Step]], value: int
) -> tuple[int, float] | None:
    """Return the id of ``b`` and ``1 - m`` if a step computes ``m * value + n * b`` with numbers."""
    for product in _products(readers, value):
        for total in readers.get(product.outputs[0], []):
            others = [i for i in total.inputs if i != product.outputs[0]]
            producer = trace.values[others[0]].producer if total.primitive == "add" and others else None
            if producer is not None and trace.steps[producer].primitive == "mul":
                factors = [(i, signals.get(i)) for i in trace.steps[producer].inputs]
                part = 1 - product.scalars[0] if product.scalars else math.nan
                return next(((i, part) for i, seen in factors if seen is not None and seen.size > 1), None)
    return None


def _products(readers: Mapping[int, Sequence[Step]], value: int) -> list[Step]:
    found = []
    for step in readers.get(value, []):
        if step.primitive == "mul":
            found.append(step)
        elif step.primitive in _PASSING and step.outputs:
            found += _products(readers, step.outputs[0])
    return found
