"""The same for JAX: what modules of flax linen, flax nnx and equinox return. No program is changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

import stablenum_jax
from benchmarks.peers.runs import Arrays, Returned, Run, noted

__all__ = ["jax_run"]


def jax_run(side: Callable[[], Any], arrays: Arrays) -> Run:
    """Run the step of a pair's JAX side, with these parameters, operation by operation."""
    found = Run()
    make = stablenum_jax.program

    def watched(loss_fn: Any, params: Any, *args: Any, optimizer: Any = None) -> Any:
        def loss(params: Any, *args: Any) -> Any:
            with _wrapped(params, found):
                return loss_fn(params, *args)

        return make(loss, params, *args, optimizer=optimizer)

    with mock.patch.object(stablenum_jax, "program", watched):
        program = side()
    # The adapter's own way to take a model of any library apart; the step itself is plain JAX.
    call = program._call()
    data = [_given(leaf, arrays) for leaf in call.leaves]
    for kind, name, _, x in program._steps(call, data, 1):
        if kind == "loss":
            found.loss = float(x)
        else:
            {"gradient": found.gradients, "updated": found.updated}[kind][name] = np.asarray(x)
    jax.effects_barrier()
    return found


def _given(leaf: Any, arrays: Mapping[str, Any]) -> Any:
    if leaf.role not in ("parameter", "buffer") or leaf.name not in arrays:
        return leaf.data
    return jnp.asarray(np.reshape(arrays[leaf.name], leaf.data.shape), leaf.data.dtype)


class _Paths:
    """The paths of a model's modules, also of its copies: JAX takes a model that is an argument apart, and
    puts it together again."""

    def __init__(self, model: Any) -> None:
        self._kind = type(model)
        self._known: dict[int, tuple[str, Any]] = {}  # with the module, so that no other one gets its id
        self._add(model)

    def _add(self, model: Any) -> None:
        self._known.update((id(module), (path, module)) for path, module in _modules(model))

    def of(self, module: Any) -> str | None:
        if id(module) not in self._known and type(module) is self._kind:
            self._add(module)
        return self._known.get(id(module), (None, None))[0]

    def kinds(self) -> set[type]:
        return {type(module) for _, module in self._known.values()}


@contextmanager
def _wrapped(params: Any, found: Run) -> Iterator[None]:
    """Within it, what a module returns is kept, and later its gradient."""
    paths = _Paths(params)

    def of_linen(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = call(*args, **kwargs)
        if context.method_name != "__call__":
            return out
        return _tapped(out, ".".join(context.module.path), found)

    with ExitStack() as stack:
        stack.enter_context(flax.linen.intercept_methods(of_linen))
        for kind in paths.kinds():
            if callable(getattr(kind, "__call__", None)):  # noqa: B004
                stack.enter_context(_patched(kind, paths, found))
        yield


@contextmanager
def _patched(kind: type, paths: _Paths, found: Run) -> Iterator[None]:
    own, original = "__call__" in vars(kind), kind.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = paths.of(self)
        out = original(self, *args, **kwargs)
        return out if path is None else _tapped(out, path, found)

    before = vars(kind).get("__call__")
    type.__setattr__(kind, "__call__", called)
    try:
        yield
    finally:
        if own:
            type.__setattr__(kind, "__call__", before)
        else:
            type.__delattr__(kind, "__call__")


def _tapped(out: Any, path: str, found: Run) -> Any:
    leaves, structure = jax.tree.flatten(out)
    floating = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and _is_floating(x)]
    for place, i in enumerate(floating):
        leaves[i] = _tap(leaves[i], path, place, found)
    return structure.unflatten(leaves)


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _tap(x: Any, path: str, place: int, found: Run) -> Any:
    """Return ``x``; its values, and those of its gradient, are kept also from within vmap, scan and jit."""
    value, cotangent = (_keeper(into, path, place) for into in (found.outputs, found.cotangents))

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return value(x)

    same.defvjp(lambda x: (same(x), None), lambda _, gradient: (cotangent(gradient),))
    return same(x)


def _keeper(into: Returned, path: str, place: int) -> Callable[[Any], Any]:
    """Return the identity that keeps its argument; under vmap it keeps the whole batch, as one array."""

    @jax.custom_batching.custom_vmap
    def kept(x: Any) -> Any:
        jax.debug.callback(lambda value: noted(into, path, place, np.array(value)), x)
        return x

    @kept.def_vmap
    def batched(_: int, in_batched: list[bool], x: Any) -> tuple[Any, bool]:
        return kept(x), in_batched[0]

    return kept


def _modules(node: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """The modules of flax nnx and of equinox in a model, with their paths."""
    seen = set() if seen is None else seen
    if id(node) in seen:
        return
    if isinstance(node, _kinds()):
        seen.add(id(node))
        yield path, node
        parts: Any = vars(node).items()
    elif isinstance(node, Mapping):
        parts = node.items()
    elif isinstance(node, Sequence) and not isinstance(node, str):
        parts = enumerate(node)
    else:
        return
    for name, part in list(parts):
        yield from _modules(part, f"{path}.{name}".removeprefix("."), seen)


def _kinds() -> tuple[type, ...]:
    loaded = (sys.modules.get("flax.nnx"), sys.modules.get("equinox"))
    return tuple(library.Module for library in loaded if library is not None)
