"""Let a bias come from the layer that its matrix comes from, where several vectors are as long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stablenum.diagnosis.diff.weights.origins import Origin, Piece, Source
from stablenum.diagnosis.diff.weights.parameter_uses import Use

__all__ = ["beside_their_matrices"]


def beside_their_matrices(origins: Mapping[str, Source], left: Sequence[Use]) -> dict[str, Source]:
    """Return the origins, with those of vectors beside one matrix moved to the vector beside that matrix's
    origin; nothing is moved unless the vectors that are moved change places with one another.

    Args:
        origins: by the name of the right parameter.
        left: the parameters of the left side.
    """
    moved = {name: new for name, old in origins.items() if (new := _beside(name, old, origins, left))}
    before = {o.piece.name for name in moved if isinstance(o := origins[name], Origin)}
    return {**origins, **moved} if before == {o.piece.name for o in moved.values()} else dict(origins)


def _beside(name: str, origin: Source, origins: Mapping[str, Source], left: Sequence[Use]) -> Origin | None:
    """Return the origin that a vector has beside its matrix, if that is another one."""
    matrix = _matrix_beside(name, origins)
    if not isinstance(origin, Origin) or len(origin.shape) != 1 or matrix is None:
        return None
    home = _module(matrix.piece.name)
    vectors = [u for u in left if _module(u.name) == home and len(u.shape) == 1]
    if _module(origin.piece.name) == home or len(vectors) != 1:
        return None
    cuts = tuple(replace(cut, axis=0) for cut in matrix.piece.cuts if cut.axis == 0 and not cut.layer)
    length = cuts[0].end - cuts[0].begin if len(cuts) == 1 else vectors[0].shape[0]
    if len(cuts) != len(matrix.piece.cuts) or (length,) != tuple(origin.shape):
        return None
    return Origin(Piece(vectors[0].piece.name, cuts), origin.shape, (0,))


def _matrix_beside(name: str, origins: Mapping[str, Source]) -> Origin | None:
    """Return the origin of the only other parameter of the module, if it is a matrix or a kernel."""
    others = [o for other, o in origins.items() if other != name and _module(other) == _module(name)]
    return (
        others[0] if len(others) == 1 and isinstance(others[0], Origin) and len(others[0].shape) > 1 else None
    )


def _module(name: str) -> str:
    return name.rpartition(".")[0]
