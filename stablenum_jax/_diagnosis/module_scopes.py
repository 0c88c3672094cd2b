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

from stablenum._support.interrupts import and_restore
from stablenum_jax._trees.names import path_name

__all__ = ["Scope", "module_of", "names_of", "scope_of", "with_module_names"]

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


def module_of(names: tuple[str, ...]) -> str:
    """Return the path of the innermost module in a name stack of :func:`with_module_names`; without such
    modules, the names of the stack.

    Example:
        >>> module_of(("stablenum:", "stablenum:layers.0", "stablenum#2", "eqx.nn.Linear"))
        'layers.0'
        >>> module_of(("Net", "stablenum#1", "attn", "stablenum#2", "attn.split", "bhqd,bhkd->bhqk"))
        'Net/attn'
    """
    names = tuple(name for name in names if not _is_formula(name))
    if any(name.startswith(_MARK) for name in names):
        return scope_of(names, frozenset())[-1][0]
    own = [name for name in names if not name.startswith(_CALL)]
    # linen names the scope of method `split` of `attn` "attn.split", inside that of `attn` or not.
    inner = zip(own, ["", *own], strict=False)
    return "/".join(name for name, around in inner if not around or not name.startswith(f"{around}."))


def _is_formula(name: str) -> bool:
    """Return whether a name is one that ``jnp.einsum`` enters: its formula."""
    return "->" in name or "," in name


def with_module_names(trace: Callable[[], T], *, jit: bool = False) -> tuple[T, set[str]]:
    """Return ``trace()``, run with names for the modules of flax.nnx and Equinox.

    Args:
        trace: what traces a function.
        jit: whether functions inside it stay jitted. Those that JAX has traced before give no names then.

    Returns:
        Its result, and the names of outermost linen modules. All classes are restored.
    """
    roots: set[str] = set()
    count = itertools.count()
    changed: list[tuple[type, Any]] = []
    contexts = contextlib.ExitStack()

    def run() -> T:
        contexts.enter_context(jax.disable_jit(not jit))
        linen = sys.modules.get("flax.linen")
        if linen is not None:
            contexts.enter_context(linen.intercept_methods(functools.partial(_note_call, roots, count)))
        for base in _bases():
            _wrap_calls(changed, base, count)
        return trace()

    def restore() -> None:
        for kind, call in changed:
            type.__setattr__(kind, "__call__", call)
        _known.clear()  # an interrupt may have left it
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


# The path of each module of the outermost one that runs, by identity.
_known: dict[int, str] = {}


@contextlib.contextmanager
def names_of(root: Any) -> Iterator[None]:
    """Name the modules that run by their paths in ``root``, unless a module around it does so already.
    What is no module of flax.nnx or Equinox names none."""
    outermost = not _known and isinstance(root, _bases())
    if outermost:
        nnx = sys.modules.get("flax.nnx")
        of_nnx = nnx is not None and isinstance(root, nnx.Module)
        _known.update(_nnx_paths(root) if of_nnx else _tree_paths(sys.modules["equinox"].Module, root))
    try:
        yield
    finally:
        if outermost:
            _known.clear()


def _bases() -> tuple[type, ...]:
    """Return the classes of modules whose calls are named here, of the libraries that are imported."""
    libraries = (sys.modules.get("flax.nnx"), sys.modules.get("equinox"))
    return tuple(library.Module for library in libraries if library is not None)


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


def _wrap_calls(changed: list[tuple[type, Any]], base: type, count: Iterator[int]) -> None:
    """Run every ``__call__`` of ``base`` and its subclasses in the scope of the module's path.

    Each class is added to ``changed`` with its own method before the class is changed.
    """
    called: list[int] = []

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def named(self: Any, *args: Any, **kwargs: Any) -> Any:
            with names_of(self):
                path = _known.get(id(self))
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
