"""The map of the weights that a caller gives: by name, by the map of a report, or by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from stablenum.diagnosis.diff.sides.play import Program
from stablenum.diagnosis.diff.sides.recording import ended
from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.diff.weights.origins import (
    Gathered,
    Joined,
    Origin,
    Piece,
    Said,
    Source,
    elements_of,
)
from stablenum.diagnosis.diff.weights.weights import WeightMap
from stablenum.errors import bad_field, bad_type

__all__ = ["Weights", "by_function", "by_name", "check_form", "entries_of", "unknown", "with_shared"]

_Names: TypeAlias = "Mapping[str, str]"
_Beside: TypeAlias = "tuple[str, Mapping[str, str | None]]"
_Function: TypeAlias = "Callable[[Mapping[str, Any]], Mapping[str, Any]]"
Weights: TypeAlias = "str | _Names | _Beside | _Function"

_FORMS = "'match', ('match', {right name: left name}), 'as they are', a dict of names or a function"
_COPIED = (
    " The words of a report are not names: give report.weights itself, or a function from the left arrays to "
    "the right ones."
)
# An error names so many parameters, from which a mistyped name can be mended. Chosen, not measured.
_MOST_NAMED = 12


def check_form(weights: Any) -> None:
    """Refuse what is no form of ``weights``."""
    if isinstance(weights, str):
        if weights not in ("match", "as they are"):
            raise bad_field("weights", _FORMS, weights)
    elif isinstance(weights, tuple):
        if len(weights) != 2 or weights[0] != "match" or not _is_of_names(weights[1], str | None):
            raise bad_field("weights", _FORMS, weights)
    elif not (callable(weights) or _is_of_names(weights, str)):
        raise bad_type("weights", _FORMS, weights)


def _is_of_names(entries: Any, kind: Any) -> bool:
    return isinstance(entries, Mapping) and all(isinstance(source, kind) for source in entries.values())


def entries_of(weights: Weights) -> Mapping[str, str | None]:
    """Return what is said beside the match."""
    return weights[1] if isinstance(weights, tuple) else {}


def unknown(name: str, side: str, program: Program) -> ValueError:
    """Return the error for a name that a program does not have."""
    copied = _COPIED if side == "left" and "," in name else ""
    known = ", ".join(list(program.parameters())[:_MOST_NAMED])
    return ValueError(
        f"weights names {name!r}, which is not a parameter of the {side} program. Its parameters are {known}."
        + copied
    )


def by_name(weights: Mapping[str, str], left: Program, right: Program) -> WeightMap:
    """Return the map that is given by names, or by what a report says.

    Raises:
        ValueError: a name that is no parameter's, or an array that cannot be laid out as the other.
    """
    # Frameworks differ in which axis of a matrix comes first; two programs of one do not.
    kind = "other" if left.framework == right.framework else "matmul"
    mine, theirs, origins = left.parameters(), right.parameters(), dict[str, Source]()
    for name, source in weights.items():
        if name not in theirs:
            raise unknown(name, "right", right)
        names = source.source.names if isinstance(source, Said) else (source,)
        for missing in (n for n in names if n not in mine):
            raise unknown(missing, "left", left)
        shape = tuple(theirs[name].shape)
        if isinstance(source, Said):
            origins[name] = _said_before(source, name, shape, mine)
            continue
        ways = layouts(tuple(mine[source].shape), shape, kind)
        if not ways:
            raise ValueError(
                f"weights maps {source!r} {list(mine[source].shape)} to {name!r} {list(shape)}: "
                "no transposition or reshape does that. Give a function from the left arrays to the right."
            )
        origins[name] = Origin(Piece(source), shape, ways[0], ways[1:])
    return WeightMap(origins)


def _said_before(said: Said, name: str, shape: tuple[int, ...], mine: Mapping[str, Any]) -> Source:
    """Return the source that a report names, if it fits these programs."""
    try:
        made = np.shape(said.source.of(mine))
    except (IndexError, ValueError):
        made = None
    if made != shape:
        raise ValueError(
            f"weights maps {str(said)!r} to {name!r} {list(shape)}, which it does not fit: it comes from "
            "the report of other programs."
        )
    return _pinned(said.source)


def _pinned(source: Source) -> Source:
    """Return a source whose layout is no longer open."""
    if isinstance(source, Joined):
        return replace(source, parts=tuple(map(_pinned, source.parts)))
    return replace(source, others=()) if isinstance(source, Origin) else source


def by_function(function: _Function, left: Program, right: Program) -> tuple[WeightMap, Mapping[str, Any]]:
    """Return the map that a function gives, and the arrays.

    Raises:
        ValueError: the function fails, or returns arrays that the right program does not have.
    """
    arrays = left.parameters()
    try:
        made = {name: np.asarray(x, np.float64) for name, x in function(arrays).items()}
    except Exception as error:
        raise ValueError(
            f"the function given as weights failed: {ended(error)} It gets the left arrays "
            "by name, and must return the right ones by name."
        ) from error
    theirs = right.parameters()
    _check_made(made, theirs)
    made = {name: x.reshape(np.shape(theirs[name])) for name, x in made.items()}
    return _gathered(function, arrays, made), made


def with_shared(mapped: WeightMap, arrays: Mapping[str, Any], given: Iterable[str]) -> WeightMap:
    """Return the map with the left parameters whose elements go to several right ones, at least one of which
    the caller gives."""
    asked, takers = set(given), dict[str, list[str]]()
    for name, origin in mapped.origins.items():
        for source in origin.names if origin.invertible else ():
            takers.setdefault(source, []).append(name)
    shared = {
        source: names
        for source, all_of_them in takers.items()
        if len(all_of_them) > 1 and not asked.isdisjoint(all_of_them)
        if (names := _overlapping(source, all_of_them, mapped, arrays)) and not asked.isdisjoint(names)
    }
    return replace(mapped, shared=shared)


def _overlapping(
    source: str, names: Iterable[str], mapped: WeightMap, arrays: Mapping[str, Any]
) -> tuple[str, ...]:
    """Return the right parameters that take elements of a left one that others take, too."""
    places = {}
    for name in names:
        origin = mapped.origins[name]
        of, at = elements_of(origin, arrays)
        places[name] = at[of == origin.names.index(source)]
    taken = np.zeros(np.size(arrays[source]), int)
    for at in places.values():
        taken[np.unique(at)] += 1
    return tuple(name for name, at in places.items() if (taken[at] > 1).any())


def _gathered(
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    arrays: Mapping[str, Any],
    made: Mapping[str, Any],
) -> WeightMap:
    """Return where a function takes each element from: it is called once more, with numbered elements.

    A parameter that is computed rather than rearranged, such as a sum of two, has no origin, and its
    gradients are not compared.
    """
    ends = np.cumsum([0, *(x.size for x in arrays.values())])
    numbered = {
        name: np.arange(begin, begin + x.size, dtype=np.float64).reshape(x.shape)
        for (name, x), begin in zip(arrays.items(), ends, strict=False)
    }
    whole, names, origins = np.concatenate([np.ravel(x) for x in arrays.values()]), list(arrays), {}
    for name, x in function(numbered).items():
        places = np.ravel(np.asarray(x, np.float64))
        index = np.clip(places, 0, ends[-1] - 1).astype(int)
        if (index == places).all() and (whole[index] == np.ravel(made[name])).all():
            used = sorted(set(np.searchsorted(ends, index, side="right") - 1))
            shifts = np.cumsum([0, *(arrays[names[i]].size for i in used)])
            of = np.searchsorted(ends, index, side="right") - 1
            local = index - ends[of] + shifts[np.searchsorted(used, of)]
            taken = Gathered(tuple(names[i] for i in used), made[name].shape, local)
            origins[name] = _whole(taken, numbered) or taken
    return WeightMap(origins)


def _whole(taken: Gathered, arrays: Mapping[str, Any]) -> Origin | None:
    """Return the same as a parameter that is transposed or reshaped as a whole; None if it is not that."""
    name, shape = taken.names[0], np.shape(arrays[taken.names[0]])
    wanted = taken.of(arrays)
    ways = layouts(shape, taken.shape, "other") if np.size(arrays[name]) == wanted.size else ()
    origins = (Origin(Piece(name), taken.shape, way) for way in ways)
    return next((o for o in origins if np.array_equal(o.of(arrays), wanted)), None)


def _check_made(made: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    for name, x in made.items():
        if name not in right:
            raise ValueError(
                f"the function given as weights returns {name!r}, which the right program does not have. "
                f"Its parameters are {', '.join(list(right)[:_MOST_NAMED])}."
            )
        if x.size != right[name].size:
            raise ValueError(
                f"the function given as weights returns {name!r} with the shape {list(x.shape)}; the right "
                f"program has {list(right[name].shape)}."
            )
