"""Which checkpoints are no longer needed."""

from __future__ import annotations

from collections.abc import Sequence

from stablenum.checkpoints.manifest import Manifest

__all__ = ["superseded"]


def superseded(manifests: Sequence[Manifest], keep: int | None) -> list[int]:
    """Return the places of the checkpoints that may be deleted.

    The newest ``keep`` stay, and so does the newest confirmed one, however old. Of two with the same step,
    the older one goes, unless it alone is confirmed.

    Args:
        manifests: those of the checkpoints that are intact. A checkpoint that is not intact replaces nothing.
        keep: how many to keep; None for all.

    Example:
        >>> def saved(serial, confirmed=True):
        ...     manifest = dict(step=serial, format="torch", time="", versions={})
        ...     return Manifest(serial=serial, confirmed=confirmed, **manifest)
        >>> superseded([saved(1), saved(2), saved(3)], keep=2)
        [0]
        >>> superseded([saved(1), saved(2, False), saved(3, False)], keep=2)
        []
    """
    order = sorted(range(len(manifests)), key=lambda i: manifests[i].serial, reverse=True)
    current = [i for place, i in enumerate(order) if not _replaced(manifests, i, order[:place])]
    stay = set(current if keep is None else current[:keep])
    stay |= set([i for i in current if manifests[i].confirmed][:1])
    return [i for i in range(len(manifests)) if i not in stay]


def _replaced(manifests: Sequence[Manifest], i: int, newer: Sequence[int]) -> bool:
    """Return whether a newer checkpoint has the same step and is at least as trustworthy."""
    mine = manifests[i]
    return any(
        manifests[j].step == mine.step and (manifests[j].confirmed or not mine.confirmed) for j in newer
    )
