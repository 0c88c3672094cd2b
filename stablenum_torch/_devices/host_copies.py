"""Copies of tensors in host memory, made without making the host wait for a device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostCopies"]

_SIDES: dict[torch.device, torch.cuda.Stream] = {}  # one for each device: copies do not overtake one another


class HostCopies:
    """The copies of one moment.

    On CUDA they are made in the background, in pinned memory: on the current stream, or beside it. A copy on
    the current stream is made before whatever the stream does next. One beside it begins when the stream has
    done its work so far, and what is copied must not be written before the copy is complete
    (:meth:`hold_back`). On other devices they are made at once.
    """

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._done: list[torch.cuda.Event] = []

    def of(self, tensor: Tensor, *, beside: bool = False) -> Tensor:
        """Return a copy, whose values may be read after :meth:`wait`.

        Args:
            tensor: what is copied. It shares no memory with the copy.
            beside: whether the copy is made beside the current stream.
        """
        values = tensor.detach()
        if not values.is_cuda or values.layout is not torch.strided:
            return values.to("cpu", copy=True)
        stream = self._stream(values.device, beside=beside)
        # Expanded tensors get memory for all of their elements.
        into = torch.empty_like(values, device="cpu", pin_memory=True)
        with torch.cuda.stream(stream):
            into.copy_(values, non_blocking=True)
        values.record_stream(stream)  # its memory may be freed, but not given away before the copy is made
        return into

    def _stream(self, device: torch.device, *, beside: bool) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(device)
        if not beside:
            self._streams[current.cuda_stream] = current
            return current
        side = _SIDES.setdefault(device, torch.cuda.Stream(device))
        if side.cuda_stream not in self._streams:
            side.wait_stream(current)
            self._streams[side.cuda_stream] = side
        return side

    def begun(self) -> None:
        """Note that the last copy has been begun."""
        for stream in self._streams.values():
            self._done.append(stream.record_event())

    def hold_back(self) -> None:
        """Let the current streams of the devices, not the host, wait for the copies."""
        for event in self._done:
            torch.cuda.current_stream(event.device).wait_event(event)

    def wait(self) -> None:
        """Let the host wait for the copies."""
        for event in self._done:
            event.synchronize()
        self._done.clear()
