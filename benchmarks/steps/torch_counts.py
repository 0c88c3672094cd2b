"""Counts for a torch step: passes over the gradients, operations, waits, memory, graph breaks."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo.testing
import torch._inductor.config
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.steps.errors import BenchmarkError
from benchmarks.steps.torch_variants import TorchProblem, TorchVariant
from stablenum_torch._step.guard import on_device_path

__all__ = ["Counter", "count", "graph_breaks", "kernels", "launches", "peak_bytes", "seconds_to_compile"]

_WAITS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero")
_HOST_STEPS = 21  # of which the median counts
# Operations that write their target without reading it.
_FILLS = ("aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_")


class Counter(TorchDispatchMode):
    """Counts operations, and the elements of the watched tensors that they read and write.

    torch's fused optimizers are declared as writing the gradients. They do so only with a ``grad_scale``; the
    count takes this into account.

    Args:
        watched: the gradients.
        host_tensors: tensors that are on the host whatever the device is (Adam's step counts), so that
            reading them does not wait.
    """

    def __init__(self, watched: list[torch.Tensor], host_tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._total = sum(t.numel() for t in watched)
        self._watched = {t.untyped_storage().data_ptr() for t in watched}
        self._host_tensors = {t.untyped_storage().data_ptr() for t in host_tensors}
        self.read = self.written = self.operations = self.waits = 0

    @property
    def passes(self) -> tuple[float, float]:
        """Passes over all gradients: reads and writes."""
        return round(self.read / self._total, 3), round(self.written / self._total, 3)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, schema = func._schema.name, func._schema
        if name in _WAITS and not self._of(args[0], self._host_tensors):
            self.waits += 1
        # A view moves no data and launches nothing.
        if not func.is_view and name not in ("aten::detach", "aten::_local_scalar_dense"):
            self.operations += 1
            for elements, writes in self._touched(schema, args, kwargs):
                self.written += elements if writes else 0
                self.read += 0 if writes and name in _FILLS else elements
        return func(*args, **kwargs)

    def _touched(self, schema: Any, args: Any, kwargs: Any) -> list[tuple[int, bool]]:
        """(elements, whether written) for each part of the watched tensors among an operation's arguments.

        A part that is passed twice, as in ``dot(g, g)``, is read once.
        """
        given = list(zip(schema.arguments, args))
        given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        parts: dict[tuple[int, int], bool] = {}
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if argument.name == "grads" and "_fused_" in schema.name:
                writes = kwargs.get("grad_scale") is not None
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and self._of(leaf, self._watched):
                    part = (leaf.data_ptr(), leaf.numel())
                    parts[part] = parts.get(part, False) or writes
        return [(elements, writes) for (_, elements), writes in parts.items()]

    @staticmethod
    def _of(tensor: Any, storages: set[int]) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in storages


class _Reads(TorchFunctionMode):
    """Counts copies of tensors to the host that are not separate operations on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += func in (torch.Tensor.tolist, torch.Tensor.cpu)
        return func(*args, **(kwargs or {}))


def count(problem: TorchProblem, variant: TorchVariant) -> dict[str, Any]:
    """The reads and writes of the gradients and the operations in a step as it is timed, and how often the
    host would wait for an accelerator.
    """

    def one_step(reads: _Reads) -> Counter:
        problem.put(variant.steps, variant.scale)
        host_tensors = [
            s["step"] for s in variant.optimizer.state.values() if "step" in s and s["step"].is_cpu
        ]
        counter = Counter(problem.grads, host_tensors if "fused" not in problem.row.kernel else [])
        with counter, reads:
            variant.step()
        variant.steps += 1
        return counter

    counted, reads = one_step(_Reads()), _Reads()
    with on_device_path():
        waits = one_step(reads).waits + reads.waits
    reads, writes = counted.passes
    return {
        "gradient_reads": reads,
        "gradient_writes": writes,
        "operations": counted.operations,
        "host_waits": waits,
    }


def peak_bytes(problem: TorchProblem, variant: TorchVariant) -> int:
    """The peak memory that one step allocates, in bytes."""
    problem.put(variant.steps, variant.scale)
    variant.steps += 1
    if problem.device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        variant.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.empty(1)
        variant.step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    if not events:
        raise BenchmarkError("torch's profiler reported no allocation, although there was one.")
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def kernels(problem: TorchProblem, variant: TorchVariant) -> dict[str, float]:
    """What one step launches on a CUDA device, how long the device works on that, how long the host takes to
    return from the step, and how often it waits.

    ``operations`` are the launches: a dispatch mode, by which they are counted on a CPU, would keep the
    guard's decision from being compiled.
    """
    problem.put(variant.steps, variant.scale)
    variant.steps += 1
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        variant.step()
        torch.cuda.synchronize()
    launched, copied = launches(profiler.events())
    device_ms = sum(event.time_range.elapsed_us() for event in _on_device(profiler.events())) / 1e3
    host = []
    for _ in range(_HOST_STEPS):
        problem.put(variant.steps, variant.scale)
        variant.steps += 1
        torch.cuda.synchronize()
        begin = time.perf_counter()
        variant.step()
        host.append(time.perf_counter() - begin)
    problem.put(variant.steps, variant.scale)
    variant.steps += 1
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            variant.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing CUDA operation" in str(w.message) for w in caught)
    return {
        "kernels": launched,
        "copies": copied,
        "operations": launched + copied,
        "device_ms": device_ms,
        "host_ms": 1e3 * statistics.median(host),
        "host_waits": waits,
    }


def launches(events: Iterable[Any]) -> tuple[int, int]:
    """The number of kernels, and of copies and fills, among a profiler's events.

    The spans of ``record_function``, which every ``Optimizer.step`` has, are listed under the device too but
    are not launches.
    """
    names = [event.name for event in _on_device(events)]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return len(names) - copies, copies


def _on_device(events: Iterable[Any]) -> list[Any]:
    cuda = torch.autograd.DeviceType.CUDA
    return [e for e in events if e.device_type == cuda and not e.is_user_annotation]


def graph_breaks(step: Callable[[], object]) -> dict[str, int]:
    """The number of graph breaks under ``torch.compile`` in one step, and the number of graphs."""
    counted = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(step, backend=counted)()
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    return {"graph_breaks": int(breaks), "graphs": int(counted.frame_count)}


def seconds_to_compile(step: Callable[[], object]) -> float:
    """The seconds of the first call of ``torch.compile(step)``, without any compilation cache."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder, torch._inductor.config.patch(force_disable_caches=True):
        before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.compile(step)()
            return time.perf_counter() - start
        finally:
            if before is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
            torch._dynamo.reset()
