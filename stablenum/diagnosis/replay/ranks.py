"""Programs of several processes, each of which records its own part: what it received, and what it sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stablenum.diagnosis.replay.trace import Step, Trace
from stablenum.diagnosis.replay.values import Place
from stablenum.diagnosis.replay.walk import Origin, first_causes

__all__ = ["is_received", "made_here", "own_first", "sent_through"]

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


def made_here(trace: Trace, sent: Step) -> list[int]:
    """Return the bad values that a collective took from this rank, if any of them was made on this rank."""
    bad = [v.id for v in trace.inputs_of(sent) if not v.finite]
    return [] if all(is_received(origin) for origin in first_causes(trace, bad)) else bad


def sent_through(trace: Trace, sent: Iterable[Step], origin: Origin, place: Place | None) -> tuple[str, ...]:
    """Name the collectives that took a bad value of this rank to others after it was born, each once.

    Args:
        trace: what this rank recorded.
        sent: the collectives that took a bad value, in order. The derivative of what went wrong may have
            gone wrong by itself, so the value is not followed.
        origin: where the value was born.
        place: the line that is known already; another line of its file is given by its number.

    Example:
        >>> t = Trace()
        >>> nan = t.add_value(flags=(True, False, False))
        >>> log = t.add_step("log", inputs=[], outputs=[nan])
        >>> send = t.add_step("send", inputs=[nan], outputs=[], place=Place("train.py", 9))
        >>> send.collective = True
        >>> sent_through(t, [send], Origin(step=log, value=t.values[nan], kind="nan"), None)
        ('send (train.py:9)',)
    """
    found, end = dict[str, None](), _updated(trace, origin)
    for step in sent:
        if len(found) == _MOST_NAMED or step.index > end:
            break
        if step.index > origin.order and made_here(trace, step):
            found[_named(step, place)] = None
    return tuple(found)


def _updated(trace: Trace, origin: Origin) -> int:
    """Return the index of the step in which an optimizer uses a value; then it is in the parameters."""
    if origin.step is not None and origin.step.phase == "update":
        return len(trace.steps)
    after = range(max(origin.order, trace.begin) + 1, len(trace.steps))
    return next((i for i in after if trace.steps[i].phase == "update"), len(trace.steps))


def _named(step: Step, place: Place | None) -> str:
    if step.place is None:
        return step.operation
    same = place is not None and place.file == step.place.file
    return f"{step.operation} ({f'line {step.place.line}' if same else step.place})"
