"""Watch an unmodified JAX script: what its jitted functions, gradients and optimizers return.

Only the command ``stablenum explain`` uses this. A call whose result is not finite is replayed at once with
its arguments, so no buffers are donated in a watched script. Each check makes the host wait.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from stablenum.commands.explain.plan import Failure
from stablenum.commands.explain.session import Session
from stablenum.diagnosis import Report
from stablenum.diagnosis.replay.growth import Growth
from stablenum.diagnosis.replay.judge import Evidence
from stablenum_jax._diagnosis.replay.flags import device_flags
from stablenum_jax._diagnosis.replay.source_lines import is_user_code, place_in

__all__ = ["watch"]

_jit, _grad, _value_and_grad = jax.jit, jax.grad, jax.value_and_grad

# After so many replays that found nothing wrong, a function is no longer replayed.
PATIENCE = 2


def watch(session: Session) -> None:
    """Watch what this process defines and calls from now on."""
    watcher = _Watcher(session)
    jax.jit = watcher.jit
    jax.grad = watcher.derivative(_grad, value=False)
    jax.value_and_grad = watcher.derivative(_value_and_grad, value=True)
    # A property of the class. optax.chain unpacks its transformations as tuples, which does not read the
    # property, so they are not watched one by one.
    optax.GradientTransformation.update = property(watcher.update)


class _Watcher:
    """Counts calls, and replays the first whose result is not finite."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.looking = False
        self.growth: dict[str, Growth] = {}

    def jit(self, fun: Any = None, /, **options: Any) -> Any:
        """Do what ``jax.jit`` does, but watch the function and donate no buffers."""
        if fun is None:
            return functools.partial(self.jit, **options)
        for name in ("donate_argnums", "donate_argnames"):
            options.pop(name, None)
        return _Jitted(self, fun, options)

    def derivative(self, transform: Callable[..., Any], *, value: bool) -> Callable[..., Any]:
        """Do what ``jax.grad`` or ``jax.value_and_grad`` does, and watch each call outside a trace."""

        @functools.wraps(transform)
        def outer(fun: Any, argnums: Any = 0, has_aux: bool = False, **options: Any) -> Any:
            inner = transform(fun, argnums, has_aux, **options)
            settings = {"argnums": argnums, "has_aux": has_aux, "gradients": True}

            @functools.wraps(inner)
            def derivative(*args: Any, **kwargs: Any) -> Any:
                def replay(**more: Any) -> Report:
                    return _replay(fun, *args, **settings, **more, **kwargs)

                return self.call(inner, args, kwargs, name=_name(fun), replay=replay)

            derivative.stablenum_derivative = (fun, settings)  # type: ignore[attr-defined]
            return derivative

        return outer

    def update(self, transformation: Any) -> Callable[..., Any]:
        """Do what ``tx.update`` does, and watch each call outside a trace."""
        inner = transformation[1]

        @functools.wraps(inner)
        def update(*args: Any, **kwargs: Any) -> Any:
            def replay(**more: Any) -> Report:
                report = _replay(inner, *args, gradients=False, **more, **kwargs)
                return _of_update(report)

            return self.call(inner, args, kwargs, name="the optimizer's update", replay=replay)

        return update

    def call(
        self,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        replay: Callable[..., Report],
        state: Any = None,
    ) -> Any:
        """Call ``inner(*args, **kwargs)``, and replay the call if the result is not finite."""
        if self.looking or _traced((args, kwargs)):
            return inner(*args, **kwargs)
        if self.session.over:
            self.session.leave()
        self.note_growth(name, args, kwargs)
        try:
            result = inner(*args, **kwargs)
        except FloatingPointError:  # the script runs with jax_debug_nans
            self.session.outcome.calls += 1
            self.replay(replay, name, known_bad=True)
            raise
        if _traced(result):
            return result
        self.session.outcome.calls += 1
        nan, infinite = _suspicious(result, (args, kwargs))
        if (nan or infinite) and (state is None or state.patience > 0):
            self.replay(replay, name, known_bad=nan)
            if state is not None:
                state.patience -= 1
        return result

    def note_growth(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how large the arguments of a call are."""
        leaves = [
            (f"args{keystr(path)}" if top == "args" else keystr(path), leaf)
            for top, tree in (("args", args), ("kwargs", kwargs))
            for path, leaf in tree_flatten_with_path(tree)[0]
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
        ]
        sizes = jax.device_get([_largest(leaf) for _, leaf in leaves])
        growth = self.growth.setdefault(name, Growth(unit="call"))
        growth.note(
            self.session.outcome.calls, {k: float(s) for (k, _), s in zip(leaves, sizes, strict=True)}
        )

    def replay(self, replay: Callable[..., Report], name: str, *, known_bad: bool) -> None:
        """Explain a call, and end the script unless the replay finds nothing wrong."""
        self.looking = True
        try:
            report = replay(known_bad=known_bad)
        except Exception as error:  # noqa: BLE001  the failure is reported even without a replay
            note = f"the replay of {name} failed: {type(error).__name__}: {error}"
            report = Report.of(Evidence(framework="jax", loss_finite=False), notes=(note,))
        finally:
            self.looking = False
        if not report.ok:
            exploded = self.growth[name].explosion() if name in self.growth else ""
            if exploded:
                evidence = replace(report.evidence, exploded=exploded)
                report = Report.of(evidence, notes=report.notes, seconds=report.seconds)
            step = max(0, self.session.outcome.calls - 1)
            self.session.found(Failure(step=step, what="output", names=(name,), unit="call"), report)


class _Jitted:
    """A watched jitted function. All other attributes are those of the jitted function."""

    def __init__(self, watcher: _Watcher, fun: Any, options: dict[str, Any]) -> None:
        self.__wrapped__ = fun
        self._inner = _jit(fun, **options)
        self._watcher, self._options, self.patience = watcher, options, PATIENCE
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def replay(**more: Any) -> Report:
            return self._replay(args, kwargs, more)

        name = _name(self.__wrapped__)
        return self._watcher.call(self._inner, args, kwargs, name=name, replay=replay, state=self)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def _replay(self, args: tuple[Any, ...], kwargs: dict[str, Any], more: dict[str, Any]) -> Report:
        fun, settings = getattr(
            self.__wrapped__, "stablenum_derivative", (self.__wrapped__, {"gradients": False})
        )
        fun, args, kwargs = _without_static(fun, args, kwargs, self._options)
        return _replay(fun, *args, **settings, **more, **kwargs)


def _replay(*args: Any, **kwargs: Any) -> Report:
    from stablenum_jax._diagnosis.replay import replay

    return replay(*args, **kwargs)


def _of_update(report: Report) -> Report:
    """Return the report with failures in the optimizer's code placed at the user's line that called it."""
    frame = inspect.currentframe()
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    here = None if frame is None else place_in(frame.f_code, frame.f_lineno)
    findings = tuple(
        f if f.phase == "before" else replace(f, phase="update", place=f.place or here)
        for f in report.findings
    )
    evidence = replace(report.evidence, findings=findings, loss_finite=True)
    return Report.of(evidence, notes=report.notes, seconds=report.seconds)


def _without_static(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
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


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _suspicious(result: Any, arguments: Any) -> tuple[bool, bool]:
    """Return whether there is a NaN, and whether there is an infinity that is probably not a mask or a bound.

    -inf in an array is usually a mask or the logarithm of a probability of 0; an inf that is also among the
    arguments is usually a bound.
    """
    leaves = _floating(result)
    flags = _flags(leaves)
    nan = any(f[0] for f in flags)
    lowest = any(f[2] and leaf.ndim == 0 for leaf, f in zip(leaves, flags, strict=True))
    highest = any(f[1] for f in flags) and not any(f[1] for f in _flags(_floating(arguments)))
    return nan, lowest or highest


_largest = _jit(lambda leaf: jnp.abs(leaf).max())


def _floating(tree: Any) -> list[jax.Array]:
    return [
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]


def _flags(leaves: list[jax.Array]) -> list[tuple[bool, bool, bool]]:
    """Return, for each leaf, whether it holds any NaN, inf and -inf. This waits for the device once."""
    flags = jax.device_get([device_flags(leaf) for leaf in leaves])
    return [(bool(f[0]), bool(f[1]), bool(f[2])) for f in flags]


def _name(fun: Any) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return f"{getattr(fun, '__name__', type(fun).__name__)}()"
