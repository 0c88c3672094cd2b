"""What a policy means for one module, and the casts of what goes into the module and comes out of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from stablenum.errors import bad_field
from stablenum.formats import FORMATS
from stablenum_jax._precision.casts import cast_floating
from stablenum_jax._precision.policy import Policy

__all__ = ["Place", "check_rules", "hand_in", "hand_out", "place_of"]

PyTree: TypeAlias = Any


class Place(NamedTuple):
    """What a policy says about one module. Plain values: it may be part of a tree's structure.

    Attributes:
        compute: the dtype that arrays have while it computes.
        eight_bits: whether its products are of 8-bit numbers.
        output: the dtype to hand out; None where values flow on as they are.
        hooked: whether values are cast on the way in.
    """

    compute: str
    eight_bits: bool
    output: str | None
    hooked: bool


def place_of(policy: Policy, path: str, *, owns: bool) -> Place:
    """What the policy says about the module at ``path``.

    Args:
        policy: with its rules.
        path: parts joined by dots, "" for the model.
        owns: whether the module has parameters of its own.
    """
    core = policy.core
    here = core.at(path)
    begins = core.begins_at(path)
    eight = FORMATS[here.compute].bits == 8
    return Place(here.carrier, eight, here.output if begins else None, begins or owns)


def check_rules(policy: Policy, paths: Iterable[str]) -> None:
    """Refuse a rule that is about no module.

    Raises:
        ValueError: there is one.
    """
    known = list(paths)
    for rule in policy.rules:
        if not any(rule.matches(path) for path in known):
            raise bad_field("policy.rules", "patterns that match a module of the model", rule.pattern)


def hand_in(place: Place, args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
    """The arguments as a module at ``place`` computes with them."""
    if not place.hooked:
        return args, kwargs
    return cast_floating(args, place.compute), cast_floating(kwargs, place.compute)


def hand_out(place: Place, result: PyTree) -> PyTree:
    """The result as a module at ``place`` hands it out."""
    return result if place.output is None else cast_floating(result, place.output)
