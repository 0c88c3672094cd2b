"""Run the guard's kernels under Triton's interpreter beside the core, and tell how many steps were the same.

``TRITON_INTERPRET=1 python -m tests.kernels.interpreted STEPS``
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import torch

import stablenum_torch._devices.kernels.launches as launches
from stablenum import GuardConfig
from stablenum_torch._devices.kernels.gradient_table import GradientTable
from tests.torch.test_kernels import PRINTED, SETTINGS, compare


def compare_squares() -> int:
    """Compare sums of squares in three formats with those of torch; return the number of gradients."""
    draw = torch.Generator().manual_seed(0)
    grads = [
        torch.randn(n, generator=draw).to(f)
        for n in (0, 1, 100, 4096, 70_001)
        for f in (torch.float32, torch.float16, torch.bfloat16)
    ]
    table = GradientTable(torch.device("cpu"))
    assert table.follow([None, *grads])
    launches.squares_kernel()(table.pieces, table.addresses, table.table, table.squares)
    for i, grad in enumerate(grads, 1):
        own = table.squares[table.first[i] : table.first[i] + table.count[i]]
        torch.testing.assert_close(own.sum(), grad.double().square().sum(), rtol=1e-13, atol=0)
    return len(grads)


def main(steps: int) -> None:
    """Take this many steps of all settings together."""
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    np.seterr(all="ignore")
    sys.stdout.write(f"{compare_squares()} gradients\n")
    each, taken = steps // len(PRINTED) + 1, 0
    for i, name in enumerate(PRINTED):
        compare(GuardConfig(**SETTINGS[name]), 3, each, ranks=2 if i % 4 == 3 else 0, seed=i)
        taken += each
    sys.stdout.write(f"{taken} steps\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
