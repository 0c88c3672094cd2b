"""One of two ranks that test_accumulation_on_ranks.py starts: accumulates gradients, reduces them, prints.

The ranks, and the one process that they are compared with, take data and settings from here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import stablenum_torch as st
from stablenum import DynamicLossScale

WORLD, STEPS, MICRO = 2, 6, 3
BAD = (3, 1, 1)  # the step, the micro-batch, which is not the last one, and the rank of an infinite input


class Case(NamedTuple):
    """How two ranks accumulate and reduce gradients.

    Attributes:
        layout: "ddp" or "fsdp2".
        loss: "mean" over equal batches, or "sum" over uneven ones divided by the number of all examples.
        sums: whether the reduction adds gradients up, instead of taking their mean.
        dtype: the format of the reduction.
        divided: whether gradients are divided before they are added up in that format.
        scale: the first loss scale.
        views: whether gradients are views of the buckets that are reduced.
    """

    layout: str
    loss: str = "mean"
    sums: bool = False
    dtype: torch.dtype = torch.float32
    divided: bool = True
    scale: float = 2.0**8
    views: bool = False


# At this scale each rank's gradients in the first step are within float16's range, and their sum is not.
HIGH = 3 * 2.0**13
CASES = {
    "ddp": Case("ddp"),
    "ddp, sums of losses": Case("ddp", loss="sum"),
    "ddp, sums of gradients": Case("ddp", loss="sum", sums=True),
    "ddp, views of buckets": Case("ddp", views=True),
    "ddp, bfloat16": Case("ddp", dtype=torch.bfloat16),
    "ddp, float16": Case("ddp", dtype=torch.float16, scale=HIGH),
    "ddp, float16, not divided before": Case("ddp", dtype=torch.float16, divided=False, scale=HIGH),
    "fsdp2": Case("fsdp2"),
    "fsdp2, sums of losses": Case("fsdp2", loss="sum"),
    "fsdp2, sums of gradients": Case("fsdp2", loss="sum", sums=True),
    "fsdp2, bfloat16": Case("fsdp2", dtype=torch.bfloat16),
    "fsdp2, float16": Case("fsdp2", dtype=torch.float16, scale=HIGH),
    "fsdp2, float16, not divided before": Case(
        "fsdp2", sums=True, dtype=torch.float16, divided=False, scale=2 * HIGH
    ),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def wrapped(case: Case, params: Any, **groups: Any) -> st.GuardedOptimizer:
    rule = DynamicLossScale(init_scale=case.scale, growth_interval=2)
    return st.wrap(torch.optim.SGD(params, lr=0.1, momentum=0.9), clip=0.2, loss_scale=rule, **groups)


def batch(case: Case, step: int, micro: int, rank: int) -> Tensor:
    rows = 4 if case.loss == "mean" or rank == 0 else 1 + (step + micro) % 3
    seed = 100 * step + 10 * micro + rank
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))
    return x * math.inf if (step, micro, rank) == BAD else x


def errors(output: Tensor) -> Tensor:
    """The loss of each example."""
    return (output - 1.0).square().sum(1)


def examples(case: Case, step: int) -> int:
    return sum(len(batch(case, step, micro, rank)) for micro in range(MICRO) for rank in range(WORLD))


def share(case: Case, step: int, micro: int, rank: int, output: Tensor) -> Tensor:
    """What the loss of one micro-batch adds to this rank's loss."""
    each = errors(output)
    loss = each.mean() / MICRO if case.loss == "mean" else each.sum() / examples(case, step) * WORLD
    return loss / WORLD if case.sums else loss


def record(opt: st.GuardedOptimizer) -> dict[str, Any]:
    last = opt.last
    found = {key: last[key] for key in ("applied", "loss_scale", "grad_norm", "loss", "clip_coefficient")}  # type: ignore[literal-required]
    return found | {"reason": last["reason"].name}


# --- on ranks ------------------------------------------------------------------------------------


# DistributedDataParallel does not accept annotations that are strings, as all are in this file.
def summed(how, bucket):
    """A hook of DistributedDataParallel that adds gradients up; it divides them before and after that."""
    dtype, before, after = how
    buffer = bucket.buffer()

    def written(future):
        return buffer.copy_(future.value()[0]).div_(after)

    narrow = buffer.to(dtype) / before
    return dist.all_reduce(narrow, async_op=True).get_future().then(written)


def on_ddp(case: Case) -> nn.Module:
    model = DistributedDataParallel(net(), gradient_as_bucket_view=case.views)
    if case.dtype == torch.float16 and case.divided:
        model.register_comm_hook(None, fp16_compress_hook)
    elif case.sums or case.dtype != torch.float32:  # torch's own hook for bfloat16 needs NCCL
        before = WORLD if case.divided and not case.sums else 1
        model.register_comm_hook((case.dtype, before, 1 if case.sums else WORLD // before), summed)
    return model


def on_fsdp2(case: Case) -> nn.Module:
    model, mesh = net(), init_device_mesh("cpu", (WORLD,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=case.dtype))
        if case.sums:
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply in a reduction
    return model


def run(case: Case) -> dict[str, Any]:
    model = on_ddp(case) if case.layout == "ddp" else on_fsdp2(case)
    opt = wrapped(case, model.parameters(), names=model)
    rows, rank = [], dist.get_rank()
    for step in range(STEPS):
        opt.zero_grad()
        for micro in range(MICRO):
            last = micro == MICRO - 1
            if case.layout == "fsdp2":
                model.set_requires_gradient_sync(last)
            apart = case.layout == "ddp" and not last
            with model.no_sync() if apart else contextlib.nullcontext():
                x = batch(case, step, micro, rank)
                opt.backward(share(case, step, micro, rank, model(x)))
        opt.step()
        rows.append(record(opt))
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return {"rows": rows, "params": [p.detach().tolist() for p in whole]}


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = {name: run(case) for name, case in CASES.items()}
    dist.barrier()  # not after the output, which is longer than a pipe and is read rank by rank
    sys.stdout.write("RESULT " + json.dumps(found))
    sys.stdout.flush()
    # Gloo's threads sometimes outlive their group and abort the interpreter at exit; the output is written.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
