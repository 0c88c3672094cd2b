"""Programs of several processes, each of which records its own part: what it received, and what it sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.replay.values import Place
from stablenum.diagnosis.replay.walk import Origin

__all__ = ["is_received", "own_first", "sent_through"]

# So many collectives are named through which a bad value left this rank.
_MOST_NAMED = 3


def is_received(origin: Origin) -> bool:
    """Return whether a value came from a collective that took nothing bad from this rank."""
    return origin.step is not None and origin.step.collective


def own_first(origins: Sequence[Origin]) -> list[Origin]:
    """Return the origins on this rank in order, and after them what collectives brought in.

    Example:
        >>> t = Trace()
        >>> made = [t.add_value(flags=(True, False, False)) for _ in range(2)]
        >>> steps = [t.add_step(name, inputs=[], outputs=[m]) for name, m in zip(("recv", "log"), made)]
        >>> steps[0].collective = True
        >>> origins = [Origin(step=s, value=t.values[m], kind="nan") for s, m in zip(steps, made)]
        >>> [o.step.operation for o in own_first(origins)]
        ['log', 'recv']
    """
    return sorted(origins, key=is_received)


def sent_through(trace: Trace, origins: Iterable[Origin], place: Place | None) -> tuple[str, ...]:
    """Name the collectives that took a bad value from this rank to others, in order, each once.

    Args:
        trace: what this rank recorded.
        origins: where the value was born.
        place: the line that is known already; another line of its file is given by its number.

    Example:
        >>> t = Trace()
        >>> nan = t.add_value(flags=(True, False, False))
        >>> log = t.add_step("log", inputs=[], outputs=[nan])
        >>> send = t.add_step("send", inputs=[nan], outputs=[], place=Place("train.py", 9))
        >>> send.collective = True
        >>> sent_through(t, [Origin(step=log, value=t.values[nan], kind="nan")], None)
        ('send (train.py:9)',)
    """
    reached, found = {o.value.id for o in origins}, dict[str, None]()
    for step in trace.steps:
        if reached.isdisjoint(step.inputs):
            continue
        reached.update(v.id for v in trace.outputs_of(step) if not v.finite)
        if step.collective:
            found[_named(step, place)] = None
    return tuple(found)[:_MOST_NAMED]


def _named(step: Step, place: Place | None) -> str:
    if step.place is None:
        return step.operation
    same = place is not None and place.file == step.place.file
    return f"{step.operation} ({f'line {step.place.line}' if same else step.place})"
