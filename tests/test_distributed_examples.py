"""The programs in ``examples/distributed`` run under torchrun, and skip the step that their page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "distributed"
PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")

# The number of ranks, and what rank 0 prints first.
EXPECTED = {
    "fsdp2_tp.py": (4, "step 25: NONFINITE_LOSS, first on rank 2, 0.weight"),
    "pipeline.py": (2, "step 25: INF_GRADIENT, first on rank 1, 2.weight"),
}


def test_every_program_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_page_shows_the_command_and_what_it_prints(name):
    ranks, first = EXPECTED[name]
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    command = f"torchrun --nproc-per-node {ranks} examples/distributed/{name}\n"
    assert f"    {command}" in text
    assert f"$ {command}{first}\n1 of 40 steps skipped" in PAGE


@pytest.mark.slow(reason="starts processes of several ranks")
@pytest.mark.parametrize("name", EXPECTED)
def test_a_program_skips_its_bad_step_and_names_the_rank(name):
    ranks, first = EXPECTED[name]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [*torchrun, str(EXAMPLES / name)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == first
    assert re.fullmatch(r"1 of 40 steps skipped; the last loss is [01]\.\d\d", lines[1])
    assert len(lines) == 2
