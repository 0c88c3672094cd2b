"""A call that the script makes, as it is described to the watcher."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stablenum.diagnosis import Report
from stablenum_jax._diagnosis.watch.programs import Program
from stablenum_jax._diagnosis.watch.trees import Tree

__all__ = ["Call", "key_of", "name_of"]


@dataclass(frozen=True)
class Call:
    """A call of a function, of a derivative or of an optimizer's update.

    Attributes:
        args, kwargs: its arguments.
        name: the name of the user's function.
        key: what tells functions of the same name apart.
        replay: replays the call, with further options.
        judged: returns the part of the result that is judged.
        program: the jitted function, whose results may be metrics.
        update: whether an optimizer's update is called; all others that are not jitted are derivatives.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    key: Any
    replay: Callable[..., Report]
    judged: Callable[[Any], Any] | None = None
    program: Program | None = None
    update: bool = False

    @functools.cached_property
    def given(self) -> Tree:
        """The arguments, positional and named."""
        return Tree((self.args, self.kwargs))

    @property
    def is_derivative(self) -> bool:
        """Whether the result is a derivative, with or without its value."""
        return self.judged is not None or (self.program is None and not self.update)


def name_of(fun: Any) -> str:
    """Return the name of a function, as reports show it."""
    fun = _inside(fun)
    return f"{getattr(fun, '__name__', type(fun).__name__)}()"


def key_of(fun: Any, how: Any) -> Any:
    """Return what a function has in common with another that the same line made, as in a loop."""
    # An object is quick to find again; to hash code takes long.
    return _keys.setdefault((name_of(fun), getattr(_inside(fun), "__code__", None), how), object())


_keys: dict[Any, object] = {}


def _inside(fun: Any) -> Any:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun
