"""PyTorch: ranks are processes on CPUs connected by gloo; ``python -m benchmarks.ranks.torch_ranks``.

The peer does by hand what training loops do: the norm of the shard, a sum of squares over the ranks, a
maximum over the ranks of "something is not finite", and a clip.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stablenum_torch
from benchmarks.launching import said_by_the_first
from benchmarks.steps.reference import CLIP_AT, FACTORS, check_clipped_alike, check_decided
from benchmarks.timing import interleaved

__all__ = ["NAMES", "SHAPES", "measure"]

SHAPES = [(9260,)] * 108  # 1.0 M
NAMES = ("bare", "norm, finiteness and clip by hand", "stablenum")
_PATIENCE_S = 600


class _Counted:
    """Counts the calls of ``dist.all_reduce`` and their bytes."""

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


def measure(world: int, rounds: int, turn: int = 0) -> dict[str, Any]:
    """``samples`` and ``counts`` of each variant, as measured by the first of ``world`` ranks.

    Raises:
        BenchmarkError: a rank failed, computed a wrong result, or did not end.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ranks.torch_ranks"]
        command += [str(world), str(Path(folder) / "meeting"), str(rounds), str(turn)]
        found: dict[str, Any] = said_by_the_first(
            command,
            world,
            all_of_them=f"the {world} ranks",
            one_of_them=f"a rank of {world}",
            patience=_PATIENCE_S,
        )
    return found


class _Ranks:
    """This rank's variants: parameters and steps by name, all on the same gradients."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._grads = [torch.randn(shape, generator=generator) * 1e-2 for shape in SHAPES]
        self.params = {name: [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES] for name in NAMES}
        self._steps = dict.fromkeys(NAMES, 0)
        for params in self.params.values():
            for p, g in zip(params, self._grads, strict=True):
                p.grad = torch.empty_like(g)
        square = torch.stack([g.double().square().sum() for g in self._grads]).sum()
        dist.all_reduce(square)
        self._norm = math.sqrt(square)
        bare, self._clipped, inner = (torch.optim.AdamW(p, lr=1e-2, fused=True) for p in self.params.values())
        self.guarded = stablenum_torch.wrap(inner, clip=CLIP_AT * self._norm, process_group=dist.group.WORLD)
        self.steps = dict(zip(NAMES, (bare.step, self._by_hand, self.guarded.step), strict=True))

    def put(self, name: str) -> None:
        """Write the variant's gradients, and wait for the other ranks."""
        factor = FACTORS[self._steps[name] % len(FACTORS)]
        self._steps[name] += 1
        for p, g in zip(self.params[name], self._grads, strict=True):
            torch.mul(g, factor, out=p.grad)
        dist.barrier()

    def check(self) -> None:
        """Check the computed parameters, and that clipping used the norm over all ranks.

        Raises:
            WrongResultError: a variant did not compute what its name says.
        """
        ways = [torch.cat([p.detach() for p in self.params[name]]).numpy() - 1 for name in NAMES]
        check_clipped_alike("ranks", *ways)
        steps = self._steps["stablenum"]
        check_decided("ranks", self.guarded.last, norm=self._norm, steps=steps, clipped=True, scale=1.0)

    def _by_hand(self) -> None:
        params = self.params[NAMES[1]]
        square = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]).square()
        bad = (~torch.isfinite(square)).float()
        dist.all_reduce(square)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bad:
            torch.nn.utils.clip_grads_with_norm_(params, CLIP_AT * self._norm, square.sqrt())
            self._clipped.step()


def _rank(world: int, meeting: str, rounds: int, turn: int, rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    try:
        ranks, counts = _Ranks(), {}
        for name, step in ranks.steps.items():
            ranks.put(name)
            with _Counted() as counted:
                step()
            counts[name] = {"collectives": counted.calls, "bytes": counted.bytes}
        times = interleaved(ranks.steps, rounds=rounds, prepare=ranks.put, seed=turn)
        ranks.check()
    finally:
        dist.destroy_process_group()
    return {"samples": {name: t.samples for name, t in times.items()}, "counts": counts}


if __name__ == "__main__":
    measured = _rank(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
    print(json.dumps(measured))
