"""The guard's kernels with Triton: under its interpreter, and compiled ahead for GPUs that are not here.

``make test-kernels`` installs Triton, a gigabyte that no other test needs, and runs this folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stablenum_torch._devices.kernels.launches as launches
from stablenum import GuardConfig
from stablenum_torch._devices.kernels.printed_decide import Kinds, printed_decide
from stablenum_torch._devices.kernels.squares_source import BLOCK, SOURCE
from tests.torch.test_kernels import FORMATS_OF_ARGUMENTS, PRINTED, SETTINGS

pytest.importorskip("triton", reason="make test-kernels installs Triton")

ROOT = Path(__file__).parents[2]
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.bool: "*i1", int: "i32",
}  # fmt: skip
SIGNATURE = {name: POINTERS[kind] for name, kind in FORMATS_OF_ARGUMENTS.items()}


@pytest.mark.timeout(1800)
def test_a_thousand_steps_under_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.kernels.interpreted", "1000"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"15 gradients\n\d{4} steps\n", done.stdout)


def compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], target: str, **options: Any
) -> str:
    """Return the assembly of a kernel for a target."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_ahead

    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    found = compile_ahead(source, target=GPUTarget(*TARGETS[target]), options=options)
    return str(found.asm.get("ptx") or found.asm["amdgcn"])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("name", PRINTED)
def test_a_decision_compiles_ahead_and_rounds_each_operation(name: str, ranks: int, target: str) -> None:
    config = GuardConfig(**SETTINGS[name])
    measured = config.needs | (set() if ranks else {"loss", "found_inf"})
    kinds = Kinds(config, 5, False, frozenset(measured), ranks)
    kernel = launches.made(printed_decide(kinds), "decided")
    text = compiled(kernel, dict(SIGNATURE), {}, target, num_warps=4, enable_fp_fusion=False)
    if target == "gfx942":  # where a quotient to nearest is itself a sequence of fused operations
        return
    assert not re.search(r"\bfma\.rn(\.ftz)?\.f32|\bmad\.f32", text)
    assert not re.search(r"(div|sqrt|rcp)\.approx|div\.full", text)
    assert not re.search(r"(add|sub|mul|div|sqrt)(\.rn)?\.ftz", text)


@pytest.mark.parametrize("target", TARGETS)
def test_the_measuring_kernel_compiles_ahead(target: str) -> None:
    kernel = launches.made(SOURCE, "squared")
    signature = {"addresses": "*i64", "table": "*i64", "squares": "*fp64", "BLOCK": "constexpr"}
    text = compiled(kernel, signature, {"BLOCK": BLOCK}, target, num_warps=8, enable_fp_fusion=True)
    if target != "gfx942":
        assert "ld.global.v4.b32" in text  # several elements at once
