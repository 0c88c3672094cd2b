"""Measure a row in one process: time all variants in turn, check their results, and count their work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from benchmarks.steps.errors import WrongResultError
from benchmarks.steps.reference import check_against_each_other, check_parameters
from benchmarks.steps.rows import CLIPPED, UNCLIPPED, Row, on_device
from benchmarks.timing import interleaved

__all__ = ["Bench", "measure"]

_TENSORS, _ELEMENTS = 40, 64  # how many are compared with the reference


class Bench(Protocol):
    """A row set up in one framework.

    Attributes:
        device: the name of the device in the results.
        norm: the norm of all gradients at factor 1, float64.
        raw: the gradients at factor 1.
        variants: the variants by name, with ``step()``, ``check()``, ``steps`` and ``skips``.
        timer: runs a step and returns its milliseconds.
    """

    device: str
    norm: float
    raw: Sequence[Any]
    variants: Mapping[str, Any]
    timer: Callable[[Callable[[], object]], float]

    def put(self, name: str) -> None:
        """Write the gradients of the variant's next step, and count that step."""

    def start(self) -> Sequence[Any]:
        """The parameters before the first step."""

    def parameters(self, name: str) -> Sequence[Any]:
        """The variant's current parameters."""

    def numbers(self, array: Any) -> np.ndarray:
        """An array of the framework as NumPy float64."""

    def square_apart(self, one: Any, other: Any) -> float:
        """The sum of the squares of the differences."""

    def count(self, name: str) -> dict[str, Any]:
        """The counts of a step's work."""

    def skip(self, name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Some parameters and moments before and after a step whose last gradient element is infinite."""


def measure(row: Row, *, device: str = "cpu", turn: int = 0) -> dict[str, Any]:
    """Time and check the row's variants; the first process also counts their work.

    Args:
        row: what to measure.
        device: ``cpu`` or ``cuda``.
        turn: the number of processes that have measured the row before. Each process creates the variants in
            another order, so that no variant always has the best place in memory.

    Returns:
        ``device``; ``samples``: each variant's milliseconds; ``distances`` from the reference; ``counts`` if
        ``turn`` is 0.

    Raises:
        BenchmarkError: there is no trustworthy result.
    """
    row = on_device(row, device)
    bench = _set_up(row, device, turn)
    start, gradient = _sampled(bench, bench.start()), _sampled(bench, bench.raw)
    times = interleaved(
        {name: bench.variants[name].step for name in row.variants},
        rounds=row.rounds,
        warmup=row.warmup,
        prepare=bench.put,
        timer=bench.timer,
        seed=turn,
    )
    part = {
        "device": bench.device,
        "samples": {name: t.samples for name, t in times.items()},
        "distances": _distances(row, bench, start, gradient),
    }
    if turn == 0:
        part["counts"] = {name: bench.count(name) for name in row.variants}
    for name in row.variants:
        if bench.variants[name].skips:
            _check_skip(row, bench, name)
    return part


def _set_up(row: Row, device: str, turn: int) -> Bench:
    # Each framework is imported only if it is measured.
    if row.framework == "torch":
        from benchmarks.steps.torch_bench import TorchBench

        return TorchBench(row, device, turn)
    from benchmarks.steps.jax_bench import JaxBench

    return JaxBench(row, device, turn)


def _distances(row: Row, bench: Bench, start: np.ndarray, gradient: np.ndarray) -> dict[str, float]:
    """Distances from the reference over some elements; variants that must agree are compared in full."""
    samples, off = {}, {}
    for name in row.variants:
        variant = bench.variants[name]
        variant.check()
        samples[name] = _sampled(bench, bench.parameters(name))
        off[name] = check_parameters(
            row,
            name,
            start=start,
            gradient=gradient,
            found=samples[name],
            norm=bench.norm,
            steps=variant.steps,
        )
    apart = {}
    for one, other in _pairs(row):
        both = zip(bench.parameters(one), bench.parameters(other), strict=True)
        square = sum(bench.square_apart(a, b) for a, b in both)
        way = math.sqrt(float(np.mean(np.square(samples[one] - start))))
        apart[one, other] = math.sqrt(square / row.parameters) / way
    check_against_each_other(row, apart)
    return off


def _sampled(bench: Bench, tensors: Sequence[Any]) -> np.ndarray:
    """Some elements of some tensors, including the first and the last, float64."""
    which = sorted({round(i) for i in np.linspace(0, len(tensors) - 1, min(_TENSORS, len(tensors)))})
    parts = []
    for i in which:
        flat = tensors[i].reshape(-1)
        each = np.unique(np.linspace(0, flat.shape[0] - 1, _ELEMENTS).astype(int))
        parts.append(bench.numbers(flat[each]))
    return np.concatenate(parts)


def _pairs(row: Row) -> list[tuple[str, str]]:
    """Pairs of each variant and the first variant that has to agree with it."""
    pairs = []
    for kind in (UNCLIPPED, CLIPPED):
        names = [name for name in row.variants if name in kind]
        pairs += [(names[0], other) for other in names[1:]]
    return pairs


def _check_skip(row: Row, bench: Bench, name: str) -> None:
    """Check that a step with one infinite gradient changes nothing."""
    before, after = bench.skip(name)
    if not all(map(np.array_equal, before, after)):
        raise WrongResultError(f"{row.name}: {name!r} did not skip a step with an infinite gradient.")
