"""Watch an unmodified JAX script for a checkup: the losses, and a sample of its steps in full.

A step is a call of a function that differentiates: a jitted one as a whole, or ``jax.grad`` of a function
that runs eagerly. Steps that are measured are evaluated a second time, equation by equation; the script goes
on with the result of its own call.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from stablenum.diagnosis.checkup.course import MOST_PLACES, Clip, Course, Loss, ParameterSeen
from stablenum.diagnosis.checkup.remedies import Change
from stablenum.diagnosis.checkup.schedule import Schedule
from stablenum.diagnosis.checkup.wording import places_of
from stablenum.diagnosis.replay.values import Place
from stablenum.diagnosis.watch.frames import transparent
from stablenum.diagnosis.watch.session import FAILED, Session
from stablenum_jax._diagnosis.checkup.copies import Copies
from stablenum_jax._diagnosis.checkup.custom_rules import CustomRules
from stablenum_jax._diagnosis.checkup.held import held_in, loss_scales, numbers_in
from stablenum_jax._diagnosis.checkup.marks import (
    CLIPPED,
    GRADIENT,
    LOSS,
    PARAMETER,
    STATE,
    USED,
    has_marks,
    mark,
)
from stablenum_jax._diagnosis.checkup.measuring import MeasuredCall, parameters_seen, probe_of
from stablenum_jax._diagnosis.checkup.over_devices import DeviceSums
from stablenum_jax._diagnosis.checkup.remedy import CHANGES, with_remedy, with_settings
from stablenum_jax._diagnosis.replay.processes import spans_in
from stablenum_jax._diagnosis.replay.source_lines import is_user_code, place_in, users_place
from stablenum_jax._diagnosis.watch.programs import without_static
from stablenum_jax._diagnosis.watch.trees import Tree
from stablenum_jax._step import scaled_loss
from stablenum_jax._step.driver_mode import Capture, current_mode
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.state import has_guard

__all__ = ["watch"]

_SETTINGS = {"learning_rate": "lr", "weight_decay": "weight_decay", "eps": "eps", "momentum": "momentum"}
# Functions that give parameters their first values.
_DRAWING = ("normal", "uniform", "truncated_normal", "orthogonal")
_jit, _grad, _value_and_grad, _make_jaxpr = jax.jit, jax.grad, jax.value_and_grad, jax.make_jaxpr


def watch(session: Session) -> None:
    """Watch everything that this process trains from now on."""
    watcher = _Watcher(session)
    jax.jit = watcher.jit
    jax.grad = watcher.derivative(_grad, value=False)
    jax.value_and_grad = watcher.derivative(_value_and_grad, value=True)
    optax.GradientTransformation.update = property(watcher.update)
    optax.GradientTransformation.init = property(watcher.init)
    for name, function in list(vars(optax).items()):
        if inspect.isfunction(function) and not name.startswith("_"):
            setattr(optax, name, watcher.made(name, function))
    for name, function in list(vars(jax.nn.initializers).items()):
        if inspect.isfunction(function):
            setattr(jax.nn.initializers, name, watcher.initialiser(function))
    optax.MultiSteps.__init__ = watcher.accumulating(optax.MultiSteps.__init__)
    for name in _DRAWING:
        setattr(jax.random, name, watcher.drawing(getattr(jax.random, name)))
    scaled_loss.loss_times_scale = watcher.scaling(scaled_loss.loss_times_scale)
    watcher.custom.install()
    watcher.sums.install()
    session.on_end.append(watcher.conclude)
    session.on_verdict.append(watcher.keep_losses)


class _Program:
    """A function that the script calls again and again.

    Attributes:
        trains: whether it differentiates; None before its first call.
        traces: what it was traced to, by its arguments' shapes.
        sources: where the equations of these traces were written.
        losses: the positions of the loss among its results.
        pending: the step that was measured last, until the parameters after it are known.
        inits: where it initialised an optimizer's state.
        measured: how many of its calls were measured.
    """

    def __init__(self) -> None:
        self.trains: bool | None = None
        self.traces: dict[Any, Any] = {}
        self.sources: dict[int, Any] = {}
        self.losses: tuple[int, ...] | None = None
        self.pending: tuple[MeasuredCall, int, float] | None = None
        self.inits: list[Place | None] = []
        self.measured = 0


class _Jitted:
    """What the watched ``jax.jit`` returns. All other attributes are those of the jitted function."""

    def __init__(self, watcher: _Watcher, fun: Any, options: dict[str, Any]) -> None:
        self.__wrapped__ = fun
        self.inner, self._options = _jit(fun, **options), options
        self._watcher, self._program = watcher, _Program()
        functools.update_wrapper(self, fun, updated=())

    @transparent
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def bound() -> Any:
            return without_static(self.__wrapped__, args, kwargs, self._options)

        return self._watcher.call(self._program, self.inner, bound, args, kwargs)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else functools.partial(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)


class _Watcher:
    """Collects the course of a training."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.course = Course(framework="jax")
        self.losses: list[tuple[int, Any, Place | None]] = []
        self.rate: float | Callable[[int], Any] = math.nan
        self.schedule = Schedule() if session.remedy is None else Schedule(session.remedy.measured)
        self.depth = 0
        self.inits: list[Place | None] = []
        self.remedy = session.remedy
        self.bounds: dict[str, tuple[float, Place]] = {}  # kind of a mark -> what it is clipped to
        self.shapes: dict[str, tuple[int, ...]] = {}  # name of a parameter -> its shape
        self.unscaled = False  # whether the loss that is differentiated was marked before it was scaled
        self.every = 1  # how many calls of optax.MultiSteps make a step
        self.inside = False  # whether an optimizer's function runs, of which others may be parts
        self.updated: Place | None = None  # where the script has the optimizer compute updates
        self.states: list[object] = []  # of the measured steps, what the optimizer's state was
        self.custom, self.sums, self.copies = CustomRules(), DeviceSums(), Copies()
        self.drawn: dict[tuple[int, ...], Place] = {}  # shape -> where the last such array was drawn

    # --- what replaces JAX's and optax's functions ---

    @transparent
    def jit(self, fun: Any = None, /, **options: Any) -> Any:
        """Do what ``jax.jit`` does, but watch the function and donate no buffers."""
        if fun is None:
            return functools.partial(self.jit, **options)
        for name in ("donate_argnums", "donate_argnames"):
            options.pop(name, None)
        return _Jitted(self, fun, options)

    def derivative(self, transform: Callable[..., Any], *, value: bool) -> Callable[..., Any]:
        """Do what ``jax.grad`` or ``jax.value_and_grad`` does, with marks in a trace; watch calls outside."""

        @functools.wraps(transform)
        @transparent
        def outer(fun: Any, argnums: Any = 0, has_aux: bool = False, *others: Any, **options: Any) -> Any:
            inner = _value_and_grad(fun, argnums, has_aux, *others, **options)
            program = _Program()

            @functools.wraps(fun)
            @transparent
            def derivative(*args: Any, **kwargs: Any) -> Any:
                def marked(*args: Any, **kwargs: Any) -> Any:
                    before, self.unscaled = self.unscaled, False
                    first, gradients = inner(*_marked_arguments(args, argnums), **kwargs)
                    loss, aux = first if has_aux else (first, None)
                    loss = loss if self.unscaled else mark(loss, LOSS)
                    gradients, self.unscaled = mark(gradients, GRADIENT), before
                    chosen = _chosen(args, argnums)
                    params, others = (
                        [a for i, a in enumerate(args) if (i in chosen) is own] for own in (True, False)
                    )
                    self.sums.note(loss, gradients, params, others)
                    if value:
                        return ((loss, aux) if has_aux else loss), gradients
                    return (gradients, aux) if has_aux else gradients

                return self.call(program, marked, lambda: (marked, args, kwargs), args, kwargs)

            return derivative

        return outer

    def scaling(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss times its scale, and mark the loss."""

        @functools.wraps(inner)
        @transparent
        def scaled(loss: Any, scale: Any) -> Any:
            self.unscaled = True
            return inner(mark(loss, LOSS), scale)

        return scaled

    def update(self, transformation: Any) -> Callable[..., Any]:
        """Do what ``tx.update`` does, and mark in a trace which gradients it uses."""
        inner = transformation[1]

        @functools.wraps(inner)
        @transparent
        def update(updates: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
            if isinstance(current_mode(), Capture):  # the guard looks for the very gradients of the script
                return inner(updates, state, *args, **kwargs)
            if state is not None:
                state = mark(state, STATE)
                self.updated = self.updated or users_place()
            return self.changed(inner, mark(updates, USED), state, *args, **kwargs)

        return update

    @transparent
    def changed(self, inner: Callable[..., Any], updates: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what an optimizer's update returns, with the change that is tried. An update inside another
        one is left alone."""
        if self.remedy is None or self.inside:
            return inner(updates, *args, **kwargs)
        if self.remedy.change in (Change.RATE, Change.CLIP):
            self.session.note_applied()
        return self.whole(with_remedy, self.remedy, inner, updates, *args, **kwargs)

    @transparent
    def whole(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function of an optimizer returns, whose parts are left alone."""
        self.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self.inside = False

    def init(self, transformation: Any) -> Callable[..., Any]:
        """Do what ``tx.init`` does, and note it, unless it is part of another one."""
        inner = transformation[0]

        @functools.wraps(inner)
        @transparent
        def init(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return inner(*args, **kwargs)
            if not self.depth and self.course.steps:
                self.course.renewed.append(self.course.steps)
                self.course.renewed_places = self.course.renewed_places or places_of(users_place())
            elif self.depth:
                self.inits.append(users_place())
            state = self.whole(inner, *args, **kwargs)
            self.course.guarded = self.course.guarded or has_guard(state) > 0
            return state

        return init

    def made(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Do what a function of optax does, and note the settings of what it makes."""

        @functools.wraps(function)
        @transparent
        def outer(*args: Any, **kwargs: Any) -> Any:
            if self.remedy is not None:
                args, kwargs, changed = with_settings(self.remedy, function, args, kwargs)
                if changed:
                    self.session.note_applied()
            result = function(*args, **kwargs)
            if isinstance(result, optax.GradientTransformation) or name.endswith("_schedule"):
                frame = sys._getframe(1)
                if is_user_code(frame.f_code.co_filename):  # not a part of another one
                    place = place_in(frame.f_code, frame.f_lineno)
                    self.session.sheltered(self.note_made, name, place, function, args, kwargs)
                    if name == "clip_by_global_norm":
                        result = self.clipping(result, place, *args, **kwargs)
            return result

        return outer

    def initialiser(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Do what a function of ``jax.nn.initializers`` does, and note where it is called."""

        @functools.wraps(function)
        @transparent
        def outer(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if not self.course.steps and is_user_code(frame.f_code.co_filename):
                place = place_in(frame.f_code, frame.f_lineno)
                if place not in self.course.initialisers:
                    self.course.initialisers = (*self.course.initialisers, place)[:MOST_PLACES]
            return function(*args, **kwargs)

        return outer

    def accumulating(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Do what the constructor of ``optax.MultiSteps`` does, and note how many calls make a step."""

        @functools.wraps(inner)
        @transparent
        def outer(made: Any, opt: Any, every_k_schedule: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(every_k_schedule, int):
                self.every = max(1, every_k_schedule)
            inner(made, opt, every_k_schedule, *args, **kwargs)

        return outer

    def drawing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Do what a function of ``jax.random`` does, and note where it is called before the first step."""

        @functools.wraps(function)
        @transparent
        def outer(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            shape = tuple(getattr(result, "shape", ()))
            if not self.course.steps and not self.depth and len(shape) > 1:
                place = users_place()
                if place is not None:
                    self.drawn[shape] = place
            return result

        return outer

    def clipping(self, made: Any, place: Place, max_norm: Any) -> Any:
        """Return a clipping that marks in a trace what it reads."""
        inner, kind = made[1], f"{CLIPPED}{len(self.bounds)}"
        self.bounds[kind] = float(max_norm), place

        @functools.wraps(inner)
        @transparent
        def update(updates: Any, *args: Any, **kwargs: Any) -> Any:
            return inner(mark(updates, kind), *args, **kwargs)

        return type(made)(made[0], update)

    def note_made(
        self, name: str, place: Place, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """Note an optimizer or a schedule that the script makes, and its settings."""
        if name.endswith("_schedule"):
            self.course.scheduled = (*self.course.scheduled, place)[:MOST_PLACES]
            return
        if name == "chain":
            return
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        settings = {
            known: float(value)
            for key, known in _SETTINGS.items()
            if isinstance(value := given.arguments.get(key), (int, float))
        }
        rate = given.arguments.get("learning_rate")
        if rate is not None:
            self.rate = rate
        if rate is not None or not self.course.made:
            self.course.made = (place, *self.course.made)[:MOST_PLACES]
        self.course.settings += ((name, settings),)

    # --- calls ---

    @transparent
    def call(
        self, program: _Program, inner: Callable[..., Any], bound: Callable[[], Any], args: Any, kwargs: Any
    ) -> Any:
        """Return what ``inner`` returns, and measure the call if it is a step and it is time to."""
        given = Tree((args, kwargs))
        if self.depth or given.traced:
            return inner(*args, **kwargs)
        if self.remedy is not None and not self.course.steps:
            drawn = self.session.sheltered(self.drawn_afresh, program, bound)
            if drawn and drawn is not FAILED:
                self.session.note_applied()
                fun, own, options = bound()
                (args, kwargs), (own, options) = (
                    _swapped((args, kwargs), drawn),
                    _swapped((own, options), drawn),
                )
                bound = functools.partial(tuple, (fun, own, options))
        self.depth += 1
        known = len(self.inits)
        try:
            result = inner(*args, **kwargs)
        finally:
            self.depth -= 1
            program.inits += self.inits[known:]  # while it was traced
        made = Tree(result)
        if made.traced:
            return result
        if program.trains is False and program.inits:  # it applies gradients that another one computes
            self.course.renewed.append(self.course.steps)
            self.course.renewed_places = self.course.renewed_places or places_of(program.inits[0])
        elif program.trains is not False and not spans_in(given.leaves):  # nor what no process has whole
            self.depth += 1
            try:
                self.session.sheltered(self.note, program, bound, made.leaves)
            finally:
                self.depth -= 1
        limit = self.session.plan.steps
        if limit is not None and self.course.steps >= limit:
            self.session.stop()
        return result

    def drawn_afresh(self, program: _Program, bound: Callable[[], Any]) -> dict[int, Any]:
        """Return other first values for parameters, by the ids of those that the first step is given; none if
        they are not what is tried."""
        if self.remedy is None or self.remedy.change is not Change.INITIALISE:
            return {}
        fun, args, kwargs = bound()
        leaves = jax.tree.leaves((args, kwargs))
        closed = self.trace_of(program, fun, args, kwargs, leaves)
        # A step that only computes gradients leaves the parameters to the script.
        if not program.trains or (self.course.settings and not has_marks(closed, USED)):
            return {}
        call = MeasuredCall.of(closed, leaves)
        return {id(leaves[call.inputs[n]]): new for n, new in call.drawn(self.remedy.deviations).items()}

    def note(self, program: _Program, bound: Callable[[], Any], results: list[Any]) -> None:
        """Note a call of a program that may train."""
        self.schedule.begin()
        course = self.course
        if program.pending is not None:
            self.finish(program, jax.tree.leaves(bound()[1:]))
        place = users_place()
        course.step_place = course.step_place or place
        last = course.probes[-1].step if course.probes else 0
        if program.trains is None or self.schedule.is_due(course.steps, len(course.probes), last):
            fun, args, kwargs = bound()
            leaves = jax.tree.leaves((args, kwargs))
            closed = self.trace_of(program, fun, args, kwargs, leaves)
            if program.trains:
                held = held_in((args, kwargs))
                course.scales += [(course.steps, scale) for scale in loss_scales(held, leaves)]
                course.numbers.append((course.steps, numbers_in(held, leaves)))
                call = MeasuredCall.of(closed, leaves, held, program.sources)
                program.losses = call.losses
                self.custom.compare(call.marked, course.steps)
                self.copies.look(fun, (args, kwargs), call.inputs, [role == "buffer" for role, _ in held])
                if call.captured and program.measured:
                    course.captured = call.captured
                program.measured += 1
                program.pending = call, course.steps, self.rate_at(course.steps)
            self.schedule.end()
        if not program.trains:
            return
        loss = results[program.losses[0]] if program.losses and program.losses[0] < len(results) else None
        if loss is not None and is_floating(loss) and getattr(loss, "size", 0) == 1:
            self.losses.append((course.steps, loss, place))
        elif program.pending is not None and program.pending[1] == course.steps:
            marked = list(program.pending[0].marked.get(LOSS, {}).values())
            if marked and getattr(marked[0].data, "size", 0) == 1:
                self.losses.append((course.steps, marked[0].data, place))
        if not isinstance(self.rate, float) or not math.isnan(self.rate):
            course.rates.append((course.steps, self.rate_at(course.steps)))
        course.steps += 1

    def trace_of(self, program: _Program, fun: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        """Return the program's jaxpr for these arguments."""
        kinds = tuple((getattr(x, "shape", ()), str(getattr(x, "dtype", type(x)))) for x in leaves)
        key = jax.tree.structure((args, kwargs)), kinds
        if key not in program.traces:
            program.traces[key] = _make_jaxpr(fun)(*args, **kwargs)
            if program.trains is None:
                program.trains = has_marks(program.traces[key], GRADIENT)
            if program.trains and program.inits:
                self.course.renewed_places = places_of(program.inits[0])
        return program.traces[key]

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step; NaN if it is not known."""
        try:
            return float(self.rate(step // self.every)) if callable(self.rate) else float(self.rate)
        except (TypeError, ValueError):
            return math.nan

    def finish(self, program: _Program, leaves: list[Any]) -> None:
        """Note a measured step, after which the parameters are now known."""
        assert program.pending is not None
        call, step, rate = program.pending
        program.pending = None
        after = leaves if len(leaves) == len(call.given) else None
        parameters = self.named_apart(call, parameters_seen(call, after, rate))
        for kind, (bound, place) in self.bounds.items():
            known = [call.signals.get(cell.id) for cell in call.marked.get(kind, {}).values()]
            if known and all(known):
                norm = math.hypot(*(s.norm for s in known if s is not None))
                self.course.clips.append(Clip(step, norm, bound, place))
        state = call.marked.get(STATE, {})
        if state and any(p.gradient > 0 for p in parameters):
            shapes = {p.shape for p in parameters if p.shape}
            kept = {n: c.data for n, c in state.items() if np.shape(c.data) in shapes or n.endswith("count")}
            moments = {n: x for n, x in kept.items() if not n.endswith("_count")}
            self.states += [{n: _digest(x) for n, x in moments.items()}] if moments else []
        self.course.probes.append(probe_of(call, step, parameters))

    def named_apart(
        self, call: MeasuredCall, parameters: tuple[ParameterSeen, ...]
    ) -> tuple[ParameterSeen, ...]:
        """Return the parameters under other names if an earlier program has others of these names, as the two
        models of a GAN may."""
        if any(self.shapes.get(p.name, p.shape) != p.shape for p in parameters):
            parameters = tuple(p._replace(name=f"{p.name} (2)") for p in parameters)
            for value in call.trace.values:
                value.name = f"{value.name} (2)" if value.role == "parameter" else value.name
        for p in parameters:
            self.shapes.setdefault(p.name, p.shape)
        return parameters

    def keep_losses(self) -> None:
        """Record the losses of a script that has failed, whose course is not judged."""
        outcome = self.session.outcome
        if not outcome.losses and outcome.failure is not None:
            self.course.losses = [Loss(step, float(x), place) for step, x, place in self.losses]
            outcome.losses = self.course.values

    def conclude(self) -> None:
        """Judge the course of the training, which has ended."""
        course = self.course
        course.custom, course.copies = self.custom.found, self.copies.found
        course.over_devices = self.sums.found
        for p in course.probes[0].parameters if course.probes else ():
            if p.shape in self.drawn:
                course.initialised[p.name] = self.drawn[p.shape]
        course.losses = [Loss(step, float(x), place) for step, x, place in self.losses]
        if course.renewed_places and not course.renewed:
            course.renewed = list(range(course.steps))
        if self.states and all(state == self.states[0] for state in self.states):
            course.unchanged_state = len(self.states)
            course.renewed_places = course.renewed_places or places_of(self.updated, course.step_place)
        if course.steps:
            self.session.judge(course, CHANGES)


def _swapped(tree: Any, new: dict[int, Any]) -> Any:
    return jax.tree.map(lambda leaf: new.get(id(leaf), leaf), tree)


def _digest(data: Any) -> bytes:
    if jax.numpy.issubdtype(data.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(data)
    return hashlib.blake2b(
        np.asarray(data).tobytes(), digest_size=16
    ).digest()  # 128 bits: no two arrays share one


def _chosen(args: tuple[Any, ...], argnums: Any) -> set[int]:
    """Return the positions of the arguments that are differentiated."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    return {n % len(args) for n in numbers} if args else set()


def _marked_arguments(args: tuple[Any, ...], argnums: Any) -> list[Any]:
    chosen = _chosen(args, argnums)
    return [mark(a, PARAMETER) if i in chosen else a for i, a in enumerate(args)]
