"""What a policy means for one module, and the casts of the module's arguments and results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from stablenum.errors import bad_field
from stablenum.formats import FORMATS
from stablenum_jax._precision.casts import cast_floating
from stablenum_jax._precision.policy import Policy

__all__ = ["Place", "cast_arguments", "cast_result", "check_rules", "place_of"]

PyTree: TypeAlias = Any


class Place(NamedTuple):
    """What a policy means for one module. Its values are plain, so it may be part of a tree's structure.

    Attributes:
        compute: the dtype that arrays have while the module computes.
        eight_bits: whether its products are computed in 8 bits.
        output: the dtype that its results are cast to; None if they are not cast.
        hooked: whether its arguments are cast to ``compute``.
    """

    compute: str
    eight_bits: bool
    output: str | None
    hooked: bool


def place_of(policy: Policy, path: str, *, owns: bool) -> Place:
    """Return what the policy means for the module at ``path``.

    Args:
        policy: the policy, with its rules.
        path: the module's path, its parts joined by dots; "" for the model.
        owns: whether the module has parameters of its own.
    """
    core = policy.core
    here = core.at(path)
    begins = core.begins_at(path)
    eight = FORMATS[here.compute].bits == 8
    return Place(here.carrier, eight, here.output if begins else None, begins or owns)


def check_rules(policy: Policy, paths: Iterable[str]) -> None:
    """Check that each rule matches a module.

    Raises:
        ValueError: a rule matches none of ``paths``.
    """
    known = list(paths)
    for rule in policy.rules:
        if not any(rule.matches(path) for path in known):
            raise bad_field("policy.rules", "patterns that match a module of the model", rule.pattern)


def cast_arguments(place: Place, args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
    """Return the arguments in the dtype that a module at ``place`` computes in."""
    if not place.hooked:
        return args, kwargs
    return cast_floating(args, place.compute), cast_floating(kwargs, place.compute)


def cast_result(place: Place, result: PyTree) -> PyTree:
    """Return the result in the dtype that a module at ``place`` returns."""
    return result if place.output is None else cast_floating(result, place.output)
