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
import numpy as np
import optax
from jax.tree_util import keystr, tree_flatten_with_path

from stablenum.commands.explain.frames import raised_by_a_signal, transparent
from stablenum.commands.explain.plan import Failure
from stablenum.commands.explain.session import Doubt, Session
from stablenum.diagnosis import Cause, Report
from stablenum.diagnosis.replay.growth import Growth
from stablenum.diagnosis.replay.judge import Evidence
from stablenum_jax._diagnosis.replay.jax_internals import outside_tracebacks
from stablenum_jax._diagnosis.replay.source_lines import is_user_code, place_in
from stablenum_jax._diagnosis.results import (
    Suspicion,
    floating_leaves,
    mark,
    metrics_among,
    named,
    suspicion,
    without,
)
from stablenum_jax._trees.state import is_guard

__all__ = ["watch"]

_jit, _grad, _value_and_grad, _vjp, _vmap = jax.jit, jax.grad, jax.value_and_grad, jax.vjp, jax.vmap
_jvp = jax.jvp

_OUR_SCALING, _FLAX_SCALING = "stablenum_jax/_step/scaled_loss.py", "flax/training/dynamic_scale.py"
# After so many replays that found nothing wrong, a function is no longer replayed.
PATIENCE = 2
# After so many bad results in a row, a function is no longer taken to recover.
MOST_IN_A_ROW = 25
# So many results in all, one of them after the bad one, show that the script copes with bad ones.
GOOD = 3


def watch(session: Session) -> None:
    """Watch what this process defines and calls from now on."""
    watcher = _Watcher(session)
    jax.grad = watcher.derivative(_grad, value=False)
    jax.value_and_grad = watcher.derivative(_value_and_grad, value=True)
    for name in ("jacrev", "jacfwd", "hessian"):
        setattr(jax, name, watcher.jacobian(getattr(jax, name)))
    jax.jacobian = jax.jacrev
    for name in ("jit", "vjp", "vmap", "jvp"):
        setattr(jax, name, _in_place_of(getattr(jax, name), getattr(watcher, name)))
    outside_tracebacks(__file__)
    outside_tracebacks(watcher.call.__code__.co_filename)
    # A property of the class. optax.chain unpacks its transformations as tuples, which does not read the
    # property, so they are not watched one by one.
    optax.GradientTransformation.update = property(watcher.update)


class _Watcher:
    """Counts calls, and replays the first whose result is not finite."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.looking = False
        self.marking = False  # our own trace looks for what depends on losses and gradients
        self.traced_derivative = False  # a derivative was traced, for a call outside
        self.finite: set[str] = set()  # the functions that have returned finite results
        # Metrics that are not finite, and their doubts.
        self.metrics: list[tuple[Any, Doubt]] = []
        self.courses: dict[Any, Course] = {}
        self.differentiating: set[Any] = set()  # the keys of such functions
        self.trained = 0  # the number of finite results of functions that differentiate
        self.growth: dict[str, Growth] = {}

    @transparent
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
        @transparent
        def outer(fun: Any, argnums: Any = 0, has_aux: bool = False, *others: Any, **options: Any) -> Any:
            inner = transform(fun, argnums, has_aux, *others, **options)
            settings = {"argnums": argnums, "has_aux": has_aux, "gradients": True}

            def judged(result: Any) -> Any:
                """Leave out what the function returns beside its loss."""
                scaling = _scaling() if value else ""
                if scaling:
                    return _loss_before_scaling(result[0], ours=scaling == _OUR_SCALING)
                if not has_aux:
                    return result
                return (result[0][0], result[1]) if value else result[0]

            @functools.wraps(inner)
            @transparent
            def derivative(*args: Any, **kwargs: Any) -> Any:
                def replay(**more: Any) -> Report:
                    return _replay(fun, *args, **settings, **more, **kwargs)

                call = {"name": _name(fun), "replay": replay, "judged": judged, "key": _key(fun, transform)}
                result = self.call(inner, args, kwargs, **call)
                if not self.marking:
                    return result
                if not has_aux:
                    return mark(result)
                first, last = result
                return ((mark(first[0]), first[1]), mark(last)) if value else (mark(first), last)

            # Other wrappers copy this attribute, so it says whose it is.
            derivative.stablenum_derivative = (  # type: ignore[attr-defined]
                derivative, fun, settings, judged,
            )  # fmt: skip
            return derivative

        return outer

    def jacobian(self, transform: Callable[..., Any]) -> Callable[..., Any]:
        """Do what ``jax.jacrev``, ``jax.jacfwd`` or ``jax.hessian`` does, and watch calls outside a trace."""

        @functools.wraps(transform)
        @transparent
        def outer(fun: Any, argnums: Any = 0, has_aux: bool = False, *others: Any, **options: Any) -> Any:
            inner = transform(fun, argnums, has_aux, *others, **options)
            judged = (lambda result: result[0]) if has_aux else None
            return self.watched(inner, _name(fun), judged, _key(fun, transform))

        return outer

    def watched(
        self,
        inner: Callable[..., Any],
        name: str,
        judged: Callable[[Any], Any] | None = None,
        key: Any = None,
    ) -> Callable[..., Any]:
        """Return the function, watched; what is not finite in its result is replayed as it is."""

        @functools.wraps(inner)
        @transparent
        def outer(*args: Any, **kwargs: Any) -> Any:
            def replay(**more: Any) -> Report:
                return _replay(inner, *args, gradients=False, **more, **kwargs)

            result = self.call(inner, args, kwargs, name=name, replay=replay, judged=judged, key=key or name)
            return mark(result) if self.marking else result

        return outer

    @transparent
    def vjp(self, fun: Callable[..., Any], *primals: Any, **options: Any) -> Any:
        """Do what ``jax.vjp`` does, and watch the function that it returns."""
        result = _vjp(fun, *primals, **options)
        if self.looking or _traced((primals, result[0])):
            self.traced_derivative = True
            if not self.marking:
                return result
            marked = jax.tree_util.Partial(lambda back, *cotangents: mark(back(*cotangents)), result[1])
            return mark(result[0]), marked, *result[2:]

        def pulled(primals: Any, *cotangents: Any) -> Any:
            return _vjp(fun, *primals, **options)[1](*cotangents)

        @transparent
        def pull(inner: Callable[..., Any], *cotangents: Any) -> Any:
            def replay(**more: Any) -> Report:
                return _replay(pulled, primals, *cotangents, gradients=False, **more)

            key = _key(fun, "vjp")
            return self.call(inner, cotangents, {}, name=_name(fun), replay=replay, key=key)

        return result[0], jax.tree_util.Partial(pull, result[1]), *result[2:]

    @transparent
    def jvp(self, fun: Callable[..., Any], primals: Any, tangents: Any, has_aux: bool = False) -> Any:
        """Do what ``jax.jvp`` does, and watch each call outside a trace."""

        @transparent
        def inner(primals: Any, tangents: Any) -> Any:
            return _jvp(fun, primals, tangents, has_aux=has_aux)

        judged = (lambda result: result[:2]) if has_aux else None
        return self.watched(inner, _name(fun), judged, key=_key(fun, "jvp"))(primals, tangents)

    @transparent
    def vmap(self, fun: Callable[..., Any], *settings: Any, **options: Any) -> Callable[..., Any]:
        """Do what ``jax.vmap`` does, and watch each call outside a trace if the function differentiates."""
        inner = _vmap(fun, *settings, **options)
        watched = self.watched(inner, _name(fun), key=_key(fun, "vmap"))
        differentiates = False

        @functools.wraps(inner)
        @transparent
        def outer(*args: Any, **kwargs: Any) -> Any:
            nonlocal differentiates
            if not differentiates:
                before, self.traced_derivative = self.traced_derivative, False
                try:
                    result = inner(*args, **kwargs)
                finally:
                    differentiates = self.traced_derivative
                    self.traced_derivative = before or differentiates
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
                report = _replay(inner, *args, gradients=False, **more, **kwargs)
                return _of_update(report)

            return self.call(inner, args, kwargs, name="the optimizer's update", replay=replay, update=True)

        return update

    @transparent
    def call(
        self,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        replay: Callable[..., Report],
        judged: Callable[[Any], Any] | None = None,
        jitted: _Jitted | None = None,
        update: bool = False,
        key: Any = None,
    ) -> Any:
        """Call ``inner(*args, **kwargs)``, and replay the call if the result is not finite.

        Args:
            inner: what is called.
            args, kwargs: its arguments.
            name: the name of the user's function.
            replay: replays the call, with further options.
            judged: returns the part of the result that is judged.
            jitted: the jitted function, whose results may be metrics.
            update: whether an optimizer's update is called; all others that are not jitted are derivatives.
            key: what tells functions of the same name apart.
        """
        if self.looking or _traced((args, kwargs)):
            self.traced_derivative = self.traced_derivative or jitted is None
            return inner(*args, **kwargs)
        if self.session.over:
            self.session.leave()
        self.session.sheltered(self.note_growth, name, args, kwargs)
        ignored = self.session.ignores(name.removesuffix("()"))
        course = self.courses.setdefault(key or name, Course())
        before, self.traced_derivative = self.traced_derivative, False
        try:
            result = inner(*args, **kwargs)
        except FloatingPointError:  # the script runs with jax_debug_nans
            self.session.outcome.calls += 1
            if not ignored:
                self.session.sheltered(self.replay, replay, name, course, known_bad=True, raises=True)
            raise
        finally:
            if self.traced_derivative:  # not when the trace was cached
                self.differentiating.add(key)
            self.traced_derivative |= before
        if _traced(result):
            self.traced_derivative = self.traced_derivative or jitted is None
            return result
        self.session.outcome.calls += 1
        if not ignored:
            self.session.sheltered(
                self.judge, result, args, kwargs, name, course, replay, judged, jitted, key, update=update
            )
        return result

    def metrics_of(
        self, jitted: _Jitted, args: tuple[Any, ...], kwargs: dict[str, Any], positions: frozenset[int]
    ) -> frozenset[int]:
        """Return those entries of a jitted function's result that training does not need."""
        self.marking = True
        try:
            return metrics_among(*jitted.without_static(args, kwargs), positions)
        finally:
            self.marking = False

    def judge(
        self,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        course: Course,
        replay: Callable[..., Report],
        judged: Callable[[Any], Any] | None,
        jitted: _Jitted | None,
        key: Any,
        *,
        update: bool,
    ) -> None:
        """Judge the result of a call, and doubt what is not finite in it."""
        trains = jitted is None or judged is not None or key in self.differentiating
        seen = result if judged is None else judged(result)
        derivative = judged is not None or (jitted is None and not update)
        found = suspicion(seen, (args, kwargs), derivative=derivative)
        entries = len(floating_leaves(seen))
        if found and jitted is not None and judged is None:
            found, replay = self.apart(found, jitted, result, args, kwargs)
            entries -= len(jitted.metrics)
        if not found and entries:
            self.finite.add(name)
            course.note_good()
            self.trained += trains
        if not found or (jitted is not None and jitted.patience <= 0):
            return
        sound = self.replay(replay, name, course, known_bad=found.known_bad, trains=trains)
        if jitted is not None:
            jitted.patience -= sound

    def note_growth(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how large the arguments of a call are."""
        leaves = [
            (f"args{keystr(path)}" if top == "args" else keystr(path), leaf)
            for top, tree in (("args", args), ("kwargs", kwargs))
            for path, leaf in tree_flatten_with_path(tree)[0]
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
        ]
        sizes = [_largest(leaf) for _, leaf in leaves]
        growth = self.growth.setdefault(name, Growth(unit="call"))
        growth.note(
            self.session.outcome.calls, {k: float(s) for (k, _), s in zip(leaves, sizes, strict=True)}
        )

    def apart(
        self,
        found: Suspicion,
        jitted: _Jitted,
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Suspicion, Callable[..., Report]]:
        """Return what is left without entries that the user ignores and without metrics, and its replay.

        A metric is an entry without derivative. It is in doubt until it is clear that nothing needs it.
        """
        apart = named(result, self.session.plan.ignore)
        new = found.positions - apart - jitted.metrics
        metrics = self.metrics_of(jitted, args, kwargs, new) if new else new
        left = found.leaving_out(apart | jitted.metrics | metrics)
        if metrics and not left:
            self.doubt(_name(jitted.__wrapped__), jitted, metrics, result, args, kwargs)
        jitted.metrics |= metrics
        apart |= jitted.metrics

        def replay(**more: Any) -> Report:
            return jitted.replay(args, kwargs, more, leaving_out=apart)

        return left, replay

    def doubt(
        self,
        name: str,
        jitted: _Jitted,
        metrics: frozenset[int],
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Explain a metric that is not finite, in case that something needs it after all."""
        report = self.report(lambda **more: jitted.replay(args, kwargs, more), name, known_bad=False)
        if report.ok:
            return
        failure = self.failure_of(name)
        leaves = jax.tree.leaves(result, is_leaf=is_guard)
        doubt = Doubt(failure, report, lambda: bool(self.finite))
        self.metrics += [(leaves[i], doubt) for i in sorted(metrics)]
        self.session.doubt(doubt)

    def failure_of(self, name: str) -> Failure:
        """Return the failure of the call that has just ended."""
        step = max(0, self.session.outcome.calls - 1)
        return Failure(step=step, what="output", names=(name,), unit="call")

    def report(self, replay: Callable[..., Report], name: str, *, known_bad: bool) -> Report:
        """Return the report on a call."""
        self.looking = True
        try:
            return replay(known_bad=known_bad)
        except Exception as error:  # the failure is reported even without a replay
            if raised_by_a_signal(error):
                raise
            note = f"the replay of {name} failed: {type(error).__name__}: {error}"
            return Report.of(Evidence(framework="jax", reproduced=False, differences=(note,)))
        finally:
            self.looking = False

    def replay(
        self,
        replay: Callable[..., Report],
        name: str,
        course: Course,
        *,
        known_bad: bool,
        raises: bool = False,
        trains: bool = True,
    ) -> bool:
        """Explain a call and doubt its result; return whether the replay found nothing wrong.

        Raises:
            Stop: there were too many bad results in a row.
        """
        if not course.begins_badly():
            if course.bad >= MOST_IN_A_ROW and course.doubt is not None:
                self.session.found(course.doubt.failure, course.doubt.report)
            return False
        report = self.report(replay, name, known_bad=known_bad)
        # A loss scale that is too high comes down by itself.
        if report.ok or report.verdict.cause is Cause.LOSS_SCALE:
            course.bad = 0
            return report.ok
        exploded = self.growth[name].explosion() if name in self.growth else ""
        if exploded:
            evidence = replace(report.evidence, exploded=exploded)
            report = Report.of(evidence, notes=report.notes, seconds=report.seconds)
        failure = self.failure_of(name)
        read = report.findings[0].outputs if report.verdict.cause is Cause.BATCH else ()
        if read:  # an input was bad: perhaps an earlier call made it
            alike = [d for m, d in self.metrics if (m.shape, m.dtype.name) == (read[0].shape, read[0].dtype)]
            if alike:
                failure, made, _ = alike[0]
                report = made or report
        at, trained = course.good, self.trained

        def settled() -> bool:
            """Return whether the script copes with such a result, or with the error that it brings."""
            ended_well = self.session.outcome.exit_code == 0
            if ended_well and (raises or (not trains and self.trained >= GOOD)):
                return True
            if not trains and self.trained >= trained + GOOD:
                return True
            return course.good > at and course.good >= GOOD

        doubt = Doubt(failure, report, settled)
        course.doubt = doubt
        self.session.doubt(doubt)
        return False


class Course:
    """The results of one function.

    Attributes:
        good: the number of finite results.
        bad: the number of bad results since the last finite one.
        doubt: the doubt of the first of these.
    """

    def __init__(self) -> None:
        self.good, self.bad, self._streaks = 0, 0, 0
        self.doubt: Doubt | None = None

    def note_good(self) -> None:
        """Count a finite result."""
        self.good, self.bad = self.good + 1, 0

    def begins_badly(self) -> bool:
        """Count a bad result, and return whether it is to be explained: the first after a finite one.

        The explanations become rarer, so that a script that skips many bad batches does not wait for them.
        """
        self.bad += 1
        self._streaks += self.bad == 1
        return self.bad == 1 and (self._streaks <= 8 or self._streaks & (self._streaks - 1) == 0)


class _Jitted:
    """A watched jitted function. All other attributes are those of the jitted function."""

    def __init__(self, watcher: _Watcher, fun: Any, options: dict[str, Any]) -> None:
        self.__wrapped__ = fun
        self.inner = _jit(fun, **options)
        self._watcher, self._options, self.patience = watcher, options, PATIENCE
        self.metrics: frozenset[int] = frozenset()  # entries of the result without derivative
        functools.update_wrapper(self, fun, updated=())

    @transparent
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._watcher.marking:  # the cached trace has no marks
            return self.__wrapped__(*args, **kwargs)

        def replay(**more: Any) -> Report:
            return self.replay(args, kwargs, more)

        own = _derivative_of(self.__wrapped__)
        return self._watcher.call(
            self.inner,
            args,
            kwargs,
            name=_name(self.__wrapped__),
            replay=replay,
            judged=own and own[2],
            jitted=self,
            key=_key(self.__wrapped__, "jit"),
        )

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __copy__(self) -> _Jitted:
        return self

    def __deepcopy__(self, memo: Any) -> _Jitted:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _jit_again, (self.__wrapped__, self._options)

    def without_static(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function that was jitted, and its arguments, with the static ones bound."""
        return _without_static(self.__wrapped__, args, kwargs, self._options)

    def replay(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        more: dict[str, Any],
        leaving_out: frozenset[int] = frozenset(),
    ) -> Report:
        """Replay a call; the entries of its result at the positions left out are not judged."""
        fun, settings, _ = _derivative_of(self.__wrapped__) or (self.__wrapped__, {"gradients": False}, None)
        fun, args, kwargs = _without_static(fun, args, kwargs, self._options)
        fun = without(fun, leaving_out) if leaving_out else fun
        return _replay(fun, *args, **settings, **more, **kwargs)


def _derivative_of(fun: Any) -> tuple[Any, dict[str, Any], Callable[[Any], Any]] | None:
    """Return the differentiated function, the settings and what is judged, if ``fun`` is a derivative itself
    and not a function around one, such as ``jax.vmap(jax.grad(f))``."""
    found = getattr(fun, "stablenum_derivative", None)
    return found[1:] if found is not None and found[0] is fun else None


def _scaling() -> str:
    """Return the file of a running function that scales losses, whose gradients may overflow: then the scale
    comes down."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        found = next((name for name in (_OUR_SCALING, _FLAX_SCALING) if file.endswith(name)), "")
        if found:
            return found
        frame = frame.f_back
    return ""


def _loss_before_scaling(value: Any, *, ours: bool) -> Any:
    """Return the loss that our scaling keeps beside the scaled one. In flax's, only NaN counts."""
    leaves = jax.tree.leaves(value)
    return [leaves[1] if ours else jnp.where(jnp.isinf(leaves[0]), 0, leaves[0])]


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


def _jit_again(fun: Callable[..., Any], options: dict[str, Any]) -> Any:
    return jax.jit(fun, **options)


def _in_place_of(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @transparent
    def outer(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return outer


def _key(fun: Any, how: Any) -> Any:
    """Return what a function has in common with itself made anew, as in a loop."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return (_name(fun), getattr(fun, "__code__", None), how)


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


_largest_on_device = _jit(lambda leaf: jnp.abs(leaf).max())


def _largest(leaf: jax.Array) -> float:
    on_host = leaf.is_fully_addressable and all(d.platform == "cpu" for d in leaf.devices())
    return float(np.abs(np.asarray(leaf)).max() if on_host else _largest_on_device(leaf))


def _name(fun: Any) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return f"{getattr(fun, '__name__', type(fun).__name__)}()"
