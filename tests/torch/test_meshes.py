"""Every layout on four ranks, and every fault: all ranks decide alike, and as one process would.

One process is the NumPy reference on the gathered gradients and the mean loss; ``mesh_program.py`` compares
each step with it on the spot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from tests.selection import only

ROOT = Path(__file__).parents[2]
RANKS = 4
LAYOUTS = {
    "ddp",
    "ddp static graph",
    "ddp hook",
    "fsdp2",
    "fsdp2 uneven",
    "hsdp",
    "tp",
    "fsdp2 tp",
    "pipeline",
    "experts",
    "zero",
    "fsdp1",
    "cpu offload",
    "mixed",
}
REASONS = {
    "healthy": "OK",
    "inf on one rank": "INF_GRADIENT",
    "NaN on the last rank": "NAN_GRADIENT",
    "NaN loss on one rank": "NONFINITE_LOSS",
    "loss spike on one rank": "SPIKE_LOSS",
    "two ranks at once": "NAN_GRADIENT",
    "huge finite": "CLIPPED",
    "all zero on one rank": "OK",
    "no gradient on one rank": "OK",
    "in an uneven shard": "INF_GRADIENT",
}
SKIPPED = ("INF_GRADIENT", "NAN_GRADIENT", "NONFINITE_LOSS", "SPIKE_LOSS")


@pytest.fixture(scope="module", params=only(["host"], ["host", "device"]))
def found(request, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What the ranks found, by layout and fault; "device": on the path of accelerators, with CPU tensors."""
    store = tmp_path_factory.mktemp("meshes") / "store"
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-W", "ignore", "-m", "tests.torch.mesh_program"]
    started = [
        subprocess.Popen(
            [*program, str(rank), str(store), request.param],
            cwd=ROOT,
            env=env,
            text=True,
            stdout=PIPE,
            stderr=PIPE,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=900) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, err) in zip(started, outputs, strict=True):
        assert process.returncode == 0, err[-3000:]
    results = [json.loads(out.split("RESULT ")[1]) for out, _ in outputs]
    assert all(result == results[0] for result in results), "ranks tell different stories"
    return results[0]


def test_every_layout_was_tried_with_both_kinds_of_optimizer(found):
    assert {name.rpartition(", ")[0] for name in found} == LAYOUTS
    assert {name for name in found if name.endswith("fused")} == {
        f"{name}, fused" for name in LAYOUTS - {"mixed"}
    }


@pytest.mark.parametrize("fault", REASONS)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_all_ranks_decide_alike_and_as_one_process_would(found, layout, fault):
    for kind in ("foreach", "fused"):
        if (layout, kind) == ("mixed", "fused"):
            continue
        row = found[f"{layout}, {kind}"][fault]
        assert row["differs"] == {}
        assert row["alike"], "the ranks' records are the same"
        assert row["kept"], "a skipped step leaves parameters and optimizer state bit for bit"
        assert row["replicas"], "ranks that held the same bits still do"
        assert row["applied"] == (row["reason"] not in SKIPPED)
        if REASONS[fault] in SKIPPED:
            assert row["reason"] == REASONS[fault]
        else:
            assert row["reason"] in ("OK", "CLIPPED")


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_training_goes_on_after_each_fault(found, layout):
    for kind in ("foreach", "fused"):
        rows = found.get(f"{layout}, {kind}", {})
        assert not [name for name in rows if name.startswith("after")]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_bad_rank_is_named(found, layout):
    rows = found[f"{layout}, foreach"]
    assert rows["NaN loss on one rank"]["worst_rank"] == 2
    if layout in ("fsdp2", "fsdp2 uneven", "tp", "fsdp2 tp", "pipeline", "experts", "fsdp1", "mixed"):
        assert rows["inf on one rank"]["worst_rank"] == 1
        assert rows["two ranks at once"]["worst_rank"] == 1
        assert rows["in an uneven shard"]["worst_rank"] == 0
