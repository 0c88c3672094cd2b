"""Compare what a script's own ``custom_vjp`` and ``custom_jvp`` give with what their functions compute."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat.numpy as numpy_namespace
import jax
import numpy as np

from stablenum.diagnosis.checkup.custom_derivatives import (
    MOST_CALLS,
    MOST_ELEMENTS,
    CustomDerivative,
    compared,
)
from stablenum.diagnosis.replay.source_files import is_the_scripts, return_in
from stablenum.diagnosis.replay.values import Place
from stablenum.diagnosis.watch.frames import transparent
from stablenum_jax._diagnosis.checkup.marks import CUSTOM, make_transposable, mark
from stablenum_jax._diagnosis.replay.source_lines import users_place
from stablenum_jax._trees.leaves import is_floating
from stablenum_jax._trees.names import path_name

__all__ = ["CustomRules"]

_KINDS = (jax.custom_vjp, jax.custom_jvp)


@dataclass(frozen=True, slots=True)
class _Application:
    """A function that was applied in a trace: with which arguments, and on which line."""

    function: Any
    args: tuple[Any, ...]
    place: Place | None


class CustomRules:
    """Watches which functions with rules of their own a script applies."""

    def __init__(self) -> None:
        self._applied: dict[str, _Application] = {}  # kind of a mark -> what is applied to what it marks
        self._kinds: dict[Any, str] = {}  # code and line of a function -> the kind of its mark
        self._compared: dict[str, int] = {}
        self.found: list[CustomDerivative] = []

    def install(self) -> None:
        """Watch from now on, and mark in a trace what such functions are given."""
        make_transposable()
        for kind in _KINDS:
            kind.__call__ = self._watching(kind.__call__)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Watch in this context."""
        before = [kind.__call__ for kind in _KINDS]
        self.install()
        try:
            yield
        finally:
            for kind, call in zip(_KINDS, before, strict=True):
                kind.__call__ = call

    def _watching(self, inner: Any) -> Any:
        watched = self

        @transparent
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            code = getattr(inspect.unwrap(self.fun), "__code__", None)
            if code is None or kwargs or not is_the_scripts(code.co_filename):
                return inner(self, *args, **kwargs)
            place = users_place()
            kind = watched._kinds.setdefault((code, place), f"{CUSTOM}{len(watched._kinds)}")
            given = mark(args, kind)
            if all(a is b for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(args), strict=True)):
                return inner(self, *args, **kwargs)  # outside of a trace
            shapes = jax.tree_util.tree_map_with_path(_kept, args)
            watched._applied[kind] = _Application(self, shapes, place)
            return inner(self, *given)

        return call

    def compare(self, marked: dict[str, dict[str, Any]], step: int) -> None:
        """Compare the rules of the functions that a measured step has applied."""
        for kind in sorted(marked.keys() & self._applied.keys()):
            one = self._applied[kind]
            if self._compared.get(kind, 0) >= MOST_CALLS:
                continue
            self._compared[kind] = self._compared.get(kind, 0) + 1
            found: tuple[Any, Any] = (), ()
            with contextlib.suppress(Exception):  # it cannot be evaluated again, for one of many reasons
                found = _compared(one, {name: cell.data for name, cell in marked[kind].items()})
            name = getattr(one.function, "__name__", "a function")
            written = _place_of(_rule_of(one.function))
            self.found.append(CustomDerivative(name, one.place, written, step, *found))


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is known of a traced argument: its name in the mark, and its shape."""

    name: str
    shape: tuple[int, ...]


def _kept(path: Any, leaf: Any) -> Any:
    return _Kept(path_name(path), leaf.shape) if isinstance(leaf, jax.core.Tracer) else leaf


def _compared(one: _Application, values: dict[str, Any]) -> tuple[Any, Any]:
    def filled(leaf: Any) -> Any:
        return _unbatched(values[leaf.name], leaf.shape) if isinstance(leaf, _Kept) else leaf

    args = jax.tree.map(filled, one.args, is_leaf=lambda x: isinstance(x, _Kept))
    if sum(np.size(x) for x in jax.tree.leaves(args)) > MOST_ELEMENTS:
        return (), ()
    functions = [inspect.unwrap(f) for f in (one.function.fun, _rule_of(one.function)) if f is not None]
    with jax.enable_x64(True):
        return compared(functions, lambda wide: _Call(one.function, args, wide=wide), xp=numpy_namespace)


def _static(function: Any) -> tuple[int, ...]:
    return tuple(getattr(function, "nondiff_argnums", ()))


def _unbatched(data: Any, shape: tuple[int, ...]) -> Any:
    """Return an array, or the first of a batch of such arrays, that ``vmap`` was given."""
    extra = np.ndim(data) - len(shape)
    for axes in itertools.combinations(range(np.ndim(data)), max(0, extra)):
        if tuple(np.delete(np.shape(data), axes)) == shape:
            return jax.numpy.asarray(data)[
                tuple(0 if i in axes else slice(None) for i in range(np.ndim(data)))
            ]
    raise ValueError(f"an array of shape {np.shape(data)} is not a batch of arrays of shape {shape}")


class _Call:
    """A call that can be evaluated again: see ``CustomCall``."""

    cotangents = None  # a trace does not show them

    def __init__(self, function: Any, args: tuple[Any, ...], *, wide: bool) -> None:
        if jax.make_jaxpr(function.fun, static_argnums=_static(function))(*args).effects:
            raise ValueError("it prints, or calls back")
        self._function, self._wide = function, wide
        static = _static(function)
        leaves, self._structure = jax.tree.flatten(args)
        numbers = jax.tree.leaves([jax.tree.map(lambda _, i=i: i, a) for i, a in enumerate(args)])
        self._leaves = leaves
        self._at = [
            i
            for i, (leaf, n) in enumerate(zip(leaves, numbers, strict=True))
            if n not in static and is_floating(leaf) and not np.iscomplexobj(leaf)
        ]
        if not self._at:
            raise ValueError("nothing to differentiate")
        self.inputs = [np.asarray(leaves[i]).astype(np.float64) for i in self._at]
        self.outputs = self._wide_outputs(function(*args))

    def _run(self, function: Any, inputs: Sequence[Any]) -> list[Any]:
        leaves = list(self._leaves)
        for i, x in zip(self._at, inputs, strict=True):
            leaves[i] = x if self._wide else jax.numpy.asarray(x, self._leaves[i].dtype)
        result = function(*jax.tree.unflatten(self._structure, leaves))
        return [y for y in jax.tree.leaves(result) if is_floating(y)]

    @staticmethod
    def _wide_outputs(result: Any) -> list[Any]:
        return [np.asarray(y).astype(np.float64) for y in jax.tree.leaves(result) if is_floating(y)]

    def value(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs for these inputs."""
        return self._wide_outputs(self._run(self._function.fun, [jax.numpy.asarray(x) for x in inputs]))

    def _pulled_back(self, function: Any, cotangents: Sequence[Any]) -> list[Any]:
        given = [jax.numpy.asarray(x) for x in self.inputs]
        made, pull = jax.vjp(lambda *x: self._run(function, x), *given)
        back = pull([jax.numpy.asarray(v, y.dtype) for v, y in zip(cotangents, made, strict=True)])
        return [np.asarray(g).astype(np.float64) for g in back]

    def written(self, cotangents: Sequence[Any]) -> list[Any]:
        """Return what the function's own rule gives."""
        return self._pulled_back(self._function, cotangents)

    def ordinary(self, cotangents: Sequence[Any]) -> list[Any] | None:
        """Return what JAX gives for the function without its rule."""
        try:
            return self._pulled_back(self._function.fun, cotangents)
        except Exception:  # noqa: BLE001 (a loop that cannot be differentiated in reverse, a callback)
            return None


def _rule_of(function: Any) -> Any:
    """Return the function that gives the derivative, as the script has written it; None if it has none."""
    return getattr(function, "bwd", None) or getattr(function, "jvp", None)


def _place_of(rule: Any) -> Place | None:
    """Return the line on which a rule is written."""
    code = getattr(inspect.unwrap(rule), "__code__", None) if rule is not None else None
    return return_in(code) if code is not None and is_the_scripts(code.co_filename) else None
