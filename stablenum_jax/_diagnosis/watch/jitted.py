"""What the watched ``jax.jit``, ``jax.pmap`` and ``jax.shard_map`` return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import jax

from stablenum.diagnosis import Report
from stablenum.diagnosis.watch.frames import transparent
from stablenum_jax._diagnosis.watch.calls import Call, key_of, name_of
from stablenum_jax._diagnosis.watch.derivatives import derivative_of
from stablenum_jax._diagnosis.watch.programs import Program
from stablenum_jax._diagnosis.watch.watcher import Watcher

__all__ = ["Jitted", "Mapped"]

_jit = jax.jit  # the original, not the watched one


class Jitted:
    """A watched jitted function. All other attributes are those of the jitted function."""

    def __init__(self, watcher: Watcher, fun: Any, options: dict[str, Any]) -> None:
        self.__wrapped__ = fun
        self.inner = _jit(fun, **options)
        self._watcher, self._program = watcher, Program(fun, options)
        self._name, self._key = name_of(fun), key_of(fun, "jit")
        functools.update_wrapper(self, fun, updated=())

    @transparent
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fun, program = self.__wrapped__, self._program
        if self._watcher.judge.marking:
            return self._traced_again(*args, **kwargs)

        def replay(**more: Any) -> Report:
            return program.replay(args, kwargs, **more)

        own = derivative_of(fun)
        judged = own.judged if own else None
        call = Call(args, kwargs, self._name, self._key, replay, judged, program)
        return self._watcher.call(self.inner, call)

    def _traced_again(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)  # the cached trace has no marks

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else MethodType(self, owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "inner"), name)

    def __repr__(self) -> str:
        return repr(self.inner)

    def __copy__(self) -> Jitted:
        return self

    def __deepcopy__(self, memo: Any) -> Jitted:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _jit_again, (self.__wrapped__, self._program.options)


class Mapped(Jitted):
    """A watched function over the devices of a mesh, which is replayed as it is."""

    def __init__(self, watcher: Watcher, fun: Any, inner: Callable[..., Any]) -> None:
        self.__wrapped__ = fun
        self.inner = inner
        self._watcher, self._program = watcher, Program(inner, {})
        self._name, self._key = name_of(fun), key_of(fun, "jit")
        functools.update_wrapper(self, fun, updated=())

    def _traced_again(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)


def _jit_again(fun: Callable[..., Any], options: dict[str, Any]) -> Any:
    return jax.jit(fun, **options)
