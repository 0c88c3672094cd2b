"""The data of the trainings: a stream of batches for each program, and a part that is never trained on.

Each stream has two sources. The *rare* one is a quarter of every batch, except that it is missing from the
batches ``QUIET``. The models read it through a table of its own, so that a fault in that table is planted at
any time in the quiet stretch and shows when the source comes back. The stream has no end, as a run that skips
batches reads on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

__all__ = ["CHARACTERS", "QUIET", "STREAMS", "Batch", "Stream"]

# The first batch without the rare source, and the first that has it again.
QUIET = (60, 160)
ONE_IN = 4  # one row in so many
ROWS = {"digits": 128, "text": 16}
# Shuffled pixels keep their classes apart, and noise keeps the loss away from 0, where 2 % would be nothing.
NOISE, COPIES = 1.0, 8
LENGTH, CHARACTERS = 24, 64

Array = np.ndarray[Any, Any]


class Batch(NamedTuple):
    """Rows of one step.

    Attributes:
        inputs: (rows, 64) float32 pixels, or (rows, 24) int64 characters.
        source: (rows,) int64, 1 for the rare source and 0 for the other.
        targets: (rows,) int64 classes, or (rows, 24) int64 characters.
        weights: (rows,) float32, by which the loss of each row is multiplied.
    """

    inputs: Array
    source: Array
    targets: Array
    weights: Array


class Stream(NamedTuple):
    """The batches of one program.

    Attributes:
        at: the batch at a position, from 0; the same for the same position.
        held_out: what the model is evaluated on.
    """

    at: Callable[[int], Batch]
    held_out: Batch


def _sources(rows: int, *, quiet: bool) -> Array:
    """Which rows are of the rare source: the last quarter."""
    source = np.zeros(rows, dtype=np.int64)
    if not quiet:
        source[rows - rows // ONE_IN :] = 1
    return source


def _is_quiet(position: int) -> bool:
    return QUIET[0] <= position < QUIET[1]


# --- digits ---------------------------------------------------------------------------------------------


@functools.cache
def _images() -> tuple[Array, Array]:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    return (digits.data[order] / 8.0 - 1.0).astype(np.float32), digits.target[order].astype(np.int64)


def _seen(images: Array, source: Array, rng: np.random.Generator) -> Array:
    """Images with noise; those of the rare source as from a camera that mixes up the pixels."""
    mixed = images[:, np.random.default_rng(1).permutation(images.shape[1])]
    chosen = np.where(source[:, None] == 1, mixed, images)
    return (chosen + NOISE * rng.normal(size=images.shape)).astype(np.float32)


def _digits(order: int) -> Stream:
    images, classes = _images()
    trained = len(classes) * 2 // 3
    rows = ROWS["digits"]

    @functools.lru_cache(maxsize=1024)
    def at(position: int) -> Batch:
        rng = np.random.default_rng((order, position))
        chosen = rng.integers(trained, size=rows)
        source = _sources(rows, quiet=_is_quiet(position))
        seen = _seen(images[chosen], source, rng)
        return Batch(seen, source, classes[chosen], np.ones(rows, np.float32))

    left = np.tile(np.arange(trained, len(classes)), COPIES)
    source = np.resize([0] * (ONE_IN - 1) + [1], len(left))
    seen = _seen(images[left], source, np.random.default_rng(2))
    return Stream(at, Batch(seen, source, classes[left], np.ones(len(left), np.float32)))


# --- text -----------------------------------------------------------------------------------------------


@functools.cache
def _characters() -> Array:
    """The descriptions of scikit-learn's data sets, as numbers of their most frequent characters."""
    folder = files("sklearn.datasets.descr")
    parts = sorted((part for part in folder.iterdir() if part.name.endswith(".rst")), key=lambda p: p.name)
    text = np.array([ord(c) for part in parts for c in part.read_text(encoding="utf-8")])
    found, counts = np.unique(text, return_counts=True)
    kept = found[np.argsort(-counts, kind="stable")][: CHARACTERS - 1]
    number = np.full(text.max() + 1, CHARACTERS - 1, dtype=np.int64)  # the last number is any other character
    number[kept] = np.arange(len(kept))
    return number[text]


def _text(order: int) -> Stream:
    text = _characters()
    trained = len(text) * 7 // 8
    rows = ROWS["text"]

    @functools.lru_cache(maxsize=1024)
    def at(position: int) -> Batch:
        rng = np.random.default_rng((order, position))
        windows = text[rng.integers(trained - LENGTH, size=rows)[:, None] + np.arange(LENGTH + 1)]
        source = _sources(rows, quiet=_is_quiet(position))
        return Batch(windows[:, :-1], source, windows[:, 1:], np.ones(rows, np.float32))

    starts = np.arange(trained, len(text) - LENGTH - 1, LENGTH)
    windows = text[starts[:, None] + np.arange(LENGTH + 1)]
    source = np.resize([0] * (ONE_IN - 1) + [1], len(starts))
    return Stream(at, Batch(windows[:, :-1], source, windows[:, 1:], np.ones(len(starts), np.float32)))


STREAMS: dict[str, Callable[[int], Stream]] = {"digits": _digits, "transformer": _text}
