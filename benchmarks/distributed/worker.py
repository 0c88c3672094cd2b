"""One rank: ``python -m benchmarks.distributed.worker WORLD MEETING ROUNDS TURN LAYERS WIDTH RANK``."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import stablenum_torch
from benchmarks.steps.errors import WrongResultError
from benchmarks.steps.reference import CLIP_AT, FACTORS, check_clipped_alike, check_decided
from benchmarks.timing import interleaved

__all__ = ["BARE_BESIDE_EXACT", "BY_HAND", "EXACT", "LAYOUTS", "OURS", "TITAN"]

LAYOUTS = ("fsdp2", "ddp")
BY_HAND, TITAN = "clip_grad_norm_ and a check of the loss", "torchtitan's, and a check of the loss"
OURS, EXACT = "stablenum", "stablenum, exact norms"
# Exact norms take so much longer that they are measured by themselves, in fewer rounds.
BARE_BESIDE_EXACT, FEWER = "bare, beside exact norms", 8
Norm = Callable[[list[Tensor], float], Tensor]


def torch_norm(params: list[Tensor], limit: float) -> Tensor:
    """Clip as torch does, and return the norm over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(params, limit)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def titan_norm() -> Norm | None:
    """torchtitan's clipping; None if torchtitan is not installed."""
    if importlib.util.find_spec("torchtitan") is None:
        return None
    from torchtitan.distributed.utils import clip_grad_norm_

    return lambda params, limit: clip_grad_norm_(params, limit)


class Counted(TorchDispatchMode):
    """Counts collectives and the bytes that they reduce, of DTensors too."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # DTensor calls the operations on its parts
        if func.namespace in ("c10d", "_c10d_functional") and "reduce" in func.name():
            self.collectives += 1
            sent = args[0] if isinstance(args[0], Sequence) else [args[0]]
            self.bytes += sum(t.numel() * t.element_size() for t in sent)
        return func(*args, **(kwargs or {}))


class Variant:
    """A model and its step, from gradients that are in place.

    Args:
        layout: "fsdp2" or "ddp".
        layers, width: of the model.
        make: returns the optimizer and the step, from the wrapped model.
    """

    def __init__(self, layout: str, layers: int, width: int, make: Callable[[nn.Module], Any]) -> None:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if layout == "fsdp2":
            fully_shard(model, mesh=self._mesh)
        else:
            model = DistributedDataParallel(model)
        self.params: list[Any] = list(model.parameters())
        generator = torch.Generator().manual_seed(1)
        whole = [torch.randn(p.shape, generator=generator) * 1e-2 for p in self.params]
        self.norm = math.sqrt(sum(float(g.double().square().sum()) for g in whole))
        self._grads = [self._like(p, g) for p, g in zip(self.params, whole, strict=True)]
        self._start = self._flat()
        for p, g in zip(self.params, self._grads, strict=True):
            p.grad = g.clone()
        self.steps = 0
        self.optimizer, self.step = make(model)

    def _like(self, p: Any, whole: Tensor) -> Tensor:
        return distribute_tensor(whole, self._mesh, p.placements) if hasattr(p, "placements") else whole

    def _flat(self) -> np.ndarray:
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in self.params]
        return torch.cat([part.detach().flatten() for part in parts]).double().numpy()

    def put(self) -> None:
        """Write the gradients of the next step, and wait for the other ranks."""
        factor = FACTORS[self.steps % len(FACTORS)]
        self.steps += 1
        for p, g in zip(self.params, self._grads, strict=True):
            torch.mul(g, factor, out=p.grad) if not hasattr(g, "to_local") else torch.mul(
                g.to_local(), factor, out=p.grad.to_local()
            )
        dist.barrier()

    def moved(self) -> np.ndarray:
        """How far this rank's parameters have moved."""
        return self._flat() - self._start


def loss_now() -> Tensor:
    """This rank's loss."""
    return torch.tensor(1.0 + dist.get_rank())


def bare(model: nn.Module) -> tuple[Any, Callable[[Tensor], None]]:
    """The optimizer's step alone."""
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return inner, lambda loss: inner.step()


def by_hand(norm_of: Norm, limit: float, model: nn.Module) -> tuple[Any, Callable[[Tensor], None]]:
    """Clip, ask all ranks whether a loss or the norm is not finite, and step if none is."""
    params = list(model.parameters())
    inner = torch.optim.AdamW(params, lr=1e-2, fused=True)

    def step(loss: Tensor) -> None:
        norm = norm_of(params, limit)
        bad = (~torch.isfinite(loss)).float()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if not bad and torch.isfinite(norm):
            inner.step()

    return inner, step


def guarded(exact: bool, limit: float, model: nn.Module) -> tuple[Any, Callable[[Tensor], None]]:
    """The guard, which does both."""
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    opt = stablenum_torch.wrap(inner, clip=limit, exact_norms=exact, names=model)

    def step(loss: Tensor) -> None:
        opt.scale(loss)
        opt.step()

    return opt, step


def variants(layout: str, layers: int, width: int) -> dict[str, Variant]:
    """All variants of a layout, each with its own model."""
    made = {"bare": Variant(layout, layers, width, bare)}
    limit = CLIP_AT * made["bare"].norm
    ways: dict[str, Callable[[nn.Module], Any]] = {BY_HAND: functools.partial(by_hand, torch_norm, limit)}
    titan = titan_norm()
    if titan is not None:
        ways[TITAN] = functools.partial(by_hand, titan, limit)
    ways |= {name: functools.partial(guarded, name == EXACT, limit) for name in (OURS, EXACT)}
    return made | {name: Variant(layout, layers, width, make) for name, make in ways.items()}


def check_moved(layout: str, made: dict[str, Variant]) -> None:
    """Check that all variants that clip moved the parameters alike, after equal numbers of steps.

    Raises:
        WrongResultError: one did not.
    """
    moved = {name: variant.moved() for name, variant in made.items() if name != EXACT}
    for name in moved:
        if name not in ("bare", BY_HAND):
            check_clipped_alike(f"{layout}, {name}", moved["bare"], moved[BY_HAND], moved[name])


def check_decisions(layout: str, made: dict[str, Variant]) -> None:
    """Check what the guards report, and that all but the bare step skip a bad loss of the last rank.

    Raises:
        WrongResultError: one did not.
    """
    for name in (OURS, EXACT):
        variant = made[name]
        last = variant.optimizer.last
        check_decided(name, last, norm=variant.norm, steps=variant.steps, clipped=True, scale=1.0)
    last_rank = dist.get_rank() == dist.get_world_size() - 1
    for name, variant in made.items():
        variant.put()
        before = variant.moved()
        variant.step(torch.tensor(math.nan) if last_rank else loss_now())
        if (name == "bare") == np.array_equal(before, variant.moved()):
            raise WrongResultError(f"{layout}, {name}: a NaN loss on one rank was not handled as expected.")


def measured(layout: str, rounds: int, turn: int, layers: int, width: int) -> dict[str, Any]:
    """Samples and counts of all variants."""
    made, counts = variants(layout, layers, width), {}
    for name in (*made, *made):  # the guard's first step compares settings, the second one is counted
        made[name].put()
        with Counted() as counted:
            made[name].step(loss_now())
        counts[name] = {"collectives": counted.collectives, "bytes": counted.bytes}
    steps = {name: functools.partial(variant.step, loss_now()) for name, variant in made.items()}
    exact = {name: steps[name] for name in ("bare", EXACT)}
    del steps[EXACT]
    timed = functools.partial(interleaved, prepare=lambda name: made[name].put(), seed=turn)
    times = timed(steps, rounds=rounds)
    check_moved(layout, made)
    slow = timed(exact, rounds=max(3, rounds // FEWER), warmup=1)
    check_decisions(layout, made)
    samples = {name: t.samples for name, t in times.items()}
    samples |= {EXACT: slow[EXACT].samples, BARE_BESIDE_EXACT: slow["bare"].samples}
    return {"samples": samples, "counts": counts}


def main(world: int, meeting: str, rounds: int, turn: int, layers: int, width: int, rank: int) -> None:
    """Measure both layouts, and let rank 0 print what it found."""
    logging.disable()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    found = {layout: measured(layout, rounds, turn, layers, width) for layout in LAYOUTS}
    dist.barrier()
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
