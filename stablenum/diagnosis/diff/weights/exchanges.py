"""Find the weights that could be exchanged in a map: neither names nor order tell which is which, or the two
tell something else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import combinations, pairwise, product

from stablenum.diagnosis.diff.differences import MOST_NAMED
from stablenum.diagnosis.diff.sides.sides import Side
from stablenum.diagnosis.diff.weights.origins import Origin
from stablenum.diagnosis.diff.weights.parameter_uses import Use, uses_of
from stablenum.diagnosis.diff.weights.weights import WeightMap

__all__ = ["by_flow_only", "note_on", "out_of_order"]

_NOTE = (
    "Only their uses tell which of these weights correspond, not their names: {}. A program "
    "that exchanges two of them is the same under this map. Check whether that is what you mean."
)
_ORDER = (
    "The order of use tells which weights correspond, and the numbers in their names say otherwise: {}. "
    "Check whether that is what you mean."
)


def by_flow_only(left: Side, right: Side, mapped: WeightMap) -> tuple[str, ...]:
    """Return the parameters of the right side that may be exchanged: matrices of one shape that multiply one
    value on both sides, where the names fit the map no better than its inverse, and the order not at all."""
    names = [list(side.program.parameters()) for side in (left, right)]
    mine = {u.name: u for u in uses_of(left)}
    teams = dict[object, list[Use]]()
    for use in uses_of(right):
        if use.kind in ("matmul", "conv") and len(use.shape) > 1:
            teams.setdefault((use.group, use.kind, use.shape), []).append(use)
    found = dict[str, None]()
    for team in teams.values():
        for pair in combinations(team, 2):
            others = _sources(pair, mine, mapped)
            if others is not None and not _told(others, pair, names):
                found.update(dict.fromkeys(u.name for u in pair))
    return tuple(found)


def note_on(names: Sequence[str], mapped: WeightMap) -> tuple[str, ...]:
    """Return what the report says of these parameters."""
    if not names:
        return ()
    shown = [f"{name} <- {mapped.origins[name]}" for name in names]
    more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
    return (_NOTE.format("; ".join(shown[:MOST_NAMED]) + more),)


def out_of_order(mapped: WeightMap) -> tuple[str, ...]:
    """Return what the report says of names such as "layers.0" and "layers.1" whose numbers run in another
    order than those of the names that they come from."""
    families = dict[tuple[str, str], list[tuple[list[int], list[int], str]]]()
    for name, origin in mapped.origins.items():
        if isinstance(origin, Origin) and not origin.piece.cuts:
            own, numbers = _numbers_of(name)
            source, others = _numbers_of(origin.piece.name)
            families.setdefault((own, source), []).append((numbers, others, f"{name} <- {origin}"))
    steps = (step for rows in families.values() for step in pairwise(sorted(rows)))
    turned = next(((a[-1], b[-1]) for a, b in steps if a[1] > b[1]), None)
    return () if turned is None else (_ORDER.format("; ".join(turned)),)


def _numbers_of(name: str) -> tuple[str, list[int]]:
    """Return a name without its numbers, and these."""
    return re.sub(r"\d+", "#", name), [int(n) for n in re.findall(r"\d+", name)]


def _sources(pair: tuple[Use, Use], known: Mapping[str, Use], mapped: WeightMap) -> tuple[Use, Use] | None:
    """Return the parameters from which two come as a whole, if those multiply one value, too."""
    uses = list(_whole(pair, known, mapped))
    if len(uses) < 2 or uses[0].name == uses[1].name:
        return None
    a, b = uses
    return (a, b) if (a.group, a.kind, a.shape) == (b.group, b.kind, b.shape) else None


def _whole(pair: tuple[Use, Use], known: Mapping[str, Use], mapped: WeightMap) -> Iterator[Use]:
    for use in pair:
        origin = mapped.origins.get(use.name)
        if isinstance(origin, Origin) and not origin.piece.cuts and origin.piece.name in known:
            yield known[origin.piece.name]


def _told(mine: tuple[Use, Use], theirs: tuple[Use, Use], names: Sequence[Sequence[str]]) -> bool:
    """Return whether names, or else their order, speak for a map and not for the one that exchanges two."""
    (a, b), (c, d) = _apart(*mine), _apart(*theirs)
    for_it, against = _likeness(a, c) + _likeness(b, d), _likeness(a, d) + _likeness(b, c)
    if for_it != against:
        return for_it > against
    orders = [
        order.index(one.name) < order.index(other.name)
        for order, (one, other) in zip(names, (mine, theirs), strict=True)
    ]
    return orders[0] == orders[1]


def _apart(a: Use, b: Use) -> tuple[list[str], list[str]]:
    """Return the words by which two names differ."""
    return [w for w in a.words if w not in b.words], [w for w in b.words if w not in a.words]


def _likeness(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest run of letters that a word of each has in common."""
    return max((SequenceMatcher(None, x, y).find_longest_match().size for x, y in product(a, b)), default=0)
