"""Every function and loss once under torch.compile with its default backend, which writes C++ on a CPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stablenum_torch.losses as torch_losses
import stablenum_torch.numerics as torch_numerics
from tests.losses.examples import EXAMPLES, LOGITS, OTHER

COMPILERS = [c for c in (os.environ.get("CXX"), "g++", "clang++", "c++") if c and shutil.which(c)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMPILERS, reason="no C++ compiler, which inductor needs"),
]
EXTRA = {"power": (1.5,), "soft_cap": (3.0,)}
TWO = {"arctan2", "divide", "logaddexp", "logsubexp", "xlogy"}


@pytest.mark.parametrize("names", [torch_numerics.__all__[i::4] for i in range(4)], ids=lambda n: n[0])
def test_the_functions(names: list[str]) -> None:
    rng = np.random.default_rng(0)
    x, y = (
        torch.tensor(rng.uniform(*ends, (3, 4)), dtype=torch.float32) for ends in ((0.2, 0.8), (0.01, 0.1))
    )

    def all_of_them(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        functions = [getattr(torch_numerics, n) for n in names]
        given = [((x, y) if n in TWO else (x,)) + EXTRA.get(n, ()) for n in names]
        return [f(*arguments) for f, arguments in zip(functions, given, strict=True)]

    _compare(all_of_them, [x, y], names)


NAMES = [*EXAMPLES, "cosine_similarity"]


@pytest.mark.parametrize("names", [NAMES[i::4] for i in range(4)], ids=lambda n: n[0])
def test_the_losses(names: list[str]) -> None:
    calls = []
    for name in names:
        arrays, options, _ = EXAMPLES.get(name, ([LOGITS, OTHER], {}, (0,)))
        options = {"dim" if k == "axis" else k: v for k, v in options.items()}
        tensors = [torch.tensor(a, dtype=torch.float32 if a.dtype.kind == "f" else None) for a in arrays]
        calls.append((getattr(torch_losses, name.split()[0]), tensors, options))

    def all_of_them(*first: torch.Tensor) -> list[torch.Tensor]:
        return [f(x, *rest[1:], **options) for x, (f, rest, options) in zip(first, calls, strict=True)]

    _compare(all_of_them, [tensors[0] for _, tensors, _ in calls], names)


def _compare(function: Callable[..., list[torch.Tensor]], given: list[Any], names: list[str]) -> None:
    torch.compiler.reset()
    results = []
    for run in (function, torch.compile(function, fullgraph=True, dynamic=False)):
        leaves = [x.clone().requires_grad_() for x in given]
        values = run(*leaves)
        slopes = torch.autograd.grad(sum(v.sum() for v in values), leaves, allow_unused=True)
        results.append((values, [s for s in slopes if s is not None]))
    (values, slopes), (compiled, compiled_slopes) = results
    for name, value, other in zip(names, values, compiled, strict=True):
        torch.testing.assert_close(other, value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(compiled_slopes, slopes, rtol=1e-4, atol=1e-5)
