"""The benchmark of ranks at a small size: one collective a step."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import repeats
from benchmarks.ranks import jax_devices, jax_ranks, run, torch_ranks
from benchmarks.steps.errors import BenchmarkError, NoisyError


@pytest.fixture(autouse=True)
def two_processes(monkeypatch):
    monkeypatch.setattr(repeats, "LEAST", 2)
    monkeypatch.setattr(repeats, "MOST", 3)
    monkeypatch.setattr(repeats, "PAUSE_S", 0.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


# Real measurements that test the benchmark; tests/torch/test_ranks.py tests the library.
MEASURES = pytest.mark.slow(reason="starts processes of several ranks")


@MEASURES
def test_two_ranks_join_their_norms_in_one_collective():
    (row,) = run.run(worlds=(2,), rounds=4, bound=math.inf, frameworks=("torch",))
    assert (row["framework"], row["ranks"], row["processes"]) == ("torch", 2, 2)
    counts = {name: (v["collectives"], v["bytes"]) for name, v in row["variants"].items()}
    # Four float32 numbers from each rank.
    assert counts["stablenum"] == (1, 16 * 2)
    assert counts["bare"] == (0, 0)
    assert counts["norm, finiteness and clip by hand"] == (2, 8)


@MEASURES
def test_two_devices_join_their_norms_in_one_collective():
    (row,) = run.run(worlds=(2,), rounds=4, bound=math.inf, frameworks=("jax",))
    counts = {name: v["collectives"] for name, v in row["variants"].items()}
    assert counts["bare"] == 0
    assert counts["stablenum"] == 1
    # Four bytes a tensor.
    assert row["variants"]["stablenum"]["bytes"] == 4 * jax_devices.TENSORS
    assert counts["apply_if_finite + clip"] >= 2


@MEASURES
def test_a_guard_that_decides_by_its_own_shard_is_detected(tmp_path):
    """Without the process group, each rank uses its own shard's norm; Adam's parameters do not show this."""
    program = tmp_path / "alone.py"
    program.write_text(
        "import sys, stablenum_torch\n"
        "from benchmarks.ranks import torch_ranks\n"
        "wrap = stablenum_torch.wrap\n"
        "stablenum_torch.wrap = lambda inner, clip, process_group: wrap(inner, clip=clip)\n"
        "torch_ranks._rank(2, sys.argv[1], 4, 0, int(sys.argv[2]))\n"
    )
    command = [sys.executable, str(program), str(tmp_path / "meeting")]
    started = [
        subprocess.Popen(
            [*command, rank],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for rank in "01"
    ]
    said = [process.communicate(timeout=120)[1] for process in started]
    assert "WrongResultError: ranks: expected all" in said[0], said


def test_figures_are_of_all_processes(monkeypatch):
    def measured(world, rounds, turn):
        clip = [2.0, 2.2][turn]
        samples = {"bare": [1.0, 2.0, 3.0], "stablenum": [clip, 2 * clip, 3 * clip]}
        return {"samples": samples, "counts": {name: {"collectives": turn} for name in samples}}

    monkeypatch.setattr(run, "MEASURE", {"torch": measured})
    (row,) = run.run(worlds=(2,), bound=1.0, frameworks=("torch",))
    ours = row["variants"]["stablenum"]
    assert ours["ratio_to_bare"] == 2.1
    assert ours["uncertainty"] == pytest.approx(12.706 * 0.1 / 2.1, abs=1e-4)
    assert ours["collectives"] == 0, "counted in the first"


def test_an_uncertainty_beyond_the_bound_is_no_result(monkeypatch):
    asked = []

    def moody(world, rounds, turn):
        asked.append((world, rounds, turn))
        return {"samples": {"bare": [1.0] * 4, "stablenum": [1.0 + turn] * 4}, "counts": {}}

    monkeypatch.setattr(run, "MEASURE", {"torch": moody})
    with pytest.raises(NoisyError, match=r"torch, 2 ranks: after 3 processes .* above 15%"):
        run.run(worlds=(2,), rounds=10, frameworks=("torch",))
    assert asked == [(2, 10, 0), (2, 10, 1), (2, 10, 2)]


@pytest.mark.parametrize("measure", [torch_ranks.measure, jax_ranks.measure])
def test_a_rank_that_fails_is_an_error(monkeypatch, measure):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BenchmarkError, match="failed"):
        measure(1, 4)
