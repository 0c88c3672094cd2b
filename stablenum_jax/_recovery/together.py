"""Several processes see the symptoms of all of them, so that they go back together."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jax
import numpy as np

from stablenum.recovery.symptoms import Symptom

__all__ = ["first_of_all", "symptoms_of_all"]


def symptoms_of_all(mine: Sequence[Symptom]) -> list[Symptom]:
    """Return the symptoms of all processes, the same list in each of them; all must call at once."""
    if jax.process_count() == 1:
        return list(mine)
    plain = json.dumps([symptom.to_dict() for symptom in mine]).encode()
    return [Symptom.from_dict(one) for text in _gathered(plain) for one in json.loads(text)]


def first_of_all(value: str | None) -> str | None:
    """Return the value of the first process; all must call at once."""
    if jax.process_count() == 1:
        return value
    first: str | None = json.loads(_gathered(json.dumps(value).encode())[0])
    return first


def _gathered(text: bytes) -> list[bytes]:
    """Return the bytes of each process, which may be of any length."""
    from jax.experimental.multihost_utils import process_allgather

    lengths = np.asarray(process_allgather(np.asarray([len(text)], np.int32))).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    rows = np.asarray(process_allgather(padded)).reshape(len(lengths), -1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]
