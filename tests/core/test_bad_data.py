"""Data that was bad before the step: its columns, and the line that made it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from stablenum.diagnosis import Finding, TensorStats
from stablenum.diagnosis.replay.bad_data import nan_columns, with_maker
from stablenum.diagnosis.replay.judge import Evidence, judge
from tests.jax.replaying import marked_line

NAN = np.nan


@pytest.mark.parametrize(
    ("x", "columns"),
    [
        ([[1.0, NAN], [2.0, NAN]], (1,)),
        ([[NAN, 1.0, NAN], [NAN, 2.0, NAN]], (0, 2)),
        ([[1.0, NAN], [NAN, 2.0]], ()),
        ([[1.0, NAN], [2.0, 3.0]], ()),
        ([[NAN, NAN], [NAN, NAN]], ()),
        ([1.0, NAN], ()),
        ([[[1.0, NAN]], [[2.0, NAN]]], (1,)),
    ],
)
def test_the_columns_that_are_nan_in_every_row(x: list, columns: tuple[int, ...]) -> None:
    assert nan_columns(np.asarray(x)) == columns


def finding_for(batch: np.ndarray) -> Finding:
    stats = TensorStats(
        dtype="float64", shape=batch.shape, size=batch.size, nan=int(np.isnan(batch).sum()),
        nan_columns=nan_columns(batch),
    )  # fmt: skip
    return Finding(operation="input", phase="before", kind="nan", name="args[1]", outputs=(stats,))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_the_line_that_standardised_a_constant_column_is_named() -> None:
    x = np.asarray([[1.0, 2.0], [3.0, 2.0], [5.0, 2.0]])
    std = x.std(0)
    x = (x - x.mean(0)) / std  # BAD
    batch = x[1:]
    found = with_maker(finding_for(batch), sys._getframe())
    assert found.place is not None
    test = test_the_line_that_standardised_a_constant_column_is_named
    assert (found.place.line, found.name) == (marked_line(test), "x (args[1])")
    verdict = judge(Evidence(framework="jax", findings=(found,)))
    assert verdict.cause.value == "batch"
    assert "column 1 is NaN in every row, and no other is" in verdict.evidence
    assert "np.where(std == 0, 1, std)" in verdict.remedy


def test_an_array_that_is_written_in_place_is_named_where_it_was_written() -> None:
    x = np.ones((4, 3))
    x[:, 2] /= np.asarray(NAN)  # BAD
    found = with_maker(finding_for(x[:2]), sys._getframe())
    assert found.place is not None
    test = test_an_array_that_is_written_in_place_is_named_where_it_was_written
    assert found.place.line == marked_line(test)


def test_the_place_stays_if_no_variable_holds_such_columns() -> None:
    other = np.asarray([[NAN, 1.0], [NAN, 2.0], [NAN, 3.0]])
    finding = finding_for(other[:, ::-1])
    del other
    assert with_maker(finding, sys._getframe()) is finding
