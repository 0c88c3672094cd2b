"""Data that enter a program: from files, from other processes, and from the workers of a DataLoader."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import Tensor

from stablenum_torch._diagnosis.replay.schemas import Operation

__all__ = ["WORKER", "brings_storage", "is_from_worker", "takes_from_workers"]

WORKER = "a worker process of the DataLoader"
_ITERATOR = "_MultiProcessingDataLoaderIter"


def brings_storage(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call gives a tensor memory that no operation has filled, as unpickling does."""
    given = (*args, *kwargs.values())
    return operation.name == "set_" and any(isinstance(x, torch.UntypedStorage) for x in given)


def takes_from_workers(operation: Operation, args: tuple[Any, ...]) -> bool:
    """Return whether a call notes for the profiler that a batch is taken from a loader with workers."""
    return operation.name.startswith("_record_function_enter") and _ITERATOR in str(args[:1])


def is_from_worker(tensor: Tensor) -> bool:
    """Return whether a tensor seems to come from a worker: its memory is shared, or was pinned, by a thread
    that nothing records, and a loader with workers is running."""
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        return False
    return (tensor.is_shared() or tensor.is_pinned()) and _workers_exist()


def _workers_exist() -> bool:
    kind = getattr(sys.modules.get("torch.utils.data.dataloader"), _ITERATOR, None)
    return kind is not None and any(type(thing) is kind for thing in gc.get_objects())
