"""Parts of JAX that depend on its version or are not public, each with a fallback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from stablenum._support.interrupts import and_restore
from stablenum_jax._diagnosis.replay.collectives import CASTS

try:
    from jax._src.core import trace_state_clean as _trace_state_clean
except ImportError:  # then only arguments that are traced show it

    def _trace_state_clean() -> bool:
        return True


__all__ = [
    "alone",
    "any_equation",
    "bind",
    "called_jaxpr",
    "context_of",
    "differentiated_jaxpr",
    "evaluated",
    "in_shards",
    "is_alone",
    "outside_tracebacks",
    "parts_of",
    "quietly",
    "scan_counts",
    "sub_jaxpr",
    "under_transformation",
    "with_own_lines_in_backward",
]

T = TypeVar("T")

# Primitives that call a function, and the parameter of each that holds its jaxpr.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
# Calls of functions with a derivative of their own. If they were opened, that derivative would not be used.
_DIFFERENTIATED = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


def bind(eqn: Any, inputs: list[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Evaluate one equation and return its outputs, always as a list.

    An equation of the body of a ``shard_map`` is evaluated as if there were no mesh.
    """
    params = eqn.params if params is None else params
    if in_shards(eqn):
        if eqn.primitive.name in _PLACING:
            return inputs
        params = without_meshes(params)
    prepared = eqn.primitive.get_bind_params(params) if hasattr(eqn.primitive, "get_bind_params") else params
    functions: list[Any] = []
    if isinstance(prepared, tuple):  # before JAX 0.10: (functions, params)
        functions, prepared = prepared
    given = [as_given_by_jax(x) for x in inputs] if is_foreign(eqn.primitive) else inputs
    out = eqn.primitive.bind(*functions, *given, **prepared)
    return list(out) if eqn.primitive.multiple_results else [out]


def is_foreign(primitive: Any) -> bool:
    """Return whether a primitive is evaluated by another package's code, which has only ever seen what JAX
    gives it: arrays of JAX, where a jaxpr may hold NumPy's arrays and plain numbers."""
    impl = getattr(primitive, "impl", None)
    module = getattr(getattr(impl, "func", impl), "__module__", None) or ""
    return module.partition(".")[0] not in ("jax", "jaxlib")


def as_given_by_jax(x: Any) -> Any:
    """Return a number, or an array of NumPy, as an array of JAX; anything else as it is."""
    return jnp.asarray(x) if isinstance(x, (bool, int, float, complex, np.ndarray, np.generic)) else x


def context_of(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the settings under which the equation was made (where to compute, which generator)."""
    context = getattr(eqn, "ctx", None)
    manager = getattr(context, "manager", None) or contextlib.nullcontext()
    return _without_mesh(manager) if in_shards(eqn) else manager


# Whether all equations are evaluated as if there were no mesh.
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)
# Primitives that only say where a value is.
_PLACING = frozenset({"layout_constraint", "mesh_cast", "reshard", "sharding_constraint"})


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Evaluate all equations as if there were no mesh, with arrays that this process has to itself."""
    before = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(before)


def is_alone() -> bool:
    """Return whether all equations are evaluated as if there were no mesh."""
    return _ALONE.get()


def in_shards(eqn: Any) -> bool:
    """Return whether an equation is part of the body of a ``shard_map``, or evaluated like one."""
    if _ALONE.get():
        return True
    mesh = getattr(getattr(eqn, "ctx", None), "cur_abstract_mesh", None)
    return bool(getattr(mesh, "manual_axes", ()))


@contextlib.contextmanager
def _without_mesh(manager: Any) -> Iterator[None]:
    with manager, jax.set_mesh(None):
        yield


def without_meshes(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of an equation without shardings, those of the jaxprs among them included."""
    return {k: _without_mesh_in(v) for k, v in params.items()}


def _without_mesh_in(value: Any) -> Any:
    if isinstance(value, jax.sharding.Sharding):
        return None
    if isinstance(value, core.ClosedJaxpr):
        return _traced_again(value.jaxpr, value.consts)
    if isinstance(value, core.Jaxpr) and not value.constvars:
        return _traced_again(value, ()).jaxpr
    if isinstance(value, tuple):
        parts = [_without_mesh_in(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _traced_again(jaxpr: Any, consts: Any) -> Any:
    given = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in jaxpr.invars
    ]
    return jax.make_jaxpr(partial(evaluated, jaxpr, consts))(*given)


def evaluated(jaxpr: Any, consts: Any, *args: Any) -> list[Any]:
    """Return the results of a jaxpr as if there were no mesh. One of a shard must not depend on the place of
    the shard or on other shards."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        given, name = [read(v) for v in eqn.invars], eqn.primitive.name
        called = called_jaxpr(eqn) or differentiated_jaxpr(eqn)
        if called is not None:
            made = evaluated(*called, *given)
        elif name in CASTS:
            made = given
        else:
            made = bind(eqn, given)
        env.update(zip(eqn.outvars, made, strict=True))
    return [read(v) for v in jaxpr.outvars]


def scan_counts(params: dict[str, Any], inputs: int) -> tuple[int, int]:
    """Return the number of constants and the number of carried values of a scan."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].update(list(range(inputs))).unpack()  # from JAX 0.12 on
    return len(list(consts)), len(list(carry))


def sub_jaxpr(value: Any) -> tuple[Any, list[Any]]:
    """Return jaxpr and constants of an open or closed jaxpr."""
    if isinstance(value, core.ClosedJaxpr):
        return value.jaxpr, list(value.consts)
    return value, list(getattr(value, "consts", ()) or ())


def parts_of(eqn: Any) -> list[Any]:
    """Return the jaxprs inside an equation."""
    values = [x for p in eqn.params.values() for x in (p if isinstance(p, tuple) else (p,))]
    return [sub_jaxpr(x)[0] for x in values if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]


def any_equation(jaxpr: Any, holds: Callable[[Any], bool]) -> bool:
    """Return whether something holds for an equation of a jaxpr, or of one inside it."""
    return any(holds(eqn) or any(any_equation(part, holds) for part in parts_of(eqn)) for eqn in jaxpr.eqns)


def called_jaxpr(eqn: Any) -> tuple[Any, list[Any]] | None:
    """Return jaxpr and constants of an equation that only calls a function (jit, checkpoint), else None."""
    return _jaxpr_in(eqn, _CALLS)


def differentiated_jaxpr(eqn: Any) -> tuple[Any, list[Any]] | None:
    """Return jaxpr and constants of an equation that calls a function with a custom derivative, else None."""
    return _jaxpr_in(eqn, _DIFFERENTIATED)


def _jaxpr_in(eqn: Any, table: dict[str, str]) -> tuple[Any, list[Any]] | None:
    parameter = table.get(eqn.primitive.name)
    return sub_jaxpr(eqn.params[parameter]) if parameter in eqn.params else None


def under_transformation() -> bool:
    """Return whether the caller is inside a trace (jit, grad, vmap)."""
    return not _trace_state_clean()


def outside_tracebacks(folder: str) -> None:
    """Leave the frames of a folder out of the source lines of operations, as JAX leaves out its own."""
    try:
        from jax._src import source_info_util, traceback_util
    except ImportError:
        return
    for module in (source_info_util, traceback_util):
        getattr(module, "register_exclusion", lambda folder: None)(folder)


def quietly(body: Callable[[], T]) -> T:
    """Return ``body()``, run without JAX's NaN checks: a replay goes on after the first NaN."""
    contexts = contextlib.ExitStack()

    def run() -> T:
        for context in (jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False)):
            contexts.enter_context(context)
        return body()

    return and_restore(run, contexts.close)


def with_own_lines_in_backward(body: Callable[[], T]) -> T:
    """Return ``body()``, which traces; keep the user's lines in a ``custom_vjp``'s backward function.

    JAX replaces them by the line of the forward call. If JAX lacks the private names used here, this has no
    effect.
    """
    try:
        from jax._src import source_info_util as info
        from jax._src.interpreters import ad

        primitive = ad.custom_lin_p
        rules = next(r for r in (ad.primitive_transposes, ad.fancy_transposes) if primitive in r)
        rule, local, new = rules[primitive], info._source_info_context, info.new_source_info
        new().replace(name_stack=local.context.name_stack)
    except (ImportError, AttributeError, StopIteration):
        return body()

    def keeping_lines(*args: Any, **params: Any) -> Any:
        given = local.context
        local.context = new().replace(name_stack=given.name_stack)
        try:
            return rule(*args, **params)
        finally:
            local.context = given

    def run() -> T:
        rules[primitive] = keeping_lines
        return body()

    return and_restore(run, lambda: rules.update({primitive: rule}))
