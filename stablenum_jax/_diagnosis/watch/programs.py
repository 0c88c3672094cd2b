"""What is known of a jitted function, and how one of its calls is replayed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from stablenum.diagnosis import Report
from stablenum_jax._diagnosis.replay import replay
from stablenum_jax._diagnosis.watch.derivatives import derivative_of
from stablenum_jax._diagnosis.watch.results import without

__all__ = ["Program", "without_static"]

# After so many replays that found nothing wrong, a function is no longer replayed.
PATIENCE = 2

_Bound: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Program:
    """A jitted function.

    Attributes:
        fun: the function that was jitted.
        options: the options of ``jax.jit``.
        metrics: entries of its result that nothing seems to need.
        patience: how many more replays may find nothing wrong.
    """

    def __init__(self, fun: Callable[..., Any], options: dict[str, Any]) -> None:
        self.fun, self.options, self.patience = fun, options, PATIENCE
        self.metrics: frozenset[int] = frozenset()

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound:
        """Return the function and the arguments of a call, with the static arguments bound."""
        return without_static(self.fun, args, kwargs, self.options)

    def replay(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaving_out: frozenset[int] = frozenset(),
        **more: Any,
    ) -> Report:
        """Replay a call; the entries of its result at the positions left out are not judged."""
        derivative = derivative_of(self.fun)
        fun, settings = (
            (derivative.fun, derivative.settings) if derivative else (self.fun, {"gradients": False})
        )
        fun, args, kwargs = without_static(fun, args, kwargs, self.options)
        fun = without(fun, leaving_out) if leaving_out else fun
        return replay(fun, *args, **settings, **more, **kwargs)


def without_static(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> _Bound:
    """Return the call with its static arguments bound, as jit binds them."""
    numbers = {n % len(args) for n in _several(options.get("static_argnums")) if -len(args) <= n < len(args)}
    names = set(_several(options.get("static_argnames")))
    try:
        parameters = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):
        parameters = []
    numbers |= {i for i, name in enumerate(parameters[: len(args)]) if name in names}
    names |= {parameters[i] for i in _several(options.get("static_argnums")) if -1 < i < len(parameters)}
    if not numbers and not names.intersection(kwargs):
        return fun, args, kwargs
    fixed = {k: v for k, v in kwargs.items() if k in names}

    @functools.wraps(fun)
    def bound(*dynamic: Any, **named: Any) -> Any:
        rest = iter(dynamic)
        return fun(*[a if i in numbers else next(rest) for i, a in enumerate(args)], **named, **fixed)

    del bound.__wrapped__  # the wrapper's signature differs from that of fun
    left = tuple(a for i, a in enumerate(args) if i not in numbers)
    return bound, left, {k: v for k, v in kwargs.items() if k not in names}


def _several(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, (int, str)) else tuple(value)
