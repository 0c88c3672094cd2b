"""Replicas that must hold the same bits: how they are compared, and which of them has parted from the others.

Adapters compute a checksum of every tensor (:func:`checksum`) on every replica, and join them in one
collective. What a difference means is decided here.

The checksum multiplies each word of a tensor by an odd 64-bit number that depends on the word's place, and
adds the products modulo 2**64. One changed bit always changes the sum, because an odd factor has an inverse.
Any other change goes unseen with a probability of at most about 2**-31, as in multilinear hashing (Lemire and
Kaser 2014, arXiv 1202.4961).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from stablenum._support.settings_checks import check_int
from stablenum.errors import ReplicasPartedError

__all__ = [
    "ABSENT",
    "BLOCK",
    "PARAMETER",
    "Parted",
    "block_sums",
    "check_due",
    "checksum",
    "digest",
    "key_of_places",
    "odd_ones",
    "parted_error",
    "parted_slots",
    "steps_between_checks",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any
Replica = TypeVar("Replica", bound=Hashable)

BLOCK = 2**16  # words that share the key of their block; each has the key of its place in the block
ABSENT = -(2**63)  # what a replica that does not hold a slot contributes to the maximum
PARAMETER = "parameter"  # the name of the parameter itself among its tensors
_SHOWN = 3  # tensors that a message names


# --- checksums -----------------------------------------------------------------------------------


def key_of_places(count: int, *, xp: Namespace, first: int = 0, device: Any = None) -> Array:
    """Return the keys of the places from ``first`` on: (count,) int64, odd, and as if drawn at random.

    They are those of the generator splitmix64 (Steele et al. 2014, doi 10.1145/2660193.2660195). Products
    wrap around at 64 bits.
    """
    z = (xp.arange(first + 1, first + count + 1, dtype=xp.int64, device=device)) * _GAMMA
    z = (z ^ _shifted(z, 30)) * _FIRST_FACTOR
    z = (z ^ _shifted(z, 27)) * _SECOND_FACTOR
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Array, bits: int) -> Array:
    """Return ``z``, taken as unsigned, divided by 2**bits."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST_FACTOR = _signed(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = _signed(0x94D049BB133111EB)


def block_sums(words: Array, keys: Array, *, xp: Namespace) -> Array:
    """Return the sums of words times keys along the last axis: (...) int64.

    Args:
        words: (..., m) signed integers of at most 32 bits, m up to ``BLOCK``.
        keys: ``key_of_places(BLOCK)``.
    """
    return xp.sum(xp.astype(words, xp.int64) * keys[: words.shape[-1]], axis=-1)


def checksum(sums: Array, keys: Array, *, xp: Namespace) -> Array:
    """Return the checksum of a tensor from the sums of its blocks: () int64; 0 without blocks.

    Args:
        sums: (b,) int64 from :func:`block_sums`, in order; only the last block may be shorter than others.
        keys: (b,) or longer, the keys of the blocks: ``key_of_places(b, first=BLOCK)``.
    """
    return xp.sum(sums * keys[: sums.shape[0]])


def digest(tensors: Mapping[str, str]) -> int:
    """Return one signed 64-bit number for all tensors of a parameter.

    Args:
        tensors: what identifies the bits of each tensor: its dtype, shape and checksum.
    """
    said = repr(sorted(tensors.items())).encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big", signed=True)


# --- when, and which -----------------------------------------------------------------------------


def steps_between_checks(check_replicas_every: object) -> int | None:
    """Return the setting ``check_replicas_every`` as a plain number; None never compares.

    Raises:
        ValueError: it is neither None nor a whole number of at least 1.
    """
    if check_replicas_every is None:
        return None
    return check_int("check_replicas_every", check_replicas_every, at_least=1)


def check_due(every: int, steps: int) -> bool:
    """Return whether replicas are compared after this many steps, skipped ones included.

    Example:
        >>> [steps for steps in range(1, 8) if check_due(3, steps)]
        [3, 6]
    """
    return steps % every == 0


def parted_slots(largest: Sequence[int], largest_inverted: Sequence[int]) -> list[int]:
    """Return the slots in which replicas differ.

    Args:
        largest: for each slot, the largest digest of the replicas that hold it; ``ABSENT`` if none does.
        largest_inverted: the largest of the digests with all bits inverted, so that the digests of a slot
            are equal if and only if one is the other inverted.

    Example:
        >>> parted_slots([5, 7, ABSENT], [~5, ~6, ABSENT])
        [1]
    """
    both = enumerate(zip(largest, largest_inverted, strict=True))
    return [slot for slot, (a, b) in both if a != ~b and (a, b) != (ABSENT, ABSENT)]


def odd_ones(held: Mapping[Replica, Hashable]) -> list[Replica]:
    """Return the replicas that differ from the majority; all of them if more than half hold no one value.

    Example:
        >>> odd_ones({0: 5, 1: 5, 2: 6}), odd_ones({0: 5, 1: 6}), odd_ones({0: 5, 1: 5})
        ([2], [0, 1], [])
    """
    if not held:
        return []
    value, count = Counter(held.values()).most_common(1)[0]
    if count == len(held):
        return []
    return [replica for replica, own in held.items() if own != value or 2 * count <= len(held)]


# --- what is said --------------------------------------------------------------------------------


class Parted(NamedTuple):
    """One tensor that is not the same on all replicas that should hold it.

    Attributes:
        parameter: the parameter's name.
        tensor: which of the parameter's tensors.
        held: what identifies its bits on each replica, by the replica's number; None where it is missing.
    """

    parameter: str
    tensor: str
    held: Mapping[int, str | None]


def parted_error(
    found: Sequence[Parted], *, step: int | None, kind: str, parameters: int, compared: int, remedy: str
) -> ReplicasPartedError:
    """Return the error about replicas that differ.

    Args:
        found: the tensors that differ, at least one; of all of them, or of the first.
        step: the number of the last step, if it is known.
        kind: what a replica is: "rank" or "device".
        parameters: how many parameters differ.
        compared: how many were compared.
        remedy: how to make the replicas equal; ``{good}`` stands for the number of a good one.
    """
    when = "" if step is None else f" after step {step}"
    shown = "; ".join(_described(part, kind) for part in found[:_SHOWN])
    more = len(found) > _SHOWN or parameters > len({part.parameter for part in found[:_SHOWN]})
    count = f" In all, {parameters} of {compared} compared parameters differ." if more else ""
    cause = _SEED if parameters == compared and compared > 1 else _PLACE
    good = next((r for part in found for r in part.held if r not in odd_ones(part.held)), None)
    mend = remedy.format(good=f"<the {kind} that you trust>" if good is None else good)
    return ReplicasPartedError(
        f"replicas have parted{when}: {shown}.{count} They must hold the same bits. {cause} {mend}",
        step=step,
        parted=[(part.parameter, part.tensor, tuple(odd_ones(part.held))) for part in found],
    )


def _described(part: Parted, kind: str) -> str:
    odd = odd_ones(part.held)
    others = [replica for replica in part.held if replica not in odd]
    where = f"in {part.parameter}" if part.tensor == PARAMETER else f"in {part.tensor} of {part.parameter}"
    if not others:
        return f"{_listed(kind, odd)} differ {where}, and no majority shows which is right"
    verb = "differs" if len(odd) == 1 else "differ"
    lacking = [replica for replica in odd if part.held[replica] is None]
    missing = f" (missing on {_listed(kind, lacking)})" if lacking else ""
    return f"{_listed(kind, odd)} {verb} from {_listed(kind, others)} {where}{missing}"


def _listed(kind: str, replicas: Sequence[int]) -> str:
    """Return "rank 2", or "ranks 0, 1, 3", with runs of more than two numbers as "4-7"."""
    pieces: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(replicas)), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        pieces += [f"{numbers[0]}-{numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
    return f"{kind}{'s' if len(replicas) > 1 else ''} {', '.join(pieces)}"


_SEED = (
    "All compared parameters differ, which points to another seed or checkpoint at the start, or to steps "
    "that only some of them took."
)
_PLACE = (
    "Only these differ, which points to a flipped bit, to code that writes on some of them only, or to "
    "gradients that are not the same on all."
)
