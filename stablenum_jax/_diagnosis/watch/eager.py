"""Watches JAX's operations outside of every function that is jitted or differentiated."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp

from stablenum.diagnosis import Report
from stablenum.diagnosis.watch.frames import transparent
from stablenum_jax._diagnosis.replay import replay
from stablenum_jax._diagnosis.replay.flags import flags_of
from stablenum_jax._diagnosis.replay.jax_internals import under_transformation
from stablenum_jax._diagnosis.watch.placing import at_the_caller
from stablenum_jax._diagnosis.watch.watcher import Watcher

__all__ = ["Eager", "places"]

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_MODULES = (
    jnp, jnp.linalg, jnp.fft, jax.lax, jax.nn, jsp.special, jsp.linalg,
    *(m for m in vars(jsp.stats).values() if isinstance(m, types.ModuleType)),
)  # fmt: skip
# JAX asks which function these are where it is given them (``lax.reduce``), so they are left as they are.
_ASKED_FOR = {jax.lax.add, jax.lax.mul, jax.lax.max, jax.lax.min}
# These say something about formats and shapes, and make no array.
_MAKE_NOTHING = {
    jnp.broadcast_shapes, jnp.can_cast, jnp.iscomplexobj, jnp.isdtype, jnp.isrealobj, jnp.isscalar,
    jnp.issubdtype, jnp.iterable, jnp.ndim, jnp.promote_types, jnp.result_type, jnp.shape, jnp.size,
    jax.lax.broadcast_shapes,
}  # fmt: skip
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "radd", "rsub", "rmul",
    "rtruediv", "rfloordiv", "rmod", "rdivmod", "rpow", "rmatmul", "neg", "pos", "abs", "getitem",
)  # fmt: skip
_PROPERTIES = ("T", "mT", "real", "imag")
_READS = ("__float__", "item")
_UPDATES = ("add", "apply", "divide", "get", "max", "min", "mul", "multiply", "power", "set", "subtract")


def places() -> Iterator[tuple[Any, str]]:
    """Yield each module or class whose attributes are replaced, and the name of the attribute."""
    for module in _MODULES:
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and _is_operation(value):
                yield module, name
    own = array_class()
    for name in dir(own):
        known = name.strip("_") in _OPERATORS if name.startswith("_") else _is_method(own, name)
        if known or name in _READS:
            yield own, name
    updates = type(own.at.fget(None)[0])
    for name in _UPDATES:
        if hasattr(updates, name):
            yield updates, name


def array_class() -> Any:
    """Return the class of arrays. No array is made, which would start the backend before the script has set
    the number of devices or has joined other processes (``jax.distributed.initialize``)."""
    try:
        from jax._src.array import ArrayImpl
    except ImportError:  # there is no public name
        return type(jnp.zeros(1))
    return ArrayImpl


def _is_method(own: Any, name: str) -> bool:
    """Return whether an array's attribute is an operation, which has a function or a name of its own."""
    if name in ("astype", "flatten", *_PROPERTIES):
        return True
    return hasattr(jnp, name) and callable(getattr(own, name))


def _is_operation(value: Any) -> bool:
    if isinstance(value, (type, types.ModuleType)) or not callable(value):
        return False
    named = getattr(value, "__module__", None) or ""
    known = value in _ASKED_FOR or value in _MAKE_NOTHING
    return named.startswith("jax") and hasattr(value, "__name__") and not known


class Eager:
    """Has the results of operations noted that are not part of a watched call."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._running = watcher, False

    def watch(self) -> None:
        """Watch JAX's operations from now on."""
        for owner, name in list(places()):
            setattr(owner, name, self._replaced(owner, name))

    def _replaced(self, owner: Any, name: str) -> Any:
        original = getattr(owner, name)
        if isinstance(owner, types.ModuleType):
            return _like(original, self._watched(original, f"{owner.__name__}.{name}"), owner, name)

        def by_name(
            array: Any, *args: Any, **kwargs: Any
        ) -> Any:  # an array that is traced is not of the class
            return getattr(array, name)(*args, **kwargs)

        if name in _READS:
            return self._reading(original, name)
        if callable(original):
            method = self._watched(original, name.strip("_"), by_name)
            method.__name__, method.__doc__ = name, original.__doc__
            return method
        read = self._watched(functools.partial(_read, original), name, functools.partial(_attribute, name))
        return property(read)

    def _reading(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        origins = self._watcher.origins

        @transparent
        def read(array: Any, *args: Any) -> Any:
            origins.note_read(array)
            return original(array, *args)

        read.__name__, read.__doc__ = name, original.__doc__
        return read

    def _watched(
        self, original: Callable[..., Any], name: str, again: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return the operation, watched; ``again`` does the same with arrays that are traced."""
        watcher = self._watcher

        @transparent
        def operation(*args: Any, **kwargs: Any) -> Any:
            if self._running or watcher.busy or under_transformation():
                return original(*args, **kwargs)
            self._running = True
            try:
                result = original(*args, **kwargs)
                if not sys._getframe(1).f_code.co_filename.startswith(_OURS):
                    watcher.sheltered(self._note, name, again or original, args, kwargs, result)
            finally:
                self._running = False
            return result

        return operation

    def _note(self, name: str, again: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        bad = [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array) and any(flags_of(x))]
        if bad:
            report = functools.partial(self._replay, name, again, args, kwargs)
            self._watcher.origins.note(name, report, (args, kwargs), bad)

    def _replay(self, name: str, again: Callable[..., Any], args: Any, kwargs: Any) -> Report:
        report = self._watcher.judge.reported(
            name, lambda: replay(again, *args, gradients=False, known_bad=True, **kwargs)
        )
        return at_the_caller(report, operation=True)


def _read(original: Any, array: Any) -> Any:
    return original.__get__(array)


def _attribute(name: str, array: Any) -> Any:
    return getattr(array, name)


def _like(original: Any, operation: Callable[..., Any], module: types.ModuleType, name: str) -> Any:
    """Return the operation with the attributes of the original, to be found where that was."""
    functools.update_wrapper(operation, original)
    for own in dir(original):
        if not own.startswith("_") and not hasattr(operation, own):
            setattr(operation, own, getattr(original, own))
    operation.__module__, operation.__qualname__ = module.__name__, name  # for pickle
    return operation
