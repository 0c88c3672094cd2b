"""What a compiled JAX step does, read from the compiled program: memory traffic, kernels, memory, waits."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.steps.jax_variants import JaxVariant

__all__ = ["count", "kernels_in"]

# Name things, hand them on or call others: no kernel of their own.
_NOT_KERNELS = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "call",
    "conditional",
    "while",
    "after-all",
    "partition-id",
    "replica-id",
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (?:\([^=]*?\)|\S+) ([\w\-]+)\(")
_CALLED = re.compile(
    r"(?:to_apply|body|condition|true_computation|false_computation|branch_computations)=\{?([^,}\n]+(?:, ?%[^,}\n]+)*)"
)


def kernels_in(hlo: str) -> int:
    """Instructions of an optimized program that are carried out by themselves: a fusion counts as one.

    What is inside fusions, and the functions that reductions apply, is not counted; of a ``conditional`` all
    branches are, since which one runs is not known.
    """
    computations: dict[str, list[str]] = {}
    entry, now = "", ""
    for line in hlo.splitlines():
        begin = _COMPUTATION.match(line)
        if begin:
            now = begin.group(1)
            computations[now] = []
            entry = now if line.startswith("ENTRY") else entry
        elif now and _INSTRUCTION.match(line):
            computations[now].append(line)
    seen: set[str] = set()

    def kernels(name: str) -> int:
        if name in seen or name not in computations:
            return 0
        seen.add(name)
        total = 0
        for line in computations[name]:
            found = _INSTRUCTION.match(line)
            kind = "" if found is None else found.group(1)
            if kind in ("call", "conditional", "while"):
                called = [c for group in _CALLED.findall(line) for c in re.split(r"[ ,%]+", group) if c]
                total += sum(kernels(c) for c in called)
            elif kind not in _NOT_KERNELS:
                total += 1
        return total

    return kernels(entry)


def count(variant: JaxVariant) -> dict[str, Any]:
    """Traffic in passes over the gradients (all arrays together), kernels, host calls, peak bytes, seconds to
    compile.

    ``traffic`` is XLA's own estimate of the bytes accessed over the bytes of the gradients: a bare AdamW step
    has 7, reading gradients, parameters and two moments and writing all but the first.
    """
    cost = variant.compiled.cost_analysis()
    memory = variant.compiled.memory_analysis()
    program = variant.compiled.as_text()
    not_reused = max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    return {
        "traffic": round(float(cost["bytes accessed"]) / variant.problem.row.gradient_bytes, 3),
        "operations": kernels_in(program),
        "host_waits": len(re.findall(r'custom_call_target="[^"]*callback', program)),
        "temp_bytes": int(memory.temp_size_in_bytes),
        "peak_bytes": int(memory.temp_size_in_bytes) + int(not_reused),
        "compile_s": round(variant.compile_s, 2),
    }
