"""What an adapter gives: a program that can be evaluated operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from stablenum.diagnosis.diff.sides.call_sites import CallSite
from stablenum.diagnosis.replay.trace import Trace

__all__ = [
    "COUNT", "MASKED", "SEED", "Dialect", "Moments", "NotRecordedError", "Play", "Program", "ReplacedError",
    "Result", "Visit", "if_recorded",
]  # fmt: skip

# Larger entries are masks (-1e9, the least number of a format), which programs fill in differently. They are
# given no noise: what it adds to them would hide everything else. The limit lies a factor of ten below the
# smallest number that is usual for a mask.
MASKED = 1e8
# Adapters draw their noise from this seed, so that reports are the same in every run; any other would do.
SEED = 20260

# The role of the number of steps that an optimizer has taken. Other roles are those of the audit, or the name
# of an entry that has none of them.
COUNT = "count"
# Gives the array that an optimizer begins with, by parameter and role; None if there is none.
Moments: TypeAlias = Callable[[str, str], Any]

# Called with every value's index and array, as soon as the value exists.
Visit: TypeAlias = Callable[[int, Any], None]


class ReplacedError(RuntimeError):
    """The recorded operations do not fit the values that were put in place of others: these choose another
    number of rows, as in a routing."""


class NotRecordedError(LookupError):
    """A recorded program was asked for what only a run of it could give: a value that its file does not hold,
    or an evaluation with other values."""


T = TypeVar("T")


def if_recorded(body: Callable[[], T], otherwise: T) -> T:
    """Return ``body()``, or something else if that needs a run of a recorded program."""
    try:
        return body()
    except NotRecordedError:
        return otherwise


class Result(NamedTuple):
    """A value that is compared.

    Attributes:
        kind: "loss", "output", "gradient" or "updated".
        name: that of the parameter, or of the output.
        value: its index in the trace.
        step: the number of the training step, from 1.
    """

    kind: str
    name: str
    value: int
    step: int = 1


class Dialect(NamedTuple):
    """How a script of a framework begins, and how arrays get into it and out of it.

    Attributes:
        imports: the lines that import the framework.
        setup: the lines that follow them.
        load, give: the code that makes a value of the framework from an array of NumPy, and the inverse.
        numbers: whether single numbers from outside may be written into the code.
        within: the code of the context in which operations are run in float64.
    """

    imports: tuple[str, ...]
    setup: tuple[str, ...]
    load: str
    give: str
    numbers: bool
    within: str


@dataclass(frozen=True, slots=True)
class Play:
    """One evaluation.

    Attributes:
        trace: the operations; the same in every play of a program.
        results: what is compared, in the order in which it was computed.
        keys: value -> what identifies it in a play of another width, where operations are opened or not.
        code: step -> its lines of code, with ``$7`` for the value 7; only what was asked for and can be
            written.
        stops: the steps of the forward pass at which the user's program ends the flow of gradients.
    """

    trace: Trace
    results: tuple[Result, ...]
    keys: Mapping[int, Hashable] = field(default_factory=dict)
    code: Mapping[int, str] = field(default_factory=dict)
    stops: frozenset[int] = frozenset()


class Program(Protocol):
    """A recorded program of one framework.

    Attributes:
        framework: "torch" or "jax".
        dialect: how its scripts are written.
        optimizer_at: the lines that made the optimizer, for operations of the update that no line of the
            user's called.
        numbers: those that the other program computes with, one of which may be what a constant in a narrow
            format was before it was rounded.
        aside: the names of what the loss function returned beside the loss, which is not compared.
    """

    framework: str
    dialect: Dialect
    optimizer_at: CallSite | None
    numbers: Collection[float]
    aside: Collection[str]

    def parameters(self) -> Mapping[str, Any]:
        """Return the parameters and buffers by name, as arrays of NumPy."""

    def optimizer_state(self) -> Mapping[tuple[str, str], Any]:
        """Return what the optimizer keeps of the steps before the first one, by parameter and role, as arrays
        of NumPy; nothing if there were none."""

    def with_optimizer_state(self, moments: Moments | None) -> Program:
        """Return the same program, not recorded yet, whose optimizer begins with another state.

        Args:
            moments: gives the state; None for an optimizer that has not taken a step.
        """

    def record(self, steps: int) -> None:
        """Run the user's code, unless that has been done; ``play`` does so too.

        Args:
            steps: how many training steps follow one another.
        """

    def written(self, steps: int) -> Collection[float]:
        """Return the numbers that the recorded program computes with, as its author wrote them."""

    def fresh(self) -> Program:
        """Return the same program, not recorded yet."""

    def play(
        self,
        visit: Visit,
        *,
        wide: bool = True,
        weights: Mapping[str, Any] | None = None,
        noise: float = 0.0,
        everywhere: bool = False,
        replace: Mapping[int, Any] | None = None,
        steps: int = 1,
        code: Collection[int] = (),
    ) -> Play:
        """Evaluate the program once.

        Args:
            visit: called with every value.
            wide: whether all formats are widened to float64.
            weights: arrays that take the place of parameters and buffers.
            noise: the relative size of the noise that is put on the result of every computation that depends
                on a parameter or an input.
            everywhere: whether it is also put on what is computed from constants alone.
            replace: arrays that take the place of values, by index.
            steps: how many training steps follow one another, with the same arguments.
            code: the steps of the trace that are written as code.

        Raises:
            ReplacedError: the operations do not fit the values of ``replace``.
        """

    def show(
        self,
        visit: Visit,
        *,
        weights: Mapping[str, Any] | None,
        replace: Mapping[int, Any],
        steps: int,
        since: int = 0,
        keep: bool = False,
    ) -> None:
        """Show the values of one more evaluation in float64 without noise. As nothing of it is recorded, and
        only what follows has to be computed, this takes less time than ``play``.

        Args:
            visit, weights, replace, steps: as in ``play``.
            since: the values before this one need not be shown.
            keep: whether later evaluations with the same arrays, and with further values replaced, can go on
                from where this one comes by.

        Raises:
            ReplacedError: as in ``play``.
        """
