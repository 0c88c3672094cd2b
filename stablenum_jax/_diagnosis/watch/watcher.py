"""Runs the script's calls, and has those that no trace of JAX makes judged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from stablenum.diagnosis import Report
from stablenum.diagnosis.watch.frames import transparent
from stablenum.diagnosis.watch.session import Session
from stablenum_jax._diagnosis.replay import replay as replay_of
from stablenum_jax._diagnosis.watch.calls import Call
from stablenum_jax._diagnosis.watch.judge import Judge
from stablenum_jax._diagnosis.watch.origins import Origins
from stablenum_jax._diagnosis.watch.results import mark
from stablenum_jax._diagnosis.watch.trees import Tree

__all__ = ["Watcher", "traced"]


class Watcher:
    """Counts calls, and passes their results on to the judge.

    Attributes:
        judge: judges the results.
        origins: follows what operations outside of every call have made.
        sheltered: runs an action of the watch, whose errors are not the script's.
        traced_derivative: whether a derivative was traced, for a call outside.
    """

    def __init__(self, session: Session) -> None:
        self._session, self.origins = session, Origins(session)
        self.sheltered = session.sheltered
        self.judge = Judge(session, self.origins)
        self.traced_derivative = False
        self._depth = 0

    @property
    def busy(self) -> bool:
        """Whether a call is running, which is judged as a whole, or a trace or replay of our own."""
        return self._depth > 0 or self.judge.replaying or self.judge.marking

    def watched(
        self,
        inner: Callable[..., Any],
        name: str,
        key: Any,
        judged: Callable[[Any], Any] | None = None,
    ) -> Callable[..., Any]:
        """Return the function, watched; what is not finite in its result is replayed as it is."""

        @functools.wraps(inner)
        @transparent
        def outer(*args: Any, **kwargs: Any) -> Any:
            def replay(**more: Any) -> Report:
                return replay_of(inner, *args, gradients=False, **more, **kwargs)

            result = self.call(inner, Call(args, kwargs, name, key, replay, judged))
            return mark(result) if self.judge.marking else result

        return outer

    @transparent
    def call(self, inner: Callable[..., Any], call: Call) -> Any:
        """Return what ``inner`` returns for the arguments of the call, and have it judged."""
        session, args, kwargs = self._session, call.args, call.kwargs
        if self.judge.replaying or call.given.traced:
            self.traced_derivative = self.traced_derivative or call.program is None
            return inner(*args, **kwargs)
        if session.over:
            session.leave()
        session.sheltered(self.judge.note_growth, call)
        ignored = session.ignores(call.name.removesuffix("()"))
        before, self.traced_derivative = self.traced_derivative, False
        self._depth += 1
        try:
            result = inner(*args, **kwargs)
        except FloatingPointError:  # the script runs with jax_debug_nans
            session.outcome.calls += 1
            if not ignored:
                session.sheltered(self.judge.explain, call, known_bad=True, raises=True)
            raise
        finally:
            self._depth -= 1
            if self.traced_derivative:  # not when the trace was cached
                self.judge.differentiating.add(call.key)
            self.traced_derivative |= before
        made = Tree(result)
        if made.traced:
            self.traced_derivative = self.traced_derivative or call.program is None
            return result
        session.outcome.calls += 1
        if not ignored:
            session.sheltered(self.judge.judge, call, made)
        return result


def traced(tree: Any) -> bool:
    """Return whether a trace of JAX runs, as its values show."""
    return Tree(tree).traced
