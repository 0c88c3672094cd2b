"""What a product, a convolution or a look-up does with each axis of what it reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["roles_of"]


def roles_of(eqn: Any) -> tuple[tuple[str, ...], ...]:
    """Return the roles of the axes of each input; see ``Step.roles`` of the core."""
    numbers, axes = eqn.params.get("dimension_numbers"), [len(v.aval.shape) for v in eqn.invars]
    if eqn.primitive.name == "dot_general":
        summed, batch = numbers
        return tuple(_of(n, {"summed": s, "batch": b}) for n, s, b in zip(axes, summed, batch, strict=True))
    if eqn.primitive.name == "conv_general_dilated":
        _, *window = numbers.lhs_spec
        first = _of(axes[0], {"batch": numbers.lhs_spec[:1], "summed": window[:1]}, window[1:])
        _, summed, *window = numbers.rhs_spec
        return (first, _of(axes[1], {"summed": (summed,)}, window))
    if eqn.primitive.name == "gather":
        of_table = {"summed": numbers.collapsed_slice_dims, "batch": numbers.operand_batching_dims}
        return (_of(axes[0], of_table), ("batch",) * axes[1])
    return ()


def _of(axes: int, roles: dict[str, Iterable[int]], window: Iterable[int] = ()) -> tuple[str, ...]:
    named = {axis: role for role, at in roles.items() for axis in at}
    named |= {axis: f"window {i}" for i, axis in enumerate(window)}
    return tuple(named.get(axis, "kept") for axis in range(axes))
