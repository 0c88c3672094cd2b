"""What the trainings of the demo show, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stablenum.commands.demo.picture import death_of
from stablenum.commands.demo.tour import BACKENDS
from stablenum.commands.demo.training import Training

__all__ = ["agreement", "events", "outcome"]


def outcome(trainings: Mapping[str, Training]) -> str:
    """Return what became of the network without and with a guard."""
    one = next(iter(trainings.values()))
    bad, steps, dead = len(one.skipped), len(one.losses), death_of(one)
    return (
        f"A network learns handwritten digits in float16, and {bad} of the {steps} batches are bad. Without "
        f"a guard the loss is NaN from step {dead} on, and the network ends with {one.plain_score:.1%} of "
        f"the held-out digits. With a guard {bad} steps are skipped, and it ends with {one.score:.1%}."
    )


def agreement(trainings: Mapping[str, Training]) -> str:
    """Return in how many steps the frameworks decided the same."""
    steps = len(next(iter(trainings.values())).reasons)
    if len(trainings) < 2:
        return f"{steps} steps; those that were not applied:"
    one, other = trainings.values()
    mine, theirs = (list(zip(t.reasons, t.scales, strict=True)) for t in (one, other))
    same = sum(a == b for a, b in zip(mine, theirs, strict=True))
    names = " and ".join(BACKENDS[name][1] for name in trainings)
    return f"{names} decided the same in {same} of {steps} steps, with the same scale. Not applied:"


def events(trainings: Mapping[str, Training]) -> Iterator[tuple[int, list[str]]]:
    """Yield the steps that one of the trainings skipped, with what each decided."""
    for step in sorted(set[int]().union(*(t.skipped for t in trainings.values()))):
        yield step, [f"{t.reasons[step]}, loss scale {t.scales[step]:g}" for t in trainings.values()]
