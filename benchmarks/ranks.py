"""What a guarded step costs as ranks are added: PyTorch on CPUs over gloo, every rank with its own shard.

Weak scaling: each rank holds one million parameters in 108 tensors, as ZeRO shards them, so that the bare
step costs the same whatever the number of ranks, and what is added is the price of deciding together. The
peer does what trainers do by hand: the norm of the shard, a sum of it over the ranks, a maximum over the
ranks of "something is not finite", and a clip.

Collectives and their bytes are counted, not derived. No more ranks than cores: others would wait for one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stablenum_torch
from benchmarks.steps.errors import BenchmarkError, NoisyError, WrongResultError
from benchmarks.timing import Times, interleaved, uncertainty

__all__ = ["run"]

SHAPES = [(9260,)] * 108  # 1.0 M
WORLDS = (1, 2, 4, 8)
ROUNDS = 100
ATTEMPTS = 3
# The largest uncertainty of a ratio to the bare step; ranks wait for each other, which is restless by nature.
BOUND = 0.15
MAX_NORM = 1.0
NAMES = ("bare", "norm, finiteness and clip by hand", "stablenum")


class _Counted:
    """Counts what goes through ``dist.all_reduce``."""

    def __init__(self) -> None:
        self.calls, self.bytes, self._plain = 0, 0, dist.all_reduce

    def __enter__(self) -> _Counted:
        def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.bytes += tensor.numel() * tensor.element_size()
            return self._plain(tensor, *args, **kwargs)

        dist.all_reduce = counting
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._plain


def _variants() -> tuple[dict[str, Callable[[], object]], dict[str, list[torch.nn.Parameter]]]:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    grads = [torch.randn(shape, generator=generator) * 1e-2 for shape in SHAPES]
    params: dict[str, list[torch.nn.Parameter]] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name in NAMES:
        params[name] = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizers[name] = torch.optim.AdamW(params[name], lr=1e-4, fused=True)

        def put(chosen: list[torch.nn.Parameter] = params[name]) -> None:
            for p, g in zip(chosen, grads, strict=True):
                p.grad = g.clone() if p.grad is None else p.grad.copy_(g)

        put()
    guarded = stablenum_torch.wrap(optimizers["stablenum"], clip=MAX_NORM, process_group=dist.group.WORLD)

    def by_hand() -> None:
        mine = params[NAMES[1]]
        square = torch.nn.utils.get_total_norm([p.grad for p in mine if p.grad is not None]).square()
        bad = (~torch.isfinite(square)).float()
        dist.all_reduce(square)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bad:
            torch.nn.utils.clip_grads_with_norm_(mine, MAX_NORM, square.sqrt())
            optimizers[NAMES[1]].step()

    return {NAMES[0]: optimizers["bare"].step, NAMES[1]: by_hand, NAMES[2]: guarded.step}, params


def _rank(rank: int, world: int, meeting: str, rounds: int) -> dict[str, Any] | None:
    """One rank; the first returns what was measured."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    try:
        steps, params = _variants()
        counts = {}
        for name, step in steps.items():
            with _Counted() as counted:
                step()
            counts[name] = {"collectives": counted.calls, "bytes": counted.bytes}
        for ours, theirs in zip(params["stablenum"], params[NAMES[1]], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        if not (params["stablenum"][0] != 1).all():
            raise WrongResultError("ranks: the guarded step moved nothing")
        times = interleaved(steps, rounds=rounds, prepare=lambda _: dist.barrier())
    finally:
        dist.destroy_process_group()
    return _row(world, times, counts) if rank == 0 else None


def _row(world: int, times: dict[str, Times], counts: dict[str, Any]) -> dict[str, Any]:
    bare, by_hand = times["bare"].median, times[NAMES[1]].median
    return {
        "ranks": world,
        "uncertainty_bound": BOUND,
        "times": {
            name: t.as_dict() | {"uncertainty": round(uncertainty(t.ratios_to(times["bare"])), 4)}
            for name, t in times.items()
        },
        "extra ms": round(times["stablenum"].median - bare, 4),
        "extra over that by hand": round((times["stablenum"].median - bare) / (by_hand - bare), 3),
        "of one step": counts,
    }


def run(
    worlds: tuple[int, ...] | None = None, rounds: int = ROUNDS, bound: float = BOUND
) -> list[dict[str, Any]]:
    """One row a number of ranks, by default up to the number of cores.

    Raises:
        BenchmarkError: a rank failed, or the ratios are uncertain beyond ``bound`` in every attempt.
    """
    chosen = worlds or tuple(world for world in WORLDS if world <= (os.cpu_count() or 1))
    return [_quiet_enough(world, rounds, bound) for world in chosen]


def _quiet_enough(world: int, rounds: int, bound: float) -> dict[str, Any]:
    for attempt in range(1, ATTEMPTS + 1):
        row = _one_world(world, rounds * attempt)
        worst = max(time["uncertainty"] for time in row["times"].values())
        if worst <= bound:
            return row
    raise NoisyError(
        f"{world} ranks: an uncertainty of {worst:.0%} is beyond {bound:.0%}. The machine is too busy."
    )


def _one_world(world: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ranks"]
        started = [
            subprocess.Popen(
                [*command, str(rank), str(world), meeting, str(rounds)], stdout=subprocess.PIPE, text=True
            )
            for rank in range(world)
        ]
        try:
            said = [process.communicate(timeout=600)[0] for process in started]
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(
                f"the {world} ranks did not end within {error.timeout:.0f} seconds"
            ) from error
        finally:
            for process in started:
                process.kill()
                process.wait()
        if any(process.returncode for process in started):
            raise BenchmarkError(f"a rank of {world} failed; its error is above")
    row: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return row


if __name__ == "__main__":
    measured = _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    if measured is not None:
        print(json.dumps(measured))
