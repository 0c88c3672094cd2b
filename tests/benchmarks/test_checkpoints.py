"""The benchmark of checkpoints, at a small size."""

from __future__ import annotations

import math

import pytest

from benchmarks import __main__ as command
from benchmarks import checkpoints, repeats
from tests.selection import only


@pytest.mark.parametrize("format_name", only(["torch"], checkpoints.FORMATS))
def test_a_gated_checkpoint_is_compared_with_a_plain_one(format_name, monkeypatch):
    monkeypatch.setattr(repeats, "LEAST", 1)
    small = {"rounds": 3, "bound": math.inf, "shapes": ((50, 4),) * 2}
    (row,) = checkpoints.run(formats=(format_name,), **small)
    assert (row["format"], row["bytes"], row["tensors"], row["processes"]) == (format_name, 1600, 2, 1)
    assert row["ratio_to_bare"] > 0
    assert list(row["variants"]) == list(checkpoints.VARIANTS)
    for name, figures in row["variants"].items():
        assert figures["ms_per_gb"] == pytest.approx(figures["median_ms"] / 1600e-9, rel=0.1), name
    assert command._checkpoints_table(row).row_count == len(checkpoints.VARIANTS)


def test_the_uncertainty_of_a_save_decides_and_that_of_a_read_does_not():
    process = {name: object() for name in checkpoints.VARIANTS}
    assert list(checkpoints._saves(process)) == ["bare", "gated"]
