"""Apply a policy to flax nnx and equinox models, whose modules are objects that call one another.

The call runs on a copy in which each module that casts belongs to a subclass of its class, made here once per
class: ``isinstance`` and all attributes are as before. What the policy means for a module is part of the
copy's structure, so it is kept through ``nnx.jit``, ``filter_jit``, ``scan`` and ``vmap``.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import jax

from stablenum.errors import bad_field
from stablenum_jax._precision.casts import in_dtypes_of, is_castable
from stablenum_jax._precision.escalate import current_policy
from stablenum_jax._precision.module_formats import Place, cast_arguments, cast_result, check_rules, place_of
from stablenum_jax._precision.policy import Policy

__all__ = ["call_equinox", "call_nnx"]

PyTree: TypeAlias = Any

_PLACE = "_stablenum_place"


def call_nnx(model: Any, policy: Policy, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``model(*args, **kwargs)`` in the policy's formats; write all but parameters back to ``model``."""
    from flax import nnx

    policy = current_policy(policy)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    copy = nnx.merge(graph, policy.cast_to_compute(params), rest)
    paths = []
    for parts, module in list(nnx.iter_modules(copy)):
        path = ".".join(map(str, parts))
        paths.append(path)
        if not callable(module) or isinstance(module, nnx.Rngs):
            continue
        owns = any(
            isinstance(value, nnx.Param) and any(map(is_castable, jax.tree.leaves(value)))
            for value in vars(module).values()
        )
        place = _place(policy, path, owns=owns)
        if place.hooked:
            if isinstance(module, nnx.Embed) and module.dtype == module.param_dtype:
                module.dtype = None  # not the user's choice: nnx.Embed sets it to its table's dtype
            if isinstance(module, nnx.BatchNorm) and module.dtype is None:
                # A BatchNorm computes in its statistics' dtype, and would return that dtype too.
                place = place._replace(output=place.output or place.compute)
            kind: Any = type(module)
            module.__class__ = _nnx_class(kind)
            setattr(module, _PLACE, place)
    check_rules(policy, paths)
    result = copy(*args, **kwargs)
    after = nnx.state(copy, nnx.Not(nnx.Param))
    if jax.tree.leaves(after):
        before = nnx.state(model, nnx.Not(nnx.Param))
        nnx.update(model, in_dtypes_of(after, before))
    return result


def call_equinox(model: Any, policy: Policy, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``model(*args, **kwargs)`` in the policy's formats."""
    policy = current_policy(policy)
    paths: list[str] = []
    copy = _placed(policy.cast_to_compute(model), policy, "", paths)
    check_rules(policy, paths)
    return copy(*args, **kwargs)


def _placed(node: Any, policy: Policy, path: str, paths: list[str]) -> Any:
    """Return the tree with its equinox modules replaced by ones that cast."""
    import equinox

    def below(name: object, part: Any) -> Any:
        return _placed(part, policy, f"{path}.{name}" if path else str(name), paths)

    if isinstance(node, equinox.Module):
        kind: Any = type(node)
        paths.append(path)
        values = dict(vars(node))
        place = _place(policy, path, owns=any(map(is_castable, values.values())))
        hooked = place.hooked and callable(node)
        made = object.__new__(_equinox_class(kind) if hooked else kind)
        for name, value in values.items():
            object.__setattr__(made, name, below(name, value))
        if hooked:
            object.__setattr__(made, _PLACE, place)
        return made
    if isinstance(node, (list, tuple)):
        parts = [below(i, part) for i, part in enumerate(node)]
        return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
    if isinstance(node, dict):
        return {name: below(name, part) for name, part in node.items()}
    return node


def _place(policy: Policy, path: str, *, owns: bool) -> Place:
    place = place_of(policy, path, owns=owns)
    if place.eight_bits:
        raise bad_field(
            "policy",
            "of 16 bits and more in nnx and equinox models",
            str(policy),
            hint="For 8 bits call stablenum_jax.fp8_dot in the module, with its state as an argument.",
        )
    return place


def _call(base: type, self: Any, *args: Any, **kwargs: Any) -> Any:
    place = getattr(self, _PLACE)
    args, kwargs = cast_arguments(place, args, kwargs)
    return cast_result(place, base.__call__(self, *args, **kwargs))


@functools.cache
def _nnx_class(base: Any) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return _call(base, self, *args, **kwargs)

    return type(base)(base.__name__, (base,), {"__call__": __call__, "__module__": base.__module__})


@functools.cache
def _equinox_class(base: Any) -> Any:
    import equinox

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return _call(base, self, *args, **kwargs)

    body = {
        "__call__": __call__,
        "__init__": base.__init__,
        "__module__": base.__module__,
        "__annotations__": {_PLACE: Any},
        _PLACE: equinox.field(static=True, default=None),
    }
    return type(base)(base.__name__, (base,), body)
