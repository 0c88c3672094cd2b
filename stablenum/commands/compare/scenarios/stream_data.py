"""The numbers of a stream: its parameters, and the gradients and loss of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from stablenum.commands.compare.scenarios.stream import Event, Stream

__all__ = ["StreamStep", "as_dtype", "scaled_gradients", "stream_params", "stream_step"]

Array: TypeAlias = "np.ndarray[Any, Any]"


class StreamStep(NamedTuple):
    """One step of a stream: float32 gradients of the unscaled loss, and that loss."""

    gradients: list[Array]
    loss: np.float32


def stream_params(stream: Stream) -> list[Array]:
    """Return the parameters at the start, each in its dtype."""
    rng = np.random.default_rng([stream.seed, 0])
    drawn = [rng.normal(size=tensor.shape) for tensor in stream.tensors]
    return [
        as_dtype(
            np.full(tensor.shape, float(stream.start)) if stream.start is not None else value, tensor.dtype
        )
        for tensor, value in zip(stream.tensors, drawn, strict=True)
    ]


def stream_step(stream: Stream, step: int) -> StreamStep:
    """Return the gradients and the loss of one step."""
    rng = np.random.default_rng([stream.seed, 1, step])
    drawn = [rng.normal(size=tensor.shape) * float(stream.magnitude) for tensor in stream.tensors]
    level = _level(stream, step)
    gradients = [as_dtype(values * level, "float32") for values in drawn]
    loss = np.float32(1.0 / (1.0 + 0.05 * step) + 0.05 * rng.random())
    for event in stream.events:
        if not event.holds_at(step):
            continue
        if event.tensor == "loss":
            loss = np.float32(_after(event, np.asarray(loss)))
            continue
        for gradient in gradients if event.tensor == "all" else [gradients[event.tensor]]:
            whole = event.everywhere or event.factor is not None
            part = gradient if whole else gradient.reshape(-1)[:1]
            part[...] = _after(event, part)
    return StreamStep(gradients, loss)


def scaled_gradients(stream: Stream, gradients: Sequence[Array], scale: float) -> list[Array]:
    """Return the gradients that the optimizer receives: scaled, and rounded as the tensors are."""
    factor, made = np.float32(scale), []
    with np.errstate(all="ignore"):  # a half-precision gradient may overflow here, as intended
        for gradient, tensor in zip(gradients, stream.tensors, strict=True):
            made.append(as_dtype(as_dtype(gradient * factor, tensor.computed or tensor.dtype), tensor.dtype))
    return made


def _level(stream: Stream, step: int) -> float:
    """Return the factor on the gradients of a step; exactly 1 without drift and jitter."""
    # Jitter has a separate generator, so that it does not change any other number.
    swing = np.random.default_rng([stream.seed, 2, step]).normal() if stream.jitter else 0.0
    return float(stream.drift) ** step * math.exp(stream.jitter * swing)


def _after(event: Event, there: Array) -> Array:
    """Return the float32 numbers that result when an event is applied to ``there``."""
    if event.factor is None:
        return as_dtype(np.full(there.shape, event.value, np.float64), "float32")
    with np.errstate(invalid="ignore"):  # 0 x inf is NaN, as everywhere
        return as_dtype(there.astype(np.float64) * event.factor, "float32")


def as_dtype(array: Array, dtype: str) -> Array:
    """Return ``array`` rounded to a dtype given by its name. Overflow gives inf without a warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(numpy_dtype(dtype))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype for a name of :data:`stablenum.commands.compare.scenarios.DTYPES`."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # imported only where bfloat16 is needed

    return np.dtype(ml_dtypes.bfloat16)
