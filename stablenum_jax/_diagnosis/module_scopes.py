"""Find the module that an operation of a jaxpr belongs to, from its name stack.

Flax linen enters the names of its modules in that stack, and ``jax.named_scope`` its argument. Modules of
flax.nnx and Equinox are named by their paths in the tree while :func:`with_module_names` traces a function.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import jax

from stablenum.interrupts import and_restore
from stablenum_jax._trees.names import path_name

__all__ = ["Scope", "scope_of", "with_module_names"]

T = TypeVar("T")

#: The modules around an operation, the outermost first: the path of each, and the number of its call.
Scope: TypeAlias = tuple[tuple[str, str], ...]

# Prefix of a path that starts at the outermost module, not at the scope around it.
_MARK = "stablenum:"
# Prefix of the number of a call, inside the scope of the module that is called.
_CALL = "stablenum#"
# Equinox enters the class names of its layers.
_CLASS_NAMES = ("eqx.",)


def scope_of(names: tuple[str, ...], roots: frozenset[str]) -> Scope:
    """Return the modules in a name stack, the outermost first.

    Args:
        names: the names in the stack.
        roots: the names of outermost linen modules in it.

    Example:
        >>> scope_of(("Net", "blocks_0", "attn"), frozenset({"Net"}))
        (('', ''), ('blocks_0', ''), ('blocks_0.attn', ''))
        >>> scope_of(("stablenum:", "stablenum:layers.0", "stablenum#2", "eqx.nn.Linear"), frozenset())
        (('', ''), ('layers.0', '2'))
    """
    marked = any(name.startswith(_MARK) for name in names)
    found: list[tuple[str, str]] = []
    before = ""
    for i, name in enumerate(names):
        around = found[-1][0] if found else ""
        if name.startswith(_CALL):
            if found:
                found[-1] = (around, name.removeprefix(_CALL))
            continue
        if name.startswith(_MARK):
            path = name.removeprefix(_MARK)
        elif marked and name.startswith(_CLASS_NAMES):
            continue
        elif i == 0 and name in roots:
            path = ""
        else:
            # linen names the scope of method `encode` of `attn` "attn.encode".
            own = name.removeprefix(f"{before}.") if before else name
            path = f"{around}.{own}" if around else own
        found.append((path, ""))
        before = name
    return tuple(found)


def with_module_names(trace: Callable[[], T]) -> tuple[T, set[str]]:
    """Return ``trace()``, run without jit and with names for the modules of flax.nnx and Equinox.

    Returns:
        Its result, and the names of outermost linen modules. All classes are restored.
    """
    roots: set[str] = set()
    count = itertools.count()
    changed: list[tuple[type, Any]] = []
    contexts = contextlib.ExitStack()

    def run() -> T:
        contexts.enter_context(jax.disable_jit())
        linen = sys.modules.get("flax.linen")
        if linen is not None:
            contexts.enter_context(linen.intercept_methods(functools.partial(_note_call, roots, count)))
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None:
            _wrap_calls(changed, nnx.Module, _nnx_paths, count)
        equinox = sys.modules.get("equinox")
        if equinox is not None:
            _wrap_calls(changed, equinox.Module, functools.partial(_tree_paths, equinox.Module), count)
        return trace()

    def restore() -> None:
        for kind, call in changed:
            type.__setattr__(kind, "__call__", call)
        contexts.close()

    return and_restore(run, restore), roots


def _note_call(
    roots: set[str], count: Iterator[int], call: Callable[..., Any], args: Any, kwargs: Any, context: Any
) -> Any:
    if context.module.path == ():
        method = "" if context.method_name == "__call__" else f".{context.method_name}"
        roots.add((context.module.name or type(context.module).__name__) + method)
    with jax.named_scope(f"{_CALL}{next(count)}"):
        return call(*args, **kwargs)


def _nnx_paths(root: Any) -> dict[int, str]:
    nnx = sys.modules["flax.nnx"]
    # The outermost path comes last, so that a shared module has its first and shortest path.
    found = {id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(root)}
    return {**found, id(root): ""}


def _tree_paths(base: type, root: Any) -> dict[int, str]:
    found: dict[int, str] = {}

    def walk(module: Any, path: str) -> None:
        found.setdefault(id(module), path)
        inside = jax.tree_util.tree_flatten_with_path(
            module, is_leaf=lambda node: isinstance(node, base) and node is not module
        )[0]
        for keys, node in inside:
            if isinstance(node, base):
                name = path_name(keys)
                walk(node, f"{path}.{name}" if path else name)

    walk(root, "")
    return found


def _wrap_calls(
    changed: list[tuple[type, Any]],
    base: type,
    paths_of: Callable[[Any], dict[int, str]],
    count: Iterator[int],
) -> None:
    """Run every ``__call__`` of ``base`` and its subclasses in the scope of the module's path.

    Each class is added to ``changed`` with its own method before the class is changed.
    """
    known: dict[int, str] = {}  # filled while an outermost module is being called
    called: list[int] = []

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def named(self: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = not known
            if outermost:
                known.update(paths_of(self))
            try:
                path = known.get(id(self))
                # The module was created during the call and has no path in the tree, or it calls an
                # inherited __call__.
                if path is None or called[-1:] == [id(self)]:
                    return call(self, *args, **kwargs)
                called.append(id(self))
                try:
                    with jax.named_scope(_MARK + path), jax.named_scope(f"{_CALL}{next(count)}"):
                        return call(self, *args, **kwargs)
                finally:
                    called.pop()
            finally:
                if outermost:
                    known.clear()

        return named

    for kind in _subclasses(base):
        call = kind.__dict__.get("__call__")
        if callable(call):
            changed.append((kind, call))
            type.__setattr__(kind, "__call__", wrapped(call))


def _subclasses(base: type) -> set[type]:
    found = {base}
    kinds: list[type] = type.__subclasses__(base)
    for kind in kinds:
        found |= _subclasses(kind)
    return found
