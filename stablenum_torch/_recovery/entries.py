"""The entries of a state by name, and which of them are not finite: one pass over all values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stablenum.checkpoints.finiteness import Kind, NonFinite
from stablenum.checkpoints.names import in_optimizer, kind_of_number
from stablenum_torch._devices.finiteness import which_are_finite

__all__ = ["leaves", "nonfinite"]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in nested dicts, lists, tuples and sets, with its name, such as ``"model.weight"``."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, part in items:
        yield from leaves(part, f"{name}.{key}" if name else str(key))


@torch.no_grad()
def nonfinite(state: Any, kinds: Mapping[str, Kind] | None = None) -> list[NonFinite]:
    """Return the entries that are not finite, in the order of the state.

    Args:
        state: nested dicts, lists, tuples and sets.
        kinds: those of the tensors that are not like parameters, by name.

    A DTensor is measured on the rank that holds the part, a sparse tensor by the values that it stores.
    Integers, empty tensors and strings are finite.
    """
    entries = list(leaves(state))
    parts = [(i, part) for i, (_, leaf) in enumerate(entries) for part in _parts(leaf)]
    bad = dict.fromkeys(sorted(_bad_tensors(parts)))
    bad |= dict.fromkeys(i for i, (_, leaf) in enumerate(entries) if _bad_number(leaf))
    return [_described(*entries[i], (kinds or {}).get(entries[i][0], "array")) for i in sorted(bad)]


def _bad_number(leaf: Any) -> bool:
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, complex):
        return not (math.isfinite(leaf.real) and math.isfinite(leaf.imag))
    return isinstance(leaf, float) and not math.isfinite(leaf)


def _parts(leaf: Any) -> list[Tensor]:
    """Return the plain tensors of numbers that hold the values of an entry."""
    if isinstance(leaf, np.ndarray) and leaf.dtype.char in "efdFD":
        leaf = torch.as_tensor(leaf.copy())  # torch warns of memory that cannot be written to
    if not isinstance(leaf, Tensor):
        return []
    if hasattr(leaf, "__tensor_flatten__"):  # DTensors, nested tensors, formats of other libraries
        return [part for name in leaf.__tensor_flatten__()[0] for part in _parts(getattr(leaf, name))]
    if leaf.is_sparse:
        return _parts(leaf.coalesce().values())
    if leaf.layout is not torch.strided:
        return _parts(leaf.values())
    if leaf.is_quantized or not (leaf.is_floating_point() or leaf.is_complex()) or not leaf.numel():
        return []
    leaf = leaf.detach()
    return [torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf]


def _bad_tensors(parts: Iterable[tuple[int, Tensor]]) -> set[int]:
    """Return the numbers of the entries with a part that is not finite.

    The host waits once for each device and format.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for i, part in parts:
        alike.setdefault((part.device, part.dtype), []).append((i, part))
    bad: set[int] = set()
    for group in alike.values():
        finite = which_are_finite([part for _, part in group]).tolist()
        bad |= {i for (i, _), good in zip(group, finite, strict=True) if not good}
    return bad


def _described(name: str, leaf: Any, kind: Kind) -> NonFinite:
    parts = _parts(leaf)
    if not parts:  # a number
        number = torch.tensor([leaf.real, leaf.imag], dtype=torch.float64)
        keys = name.split(".")
        kind = kind_of_number(keys, optimizer=in_optimizer(keys))
        return NonFinite(name, kind, *_counts([number]), size=1)
    zero = all(bool((part.float()[part.float().isfinite()] == 0).all()) for part in parts)
    size = sum(part.numel() for part in parts)
    return NonFinite(name, kind, *_counts(parts), size=size, dimensions=leaf.ndim, others_zero=zero)


def _counts(parts: Iterable[Tensor]) -> tuple[int, int, int]:
    """Return how many elements are NaN, inf and -inf."""
    wide = [part.to(torch.float64) for part in parts]
    found = [(p.isnan().sum(), (p == math.inf).sum(), (p == -math.inf).sum()) for p in wide]
    nan, plus, minus = (sum(int(count) for count in counts) for counts in zip(*found, strict=True))
    return nan, plus, minus
