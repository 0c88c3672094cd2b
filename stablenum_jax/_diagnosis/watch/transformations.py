"""Replaces JAX's transformations and the updates of optax by watched ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import optax

from stablenum.diagnosis import Report
from stablenum.diagnosis.watch.frames import transparent
from stablenum.diagnosis.watch.session import Session
from stablenum_jax._diagnosis.replay import replay as replay_of
from stablenum_jax._diagnosis.replay.jax_internals import outside_tracebacks
from stablenum_jax._diagnosis.watch.calls import Call, key_of, name_of
from stablenum_jax._diagnosis.watch.derivatives import Derivative, judged_part, label
from stablenum_jax._diagnosis.watch.eager import Eager
from stablenum_jax._diagnosis.watch.jitted import Jitted, Mapped
from stablenum_jax._diagnosis.watch.placing import at_the_caller
from stablenum_jax._diagnosis.watch.results import mark
from stablenum_jax._diagnosis.watch.watcher import Watcher, traced

__all__ = ["watch"]

# The originals, not the watched ones.
_grad, _value_and_grad, _vmap, _jvp = jax.grad, jax.value_and_grad, jax.vmap, jax.jvp
_UPDATE = "the optimizer's update"


def watch(session: Session) -> None:
    """Watch what this process defines and calls from now on."""
    watcher = Watcher(session)
    watched = _Transformations(watcher)
    jax.grad = watched.derivative(_grad, value=False)
    jax.value_and_grad = watched.derivative(_value_and_grad, value=True)
    for name in ("jacrev", "jacfwd", "hessian"):
        setattr(jax, name, watched.jacobian(getattr(jax, name)))
    jax.jacobian = jax.jacrev
    for name in ("vjp", "linearize"):
        setattr(jax, name, watched.linear(getattr(jax, name)))
    for name in ("jit", "vmap", "jvp"):
        setattr(jax, name, _in_place_of(getattr(jax, name), getattr(watched, name)))
    for name in ("pmap", "shard_map"):
        setattr(jax, name, watched.mapped(getattr(jax, name)))
    outside_tracebacks(os.path.dirname(__file__) + os.sep)
    # A property of the class. optax.chain unpacks its transformations as tuples, which does not read the
    # property, so they are not watched one by one.
    optax.GradientTransformation.update = property(watched.update)
    Eager(watcher).watch()
    session.on_error.append(watcher.origins.note_error)


class _Transformations:
    """Watched transformations: each does what JAX's does, and has its calls outside a trace watched."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._judge = watcher, watcher.judge

    @transparent
    def jit(self, fun: Any = None, /, **options: Any) -> Any:
        """Do what ``jax.jit`` does, but watch the function and donate no buffers."""
        if fun is None:
            return functools.partial(self.jit, **options)
        for name in ("donate_argnums", "donate_argnames"):
            options.pop(name, None)
        return Jitted(self._watcher, fun, options)

    def mapped(self, transform: Callable[..., Any]) -> Callable[..., Any]:
        """Do what ``jax.pmap`` or ``jax.shard_map`` does, but watch the function and donate no buffers."""

        @functools.wraps(transform)
        @transparent
        def outer(fun: Any = None, /, *settings: Any, **options: Any) -> Any:
            options.pop("donate_argnums", None)
            if fun is None:
                return functools.partial(outer, *settings, **options)
            return Mapped(self._watcher, fun, transform(fun, *settings, **options))

        return outer

    def derivative(self, transform: Callable[..., Any], *, value: bool) -> Callable[..., Any]:
        """Do what ``jax.grad`` or ``jax.value_and_grad`` does, and watch each call outside a trace."""

        @functools.wraps(transform)
        @transparent
        def outer(fun: Any, argnums: Any = 0, has_aux: bool = False, *others: Any, **options: Any) -> Any:
            inner = transform(fun, argnums, has_aux, *others, **options)
            settings = {"argnums": argnums, "has_aux": has_aux, "gradients": True}
            judged = functools.partial(judged_part, value=value, has_aux=has_aux)

            @functools.wraps(inner)
            @transparent
            def derivative(*args: Any, **kwargs: Any) -> Any:
                def replay(**more: Any) -> Report:
                    return replay_of(fun, *args, **settings, **more, **kwargs)

                call = Call(args, kwargs, name_of(fun), key_of(fun, transform), replay, judged)
                result = self._watcher.call(inner, call)
                if not self._judge.marking:
                    return result
                if not has_aux:
                    return mark(result)
                first, last = result
                return ((mark(first[0]), first[1]), mark(last)) if value else (mark(first), last)

            label(derivative, Derivative(fun, settings, judged))
            return derivative

        return outer

    def jacobian(self, transform: Callable[..., Any]) -> Callable[..., Any]:
        """Do what ``jax.jacrev``, ``jax.jacfwd`` or ``jax.hessian`` does, and watch calls outside a trace."""

        @functools.wraps(transform)
        @transparent
        def outer(fun: Any, argnums: Any = 0, has_aux: bool = False, *others: Any, **options: Any) -> Any:
            inner = transform(fun, argnums, has_aux, *others, **options)
            judged = (lambda result: result[0]) if has_aux else None
            return self._watcher.watched(inner, name_of(fun), key_of(fun, transform), judged)

        return outer

    def linear(self, transform: Callable[..., Any]) -> Callable[..., Any]:
        """Do what ``jax.vjp`` or ``jax.linearize`` does, and watch the linear function that it returns."""

        @transparent
        def outer(fun: Callable[..., Any], *primals: Any, **options: Any) -> Any:
            result = transform(fun, *primals, **options)
            if self._judge.replaying or traced((primals, result[0])):
                self._watcher.traced_derivative = True
                if not self._judge.marking:
                    return result
                marked = jax.tree_util.Partial(lambda inner, *given: mark(inner(*given)), result[1])
                return mark(result[0]), marked, *result[2:]

            def applied(primals: Any, *given: Any) -> Any:
                return transform(fun, *primals, **options)[1](*given)

            @transparent
            def apply(inner: Callable[..., Any], *given: Any) -> Any:
                def replay(**more: Any) -> Report:
                    return replay_of(applied, primals, *given, gradients=False, **more)

                call = Call(given, {}, name_of(fun), key_of(fun, transform), replay)
                return self._watcher.call(inner, call)

            return result[0], jax.tree_util.Partial(apply, result[1]), *result[2:]

        return functools.wraps(transform)(outer)

    @transparent
    def jvp(self, fun: Callable[..., Any], primals: Any, tangents: Any, has_aux: bool = False) -> Any:
        """Do what ``jax.jvp`` does, and watch each call outside a trace."""

        @transparent
        def inner(primals: Any, tangents: Any) -> Any:
            return _jvp(fun, primals, tangents, has_aux=has_aux)

        judged = (lambda result: result[:2]) if has_aux else None
        return self._watcher.watched(inner, name_of(fun), key_of(fun, "jvp"), judged)(primals, tangents)

    @transparent
    def vmap(self, fun: Callable[..., Any], *settings: Any, **options: Any) -> Callable[..., Any]:
        """Do what ``jax.vmap`` does, and watch each call outside a trace if the function differentiates."""
        inner, watcher = _vmap(fun, *settings, **options), self._watcher
        watched = watcher.watched(inner, name_of(fun), key_of(fun, "vmap"))
        differentiates = False

        @functools.wraps(inner)
        @transparent
        def outer(*args: Any, **kwargs: Any) -> Any:
            nonlocal differentiates
            if not differentiates:
                before, watcher.traced_derivative = watcher.traced_derivative, False
                try:
                    result = inner(*args, **kwargs)
                finally:
                    differentiates = watcher.traced_derivative
                    watcher.traced_derivative = before or differentiates
                if not differentiates:
                    return result
            return watched(*args, **kwargs)

        return outer

    def update(self, transformation: Any) -> Callable[..., Any]:
        """Do what ``tx.update`` does, and watch each call outside a trace."""
        inner = transformation[1]

        @functools.wraps(inner)
        @transparent
        def update(*args: Any, **kwargs: Any) -> Any:
            def replay(**more: Any) -> Report:
                report = replay_of(inner, *args, gradients=False, **more, **kwargs)
                return at_the_caller(report, phase="update", library="optax")

            call = Call(args, kwargs, _UPDATE, _UPDATE, replay, update=True)
            return self._watcher.call(inner, call)

        return update


def _in_place_of(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @transparent
    def outer(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return outer
