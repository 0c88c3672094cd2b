"""Which parameters are not finite on purpose, as a mask of -inf: those that are not from the beginning."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from stablenum_torch._devices.finiteness import which_are_finite
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._step.measure.norms import dense_values

__all__ = ["FirstLook", "finiteness_of"]


class FirstLook:
    """Which parameters were not finite when a guard first saw them: no step is at fault for those."""

    def __init__(self) -> None:
        self._params: list[Tensor] = []
        self._seen: list[tuple[list[weakref.ref[Tensor]], Tensor]] = []

    def look(self, params: list[Tensor]) -> None:
        """Look at those of the parameters that are new. This does not wait for their device.

        Args:
            params: all parameters; the same list as in the last call if they have not changed.
        """
        if params is self._params:
            return
        known = set(map(id, self._params))
        new = [p for p in params if id(p) not in known]
        self._params = params
        self._seen += [([weakref.ref(new[i]) for i in at], finite) for at, finite in finiteness_of(new)]

    def bad(self) -> set[int]:
        """Return the ``id`` of each that was not finite. This waits for the device."""
        each = (pair for refs, finite in self._seen for pair in zip(refs, finite.tolist(), strict=True))
        return {id(p) for p in (ref() for ref, finite in each if not finite) if p is not None}


def finiteness_of(params: Sequence[Tensor]) -> list[tuple[list[int], Tensor]]:
    """Return indices of parameters and which of these are finite, (n,) bool on their device, for each device
    and format. Without a wait."""
    kinds: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for i, p in enumerate(params):
        values = dense_values(local_part(p.detach()))
        if values.is_floating_point() and values.numel():
            kinds.setdefault((values.device, values.dtype), []).append((i, values))
    return [
        ([i for i, _ in members], which_are_finite([values for _, values in members]))
        for members in kinds.values()
    ]
