"""The sizes of a model's buffers after each step, measured without a wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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
        self._noted: list[tuple[int, list[tuple[_Place, int]], list[Tensor]]] = []

    @torch.no_grad()
    def note(self, step: int) -> None:
        """Measure after a step; the device is not waited for."""
        if not self._noted:  # a walk over all modules takes longer than the norms
            self._places = list(_places(self._modules))
        values = [(place, _values(place)) for place in self._places]
        judged = [(place, tensor) for place, tensor in values if tensor is not None]
        tensors = [tensor for _, tensor in judged]
        norms = list(torch._foreach_norm(tensors)) if tensors else []
        self._noted.append((step, [(place, tensor.numel()) for place, tensor in judged], norms))

    def noted(self) -> list[Noted]:
        """Return what was measured since the last call; the host waits once for each device."""
        noted, self._noted = self._noted, []
        read = iter(_read([norm for _, _, norms in noted for norm in norms]))
        return [
            Noted(step, sizes((place.name, place.part, count, next(read)) for place, count in judged))
            for step, judged, _ in noted
        ]


def _places(modules: Mapping[str, nn.Module]) -> Iterator[_Place]:
    seen = set[int]()
    for prefix, whole in modules.items():
        for layer, module in whole.named_modules(prefix=prefix.removesuffix(".")):
            for key, tensor in module._buffers.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    part = _STATISTICS.get(key, Part.WHOLE)
                    yield _Place(
                        layer if part is not Part.WHOLE else f"{layer}.{key}".lstrip("."), part, module, key
                    )


def _values(place: _Place) -> Tensor | None:
    """Return the buffer in a format whose norm has room; None if it is not judged."""
    tensor = place.module._buffers.get(place.key)
    if tensor is None or tensor.layout is not torch.strided or not tensor.is_floating_point():
        return None
    values = local_part(tensor).detach()
    if values.is_meta or not is_judged(values.shape, place.part):
        return None
    return values if values.dtype in _NORMED else values.float()


def _read(norms: Sequence[Tensor]) -> list[float]:
    """Return norms as floats; the host waits once for each device."""
    of_device: dict[torch.device, list[int]] = {}
    for i, norm in enumerate(norms):
        of_device.setdefault(norm.device, []).append(i)
    found = [0.0] * len(norms)
    for indices in of_device.values():
        read = torch.stack([norms[i].double() for i in indices]).tolist()
        for i, value in zip(indices, read, strict=True):
            found[i] = value
    return found
