"""Where NaN and infinities come from that were made outside of every watched call.

Most of them do no harm: the logarithm of 0 that makes a mask, a metric of an empty class. So each is kept in
doubt, and followed through further operations, until it reaches a watched call, ends the script with an
error, or is fed back into its own line again and again.
"""

from __future__ import annotations

import math
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stablenum.diagnosis import Place, Report
from stablenum.diagnosis.replay.source_files import lines_around
from stablenum.diagnosis.watch.plan import Failure
from stablenum.diagnosis.watch.script_errors import is_about_numbers
from stablenum.diagnosis.watch.session import Doubt, Session
from stablenum_jax._diagnosis.replay.flags import CLEAN, Flags, flags_of
from stablenum_jax._diagnosis.watch.placing import users_line

__all__ = ["Origins"]

# A value that was fed back so often into the line that made it is the state of a computation.
_FED_BACK = 3


@dataclass(eq=False)
class _Origin:
    """A line whose result was not finite although what it read was, or that writes NaN or +inf into data.

    Attributes:
        line: the line.
        doubt: what is in doubt; None for what the script writes, which is where it wants to have it.
        alive: how many arrays with its NaN exist.
        rounds: how often its NaN was fed back into a line that it had passed.
    """

    line: Place
    doubt: Doubt | None = None
    alive: int = 0
    rounds: int = 0


class _Bad(NamedTuple):
    """An array that is not finite.

    Attributes:
        array: a weak reference to it.
        origin: where that began.
        nan: whether it holds NaN.
        passed: the lines that it has passed since.
    """

    array: weakref.ref[Any]
    origin: _Origin
    nan: bool
    passed: frozenset[Place]


@dataclass
class Origins:
    """Follows what is not finite from the lines that made it.

    Attributes:
        session: gets the doubts.
    """

    session: Session
    _bad: dict[int, _Bad] = field(default_factory=dict)
    _lines: dict[tuple[Place, str], _Origin] = field(default_factory=dict)
    _last: _Bad | None = None  # the last that the script has read as a Python float
    _failed: bool = False  # whether an error about numbers has ended the script

    def note(self, name: str, replay: Callable[[], Report], arguments: Any, results: list[jax.Array]) -> None:
        """Note the results of an operation, some of which are not finite.

        Args:
            name: the name of the operation.
            replay: replays the operation.
            arguments: what it read.
            results: those of its results that are not finite.
        """
        line = users_line()
        if line is None:
            return
        nan = _flags(results)[0]
        known = [bad for bad in self.among(arguments) if bad.origin.doubt or bad.nan or not nan]
        if known:
            first = known[0]
            first.origin.rounds += line in first.passed
            self._follow(results, first.origin, first.passed | {line})
            return
        origin = self._begun(line, name, replay, arguments, results)
        if origin is None and _is_written(arguments):
            origin = _Origin(line)
        if origin is not None:
            self._follow(results, origin, frozenset((line,)))

    def doubted_in(self, arguments: Any, *, infinite: bool) -> Doubt | None:
        """Return the doubt of what makes the arguments of a call bad; None if the script was given it.

        Args:
            arguments: the arguments of the call.
            infinite: whether infinities count, too.
        """
        for bad in self.among(arguments):
            if bad.origin.doubt is not None and (infinite or bad.nan):
                return bad.origin.doubt
        return None

    def placed(self, report: Report, arguments: Any) -> Report:
        """Return the report on a call with bad arguments, with the line in which the script made them bad."""
        first, *others = report.findings
        written = next((b.origin.line for b in self.among(arguments) if _wrote(b, first.kind)), None)
        if written is None or first.operation != "input":
            return report
        first = replace(first, place=written, around=lines_around(written), frames=(written,))
        evidence = replace(report.evidence, findings=(first, *others))
        return Report.of(evidence, notes=report.notes, seconds=report.seconds)

    def among(self, arguments: Any) -> Iterator[_Bad]:
        """Yield those arguments whose origin is known."""
        for leaf in _leaves(arguments):
            found = self._bad.get(id(leaf))
            if found is not None:
                yield found
            elif self._last is not None and isinstance(leaf, float) and _is_computed(leaf):
                yield self._last

    def note_read(self, array: Any) -> None:
        """Note that the script reads an array as a Python float."""
        self._last = self._bad.get(id(array), self._last)

    def note_error(self, error: BaseException) -> None:
        """Note the error that ends the script: its message, or the test that raised it, may name NaN."""
        raised = traceback.extract_tb(error.__traceback__)[-1:]
        self._failed = any(is_about_numbers(text or "") for text in (str(error), *(f.line for f in raised)))

    def _begun(
        self,
        line: Place,
        name: str,
        replay: Callable[[], Report],
        arguments: Any,
        results: list[jax.Array],
    ) -> _Origin | None:
        """Return the origin of results that a finite argument did not bring; None if an argument did."""
        read, made = _flags(_leaves(arguments)), _flags(results)
        if (read[0] or not made[0]) and any(read):
            return None
        origin = self._lines.get((line, name))
        if origin is None:
            origin = self._lines[line, name] = self._doubted(line, name, replay())
        return origin

    def _doubted(self, line: Place, name: str, report: Report) -> _Origin:
        name = report.findings[0].operation if report.findings else name
        failure = Failure(step=self.session.outcome.calls, what="operation", names=(name,), unit="call")
        origin = _Origin(line)
        origin.doubt = Doubt(failure, report, lambda: self._settled(origin))
        self.session.doubt(origin.doubt)
        return origin

    def _settled(self, origin: _Origin) -> bool:
        """Return whether it did no harm, as far as can be seen outside of the watched calls."""
        if not origin.alive:
            return True
        return not self._failed and origin.rounds < _FED_BACK

    def _follow(self, results: list[jax.Array], origin: _Origin, passed: frozenset[Place]) -> None:
        for array in results:
            key, has_nan = id(array), flags_of(array)[0]

            def forget(_: Any, key: int = key, has_nan: bool = has_nan) -> None:
                self._bad.pop(key, None)
                origin.alive -= has_nan

            if key not in self._bad:
                self._bad[key] = _Bad(weakref.ref(array, forget), origin, has_nan, passed)
                origin.alive += has_nan


def _is_computed(number: float) -> bool:
    """Return whether a number is not finite, and not the constant that means so."""
    return not math.isfinite(number) and all(
        number is not constant for constant in (jnp.nan, jnp.inf, math.nan)
    )


def _leaves(arguments: Any) -> list[Any]:
    """Return the leaves of arguments; that of an update in place (``x.at[0]``) is the array."""
    return [getattr(leaf, "array", leaf) for leaf in jax.tree.leaves(arguments)]


def _wrote(bad: _Bad, kind: str) -> bool:
    """Return whether an array is bad in this way ("nan" or "inf") because the script wrote that."""
    return bad.origin.doubt is None and bad.nan == (kind == "nan")


def _is_written(arguments: Any) -> bool:
    """Return whether NaN or +inf is among the plain numbers of an operation, and not among its arrays.

    -inf is a mask.
    """
    leaves = _leaves(arguments)
    arrays = [leaf for leaf in leaves if isinstance(leaf, (jax.Array, np.ndarray)) and leaf.ndim]
    plain = [leaf for leaf in leaves if not any(leaf is array for array in arrays)]
    return any(
        of_plain and not of_arrays
        for of_plain, of_arrays in zip(_flags(plain)[:2], _flags(arrays)[:2], strict=True)
    )


def _flags(leaves: list[Any]) -> Flags:
    nan, high, low = CLEAN
    for leaf in leaves:
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, complex)):
            continue
        found = flags_of(leaf if isinstance(leaf, jax.Array) else np.asarray(leaf))
        nan, high, low = nan or found[0], high or found[1], low or found[2]
    return nan, high, low
