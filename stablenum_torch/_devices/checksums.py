"""Checksums of the bits of tensors, computed where the tensors are."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor

from stablenum.guard.replicas import BLOCK, block_sums, checksum, key_of_places
from stablenum_torch._devices.ranks import is_dtensor, local_part

__all__ = ["checksums"]

# Other sizes are read as several 32-bit words.
_WORDS = {1: torch.int8, 2: torch.int16}
_KEYS = 1024  # of blocks, made and kept at once
# Blocks at once: on a CPU as many as stay in its cache as int64; on an accelerator, 128 MB of products.
_BLOCKS_ON_CPU, _BLOCKS_ON_ACCELERATOR = 4, 256


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksum of each tensor's bits; of DTensors, of this rank's part. The host waits, once per
    device.

    Equal values with other bits (0.0 and -0.0, two NaNs) have other checksums.
    """
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    found = [0] * len(tensors)
    for indices in by_device.values():
        values = torch.stack([_checksum(tensors[i]) for i in indices]).tolist()
        for i, value in zip(indices, values, strict=True):
            found[i] = value
    return found


def _checksum(tensor: Tensor) -> Tensor:
    words = _words(tensor)
    keys = _keys(words.device)
    whole = len(words) // BLOCK * BLOCK
    blocks = words[:whole].view(-1, BLOCK)
    at_once = _BLOCKS_ON_CPU if words.is_cpu else _BLOCKS_ON_ACCELERATOR
    parts = [_block_sums(some, keys) for some in blocks.split(at_once)]
    if whole < len(words):
        parts.append(_block_sums(words[None, whole:], keys))
    of_blocks = _block_keys(words.device, -(-len(words) // BLOCK // _KEYS) * _KEYS)
    return checksum(torch.cat(parts), of_blocks, xp=torch_namespace)


def _block_sums(words: Tensor, keys: Tensor) -> Tensor:
    if words.is_cpu:  # where torch multiplies matrices of integers: the same sums in a third of the time
        return words.to(torch.int64).mv(keys[: words.shape[1]])
    return block_sums(words, keys, xp=torch_namespace)


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as a vector of integers of at most 32 bits."""
    local = local_part(tensor.detach()) if is_dtensor(tensor) else tensor.detach()
    dense = local.to_dense() if local.layout != torch.strided else local
    # Lazily conjugated or negated tensors do not hold the bits that they stand for.
    plain = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(_WORDS.get(plain.element_size(), torch.int32))


@functools.cache
def _keys(device: torch.device) -> Tensor:
    return key_of_places(BLOCK, xp=torch_namespace, device=device)


@functools.cache
def _block_keys(device: torch.device, count: int) -> Tensor:
    return key_of_places(count, xp=torch_namespace, first=BLOCK, device=device)
