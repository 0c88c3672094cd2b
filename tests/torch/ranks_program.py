"""One rank of the program that test_ranks.py starts: prints what it decided, as JSON."""

from __future__ import annotations

import json
import math
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stablenum_torch as st

MAX_NORM = 0.05


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch(step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return x * math.inf if step == 2 and rank == 1 else x  # bad on one rank only


def train(net: torch.nn.Module, **settings) -> dict:
    opt = st.wrap(
        torch.optim.AdamW(net.parameters(), lr=0.01, **settings), clip=MAX_NORM, loss_scale="dynamic"
    )
    for step in range(5):
        opt.zero_grad()
        opt.backward(net(batch(step, dist.get_rank())).square().mean())
        opt.step()
    rows = [[r["applied"], r["grad_norm"] if r["applied"] else None, r["loss_scale"]] for r in opt.history()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return {"rows": rows, "sum": sum(p.detach().double().abs().sum().item() for p in whole)}


def plain_shards() -> dict:
    """Each rank holds half of one parameter, as ZeRO does, and only rank 1's half turns bad."""
    w = torch.nn.Parameter(torch.zeros(2))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=1.0, process_group=dist.group.WORLD)
    w.grad = torch.tensor([3.0, 0.0]) if dist.get_rank() == 0 else torch.tensor([0.0, 4.0])
    opt.step()
    first = {"norm": opt.last["grad_norm"], "w": w.tolist()}
    w.grad = torch.full((2,), math.nan if dist.get_rank() == 1 else 1.0)
    opt.step()
    first |= {"applied": opt.last["applied"], "unchanged": w.tolist() == first["w"]}
    w.grad = None if dist.get_rank() == 1 else torch.tensor([6.0, 8.0])  # one rank has nothing to add
    opt.step()
    return first | {"alone": opt.last["grad_norm"]}


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    result = {
        "ddp": train(DistributedDataParallel(model())),
        "fsdp2": train(sharded),
        "shards": plain_shards(),
    }
    fused = model()
    fully_shard(fused, mesh=mesh)
    result["fsdp2 fused"] = train(fused, fused=True)
    sys.stdout.write("RESULT " + json.dumps(result))
    sys.stdout.flush()
    dist.barrier()
    # Gloo's threads sometimes outlive their group and abort the interpreter's exit; all is said by now.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
