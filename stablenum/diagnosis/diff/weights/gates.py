"""Parameters that one program keeps together and the other one keeps apart, gate by gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from stablenum.diagnosis.diff.weights.layouts import layouts
from stablenum.diagnosis.diff.weights.origins import Added, Origin, Piece, Source
from stablenum.diagnosis.diff.weights.parameter_uses import Use, words_of
from stablenum.diagnosis.diff.weights.sequences import cut_from

__all__ = ["apart", "with_twins"]

# Into how many parts a matrix may be cut: the gates of an LSTM and a GRU first, then those of other cells and
# gated layers. Chosen, not measured.
_COUNTS = (4, 3, 2, 6, 8)
# The parts of a recurrent layer's name that tell the weights of the input from those of the state.
_TWINS = {"ih": "hh", "hh": "ih", "i": "h", "h": "i"}


def apart(left: Sequence[Use], right: Sequence[Use], known: Mapping[str, Sequence[Use]]) -> dict[str, Source]:
    """Return origins for parameters of the right side that are parts of one on the left, in the order of use.

    The weights come first, and their biases go where the weights went; ``known`` are the parts of those that
    have a place already.
    """
    origins: dict[str, Source] = {}
    weights = dict(known)
    free = list(right)
    for whole in (u for u in left if len(u.shape) > 1):
        axis, parts = _parts(whole, free)
        if parts:
            origins.update(cut_from(whole, parts, axis))
            weights[whole.name] = parts
            free = [u for u in free if u not in parts]
    biases = [u for u in left if len(u.shape) == 1]
    for bias in biases:
        origins.update(cut_from(bias, _siblings(bias, weights, free), 0))
    return origins


def _parts(whole: Use, free: Iterable[Use]) -> tuple[int, list[Use]]:
    """Return the first parameters that can make up the whole, and the axis along which they do."""
    for axis in (0, len(whole.shape) - 1):
        for count in _COUNTS:
            if whole.shape[axis] % count:
                continue
            piece = _piece(whole.shape, count, axis)
            fitting = [
                u
                for u in free
                if u.size * count == whole.size and u.kind == whole.kind and layouts(piece, u.shape, u.kind)
            ]
            alike = [u for u in fitting if not whole.unlike(u)]
            fitting = alike if len(alike) >= count else fitting
            if len(fitting) >= count:
                return axis, fitting[:count]
    return 0, []


def _piece(shape: Sequence[int], count: int, axis: int) -> tuple[int, ...]:
    return tuple(n // count if i == axis else n for i, n in enumerate(shape))


def _siblings(bias: Use, weights: Mapping[str, Sequence[Use]], free: Sequence[Use]) -> list[Use | None]:
    """Return the biases that stand beside the parts of the weight beside which this one stands."""
    beside = next(
        (parts for name, parts in weights.items() if _plain(words_of(name)) == _plain(bias.words)), []
    )
    biases = {_plain(u.words): u for u in reversed(free) if u.words[-1:] == ("bias",)}
    return [biases.get(_plain(u.words)) for u in beside]


def _plain(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(w for w in words if w not in ("weight", "bias"))


def with_twins(origins: Mapping[str, Source], left: Sequence[Use]) -> dict[str, Source]:
    """Add each part of a bias that went nowhere to the same part of its twin.

    A recurrent layer of PyTorch has two biases for one sum.
    """
    origins = dict(origins)
    went = {(o.piece.name, o.piece.cuts): n for n, o in origins.items() if isinstance(o, Origin)}
    biases = [u for u in left if len(u.shape) == 1]
    for bias in biases:
        twin = next((u for u in biases if _is_twin(bias, u)), None)
        for (name, cuts), target in list(went.items()):
            if twin is not None and name == twin.name and (bias.name, cuts) not in went:
                known = origins[target]
                if isinstance(known, Origin):
                    origins[target] = Added((known, replace(known, piece=Piece(bias.name, cuts))))
    return origins


def _is_twin(a: Use, b: Use) -> bool:
    if a is b or len(a.words) != len(b.words):
        return False
    unlike = [(x, y) for x, y in zip(a.words, b.words) if x != y]
    return len(unlike) == 1 and _TWINS.get(unlike[0][0]) == unlike[0][1]
