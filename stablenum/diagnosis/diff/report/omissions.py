"""What a comparison leaves out: what only one program has, weights that the caller does not give, and what a
loss function returns beside the loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.diff.weights.parameter_uses import uses_of
from stablenum.diagnosis.diff.weights.weights import WeightMap

__all__ = ["beside_the_loss", "kept_as_buffers", "left_out", "one_optimizer", "untaken", "untied"]

# A note names so many parameters that are left out, of which none is to be overlooked. Chosen, not measured.
_MOST_NAMED = 8
# Of what is returned beside the loss in every run, one name reminds of the rest.
_MOST_BESIDE = 1
_LEFT_OUT = (
    "weights leaves out {} of the right program, which keeps its own values: "
    "give it too, unless you mean this."
)
_UNTIED = (
    "{}, which the left program trains as one, goes to {}: the sum of their gradients is compared with its "
    "gradient, and their updates are not compared."
)
_UNTAKEN = "No parameter of the right program comes from these of the left one: {}."
_BUFFERS = (
    "The left program keeps {} as a buffer, which the right one trains as a parameter: its gradient and its "
    "updates are not compared."
)
_BESIDE = (
    "The {} program returns {} beside the loss, which is not compared: to compare running statistics or "
    "other values, give both programs a function that returns these without the loss."
)
_LATER = " From the second step on they are not the same, so that the programs differ there."
_ONE = (
    "Only the {} program has an optimizer: the updates are not compared. Give the {} one its optimizer, "
    "unless you mean this."
)


def left_out(right: Side, given: Collection[str], only: Collection[str] | None = None) -> tuple[str, ...]:
    """Name the arrays that the right program computes with and that the caller's map does not give; those
    among ``only``, if that is given."""
    read = {i for step in right.trace.steps for i in step.inputs}
    names = [
        v.name
        for v in right.trace.values
        if v.id in read
        and v.role in ("parameter", "buffer")
        and right.prints[v.id].floating
        and v.name not in given
        and (only is None or v.name in only)
    ]
    names = list(dict.fromkeys(names))
    return (_LEFT_OUT.format(_listed(names)),) if names else ()


def untaken(left: Side, mapped: WeightMap) -> tuple[str, ...]:
    """Name the parameters that the left program computes with and that the right one has no counterpart
    of, as for a head that only the right one ties to its table."""
    taken = {name for origin in mapped.origins.values() for name in origin.names}
    names = [use.name for use in uses_of(left) if use.name not in taken]
    return (_UNTAKEN.format(_listed(names)),) if names else ()


def kept_as_buffers(left: Side, right: Side, mapped: WeightMap) -> tuple[str, ...]:
    """Name the right parameters that come from buffers of the left program."""
    buffers = {v.name for v in left.trace.values if v.role == "buffer"}
    trained = {v.name for v in right.trace.values if v.role == "parameter"}
    names = [n for n, o in mapped.origins.items() if n in trained and buffers.issuperset(o.names)]
    return (_BUFFERS.format(_listed(names)),) if names else ()


def _listed(names: Sequence[str], most: int = _MOST_NAMED) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def untied(mapped: WeightMap, steps: int) -> tuple[str, ...]:
    """Return notes on how parameters are compared that the caller gives the same left parameter."""
    later = _LATER if steps > 1 else ""
    return tuple(
        _UNTIED.format(source, " and ".join(names)) + later for source, names in mapped.shared.items()
    )


def one_optimizer(left: Side, right: Side) -> tuple[str, ...]:
    """Return a note that the updates are not compared if only one program makes them."""
    has = {name: _updates(side) for name, side in (("left", left), ("right", right))}
    if has["left"] == has["right"]:
        return ()
    return (_ONE.format(*(("left", "right") if has["left"] else ("right", "left"))),)


def beside_the_loss(left: Side, right: Side) -> tuple[str, ...]:
    """Name what the loss functions return beside the loss."""
    sides = (("left", left.program.aside), ("right", right.program.aside))
    return tuple(_BESIDE.format(name, _listed(list(aside), _MOST_BESIDE)) for name, aside in sides if aside)


def _updates(side: Side) -> bool:
    return any(r.kind == "updated" for r in side.play.results)
