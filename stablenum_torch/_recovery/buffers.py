"""The sizes of a model's buffers after each step, measured without a wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stablenum.recovery.buffers import Noted, Part, is_judged, sizes
from stablenum_torch._devices.ranks import local_part

__all__ = ["BufferSizes"]

_STATISTICS = {"running_mean": Part.MEAN, "running_var": Part.VARIANCE}
_NORMED = (torch.float32, torch.float64)  # the norm of a narrower format would have that format, and overflow


class _Place(NamedTuple):
    """Where a buffer is: a step may put another tensor there."""

    name: str  # of the buffer, or of the layer whose running statistics it belongs to
    part: Part
    module: nn.Module
    key: str


class BufferSizes:
    """Measures the floating-point buffers of modules; of sharded ones, this rank's part.

    Args:
        modules: by what is put in front of their names.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._places: list[_Place] = []
        self._noted: list[tuple[int, list[_Measured]]] = []

    @torch.no_grad()
    def note(self, step: int) -> None:
        """Measure after a step; the device is not waited for."""
        if not self._noted:  # a walk over all modules takes longer than the norms
            self._places = list(_places(self._modules))
        alike: dict[Any, list[tuple[_Place, Tensor]]] = {}
        for place in self._places:
            values = _values(place)
            if values is not None:
                alike.setdefault((values.device, values.dtype), []).append((place, values))
        self._noted.append((step, [_measured(pairs) for pairs in alike.values()]))

    def noted(self) -> list[Noted]:
        """Return what was measured since the last call."""
        noted, self._noted = self._noted, []
        return [Noted(step, sizes(_norms(measured))) for step, measured in noted]


class _Measured(NamedTuple):
    """The norms of some buffers, still on their device."""

    places: list[tuple[_Place, int]]  # with the number of elements
    norms: Tensor


def _measured(pairs: Sequence[tuple[_Place, Tensor]]) -> _Measured:
    norms = torch.stack(torch._foreach_norm([values for _, values in pairs]))
    return _Measured([(place, values.numel()) for place, values in pairs], norms)


def _norms(measured: Sequence[_Measured]) -> Iterator[tuple[str, Part, int, float]]:
    for places, norms in measured:
        for (place, elements), norm in zip(places, norms.tolist(), strict=True):
            yield place.name, place.part, elements, norm


def _places(modules: Mapping[str, nn.Module]) -> Iterator[_Place]:
    seen = set[int]()
    for prefix, whole in modules.items():
        for layer, module in whole.named_modules(prefix=prefix.removesuffix(".")):
            for key, tensor in module._buffers.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    part = _STATISTICS.get(key, Part.WHOLE)
                    whole_name = f"{layer}.{key}".lstrip(".")
                    yield _Place(whole_name if part is Part.WHOLE else layer, part, module, key)


def _values(place: _Place) -> Tensor | None:
    """Return the buffer in a format whose norm has room; None if it is not judged."""
    tensor = place.module._buffers.get(place.key)
    if tensor is None or tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    values = local_part(tensor).detach()
    if values.is_meta or not is_judged(values.shape, place.part):
        return None
    return values if values.dtype in _NORMED else values.float()
