"""Settle by trial what sizes, names and the order of use leave open in the map of the weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from stablenum.diagnosis.diff.sides.matching import matched
from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.diff.sides.sides import Side, measured
from stablenum.diagnosis.diff.weights.origins import Origin, Source
from stablenum.diagnosis.diff.weights.parameter_uses import Use, words_of
from stablenum.diagnosis.diff.weights.sequences import likeness
from stablenum.diagnosis.diff.weights.weights import WeightMap

__all__ = ["better_of", "settled", "values_shared"]

# Each trial evaluates the right program once more. Enough for two kernels of 23 orders, and for some gates;
# chosen, not measured.
_MOST_TRIALS = 64
# A map is better if the sides share so many more values: fewer may be an accident. Chosen,
# not measured.
_MORE = 3
# The gates of an LSTM, which have 24 orders.
_MOST_GATES = 4
# So many square matrices are turned one by one, and so many kernels laid out in each other way. Chosen, not
# measured.
_MOST_SQUARE, _MOST_KERNELS = 8, 4
_Move: TypeAlias = "Callable[[Mapping[str, Source]], dict[str, Source]]"
# The gates of these come in an order that is known.
_KNOWN = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def settled(
    left: Side, right: Program, guess: WeightMap, uses: list[Use], others: Iterable[WeightMap] = ()
) -> WeightMap:
    """Return the map under which the forward passes share most values; the guess if nothing is open.

    Open are: the order of the gates that a recurrent layer of the left side keeps in one matrix, other than
    that of ``torch.nn``, the order of a kernel's axes in a matrix that patches in a row are multiplied by,
    and whether a square matrix is transposed where the operations do not tell. Square matrices are tried all
    together if no other matrix shows how they lie, and then one after another. Other maps are tried first.
    """
    moves: list[_Move] = [partial(_replaced, other=other) for other in others]
    moves += itertools.islice(_moves(guess, uses), _MOST_TRIALS)
    if not moves:
        return guess
    best = guess
    most, agrees = _shared(left, right, guess)
    for move in moves:
        if agrees:
            break
        trial = WeightMap({**best.origins, **move(best.origins)}, by_trial=True)
        count, same = _shared(left, right, trial)
        if same or count >= most + _MORE:
            best, most, agrees = trial, count, same
    return best


def better_of(left: Side, right: Program, one: WeightMap, other: WeightMap) -> WeightMap:
    """Return the map under which the forward passes share more.

    Where a fault near the beginning hides the rest, both may share as much; then it is the one whose names
    are more similar. Where no fault hides anything, or if the names are as similar too, it is the first one.
    """

    def worth(mapped: WeightMap) -> tuple[bool, int, float]:
        count, same = _shared(left, right, mapped)
        return same, count, 0.0 if same else _named_alike(mapped)

    return one if worth(one) >= worth(other) else other


def _named_alike(mapped: WeightMap) -> float:
    """Return how much the names of the right parameters resemble those of the left ones, in total."""
    pairs = ((name, source) for name, origin in mapped.origins.items() for source in origin.names)
    return round(
        sum(likeness(words_of(a), words_of(b)) for a, b in pairs), 6
    )  # else sums in another order would differ


def _shared(left: Side, right: Program, mapped: WeightMap) -> tuple[int, bool]:
    return values_shared(left, right, mapped.of(left.program.parameters()))


def values_shared(left: Side, right: Program, arrays: Mapping[str, Any]) -> tuple[int, bool]:
    """Return how many values of the right side's forward pass the left one has if the right program is given
    these arrays, and whether the last one is among them."""
    try:
        side = measured(right, weights=arrays, noise=False)
    except Exception:  # noqa: BLE001 - sizes that depend on parameters, such as those of a routing, do not fit
        return 0, False
    found = matched(left, side).right
    made = [o for s in side.trace.steps if s.phase == "forward" for o in s.outputs if side.trained[o]]
    return sum(o in found for o in made), bool(made) and made[-1] in found


def _moves(guess: WeightMap, uses: list[Use]) -> Iterator[_Move]:
    square = [name for name, o in guess.origins.items() if len(o.ways) > 1 and len(o.ways[0]) == 2]
    if square and not any(len(o.ways) == 1 and len(o.ways[0]) == 2 for o in guess.origins.values()):
        yield partial(_all_turned, names=square)
    for name in [n for n, o in guess.origins.items() if len(o.ways) > 1 and len(o.ways[0]) > 2][
        :_MOST_KERNELS
    ]:
        yield from (partial(_laid, name=name, way=way) for way in guess.origins[name].ways[1:])
    of_state = {u.name for u in uses if u.data is not None and not u.data.entries}
    for family in _families(guess.origins):
        gates = sorted({_gate(guess.origins[name]) for name in family})
        if of_state.isdisjoint(family) or len(gates) > _MOST_GATES:
            continue
        for order in itertools.permutations(gates):
            if list(order) != gates:
                yield partial(_reordered, family=family, order=dict(zip(gates, order, strict=True)))
    for name in square[:_MOST_SQUARE]:
        yield partial(_all_turned, names=[name])


def _replaced(origins: Mapping[str, Source], other: WeightMap) -> dict[str, Source]:
    return dict(other.origins)


def _laid(origins: Mapping[str, Source], name: str, way: tuple[int, ...]) -> dict[str, Source]:
    return {name: origins[name].laid(way)}


def _all_turned(origins: Mapping[str, Source], names: list[str]) -> dict[str, Source]:
    return {name: origins[name].laid(origins[name].ways[1]) for name in names}


def _families(origins: Mapping[str, Source]) -> list[list[str]]:
    """Return the right parameters that are parts of matrices and biases of one module on the left."""
    found: dict[tuple[str, int], list[str]] = {}
    for name, origin in origins.items():
        if isinstance(origin, Origin) and origin.piece.cuts and not _is_known(origin.piece.name):
            module = origin.piece.name.rpartition(".")[0].rpartition(".")[0]
            found.setdefault((module, origin.piece.cuts[-1].count), []).append(name)
    return list(found.values())


def _is_known(name: str) -> bool:
    return name.rpartition(".")[2].startswith(_KNOWN)


def _gate(origin: Source) -> int:
    return origin.piece.cuts[-1].part if isinstance(origin, Origin) else -1


def _reordered(
    origins: Mapping[str, Source], family: list[str], order: Mapping[int, int]
) -> dict[str, Source]:
    """Return the origins of a family with its gates in another order."""
    pieces = {}
    for name in family:
        origin = origins[name]
        if isinstance(origin, Origin):
            *outer, cut = origin.piece.cuts
            pieces[origin.piece.name, tuple(outer), cut.part] = origin.piece
    found = dict[str, Source]()
    for name in family:
        origin = origins[name]
        if isinstance(origin, Origin):
            *outer, cut = origin.piece.cuts
            piece = pieces.get((origin.piece.name, tuple(outer), order[cut.part]))
            found[name] = origin if piece is None else replace(origin, piece=piece)
    return found
