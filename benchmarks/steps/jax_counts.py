"""Traffic, kernels, memory and waits of a compiled JAX step, read from the compiled program."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.steps.hlo import ordinary_step
from benchmarks.steps.jax_variants import JaxVariant

__all__ = ["count"]


def count(variant: JaxVariant) -> dict[str, Any]:
    """The counts of an ordinary step, one in which nothing goes wrong.

    Returns:
        ``gradient_reads``: passes over the incoming gradients. ``traffic``: bytes that all kernels read
        and write, relative to the bytes of the gradients. ``operations``: kernels. ``host_waits``: callbacks
        into Python, plus one if the host reads the metrics. ``temp_bytes``: memory in addition to arguments
        and results. ``peak_bytes``: these bytes plus the results that do not reuse an argument's memory.
        ``compile_s``: seconds to lower and compile, once.
    """
    row = variant.problem.row
    program = variant.compiled.as_text()
    work = ordinary_step(program, "grads[", gradient_bytes=row.gradient_bytes)
    memory = variant.compiled.memory_analysis()
    not_reused = max(0, int(memory.output_size_in_bytes) - int(memory.alias_size_in_bytes))
    callbacks = len(re.findall(r'custom_call_target="[^"]*callback', program))
    return {
        "gradient_reads": round(work.read / row.gradient_bytes, 3),
        "traffic": round(work.traffic / row.gradient_bytes, 3),
        "operations": work.kernels,
        "host_waits": callbacks + variant.reads_metrics,
        "temp_bytes": int(memory.temp_size_in_bytes),
        "peak_bytes": int(memory.temp_size_in_bytes) + not_reused,
        "compile_s": round(variant.compile_s, 2),
    }
