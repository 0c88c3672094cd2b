"""The example of the page: log-probabilities of a trainer beside those of an engine that dumps arrays."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import stablenum

EXAMPLE = Path(__file__).parents[2] / "examples" / "numerics" / "logprobs.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("logprobs_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def report_of(example: ModuleType, fault: str, folder: Path) -> stablenum.DiffReport:
    np.savez(folder / "engine.npz", **example.engine(fault))
    return stablenum.diff(stablenum.load_program(folder / "engine.npz"), example.program())


def added(report: stablenum.DiffReport) -> dict[str, float]:
    """How much each array adds to the gap of the log-probabilities."""
    rows = (n.split("; adds ") for n in report.notes if "; adds " in n)
    return {first.partition(": ")[0]: float(rest.split(" ")[0]) for first, rest in rows}


def test_an_engine_that_computes_the_same_agrees(example: ModuleType, tmp_path: Path) -> None:
    assert report_of(example, "", tmp_path).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "first", "most"),
    [
        ("rope", "0.queries", "1.queries"),
        ("temperature", "logprobs", "logprobs"),
        ("layer", "1.stream", "1.stream"),
        ("raw", "logprobs", "logprobs"),
    ],
)
def test_the_first_array_that_differs_and_what_adds_most_are_named(
    example: ModuleType, fault: str, first: str, most: str, tmp_path: Path
) -> None:
    report = report_of(example, fault, tmp_path)
    assert report.first.result == first
    gaps = added(report)
    assert set(gaps) == set(example.engine(fault))  # every array has its part
    assert max(gaps, key=gaps.__getitem__) == most
    whole = example.engine(fault)["logprobs"]
    fine = example.engine()["logprobs"]
    gap = np.abs(whole - fine).max() / np.abs(fine).max()
    assert sum(gaps.values()) == pytest.approx(gap, rel=0.1)  # the parts are the whole
