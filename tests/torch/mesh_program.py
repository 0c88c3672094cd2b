"""One of four ranks that test_meshes.py starts: trains on every layout, plants faults, prints what it found.

What a step should have decided is known from one process: the NumPy reference is given the gathered gradients
and the mean of the losses.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import stablenum_torch as st
from stablenum import (
    AdaGC,
    AdaptiveGradClip,
    ClipByNorm,
    ClipUpdateRMS,
    GuardConfig,
    LogMaxLossScale,
    SpikeGuard,
    UnderflowAwareLossScale,
    ZClip,
)
from stablenum.reference.guarded import SGD, Guarded
from stablenum_torch._step.guard import on_device_path

WORLD = 4
CONFIG = GuardConfig(
    clip=0.5,
    loss_scale="dynamic",
    spike=SpikeGuard(min_samples=4, window=32, watch="loss", max_in_a_row=3),
)
MAKERS = {
    "foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}
WARM = 6

Maker = Callable[..., torch.optim.Optimizer]
config: GuardConfig = CONFIG  # what the next layout is built with


class Layout(NamedTuple):
    """A model on four ranks, and its guarded optimizer.

    Attributes:
        opt: the optimizer.
        backward: runs one forward and backward pass for a step's number.
        bad: the ranks that hold the part of the gradients on which a fault is planted; of two faults, the
            ranks of each.
        parts: "own" if each rank has other plain parameters, "shards" if it has parts of the same ones, and
            "" if it has copies.
    """

    opt: st.GuardedOptimizer
    backward: Callable[[int], None]
    bad: tuple[Sequence[int], Sequence[int]]
    parts: str = ""


def net(*, uneven: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = 10 if uneven else 12
    return nn.Sequential(nn.Linear(8, middle), nn.Tanh(), nn.Linear(middle, 3 if uneven else 4))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + 1.0


def plain_backward(
    model: nn.Module, opt: st.GuardedOptimizer, *, same: bool = False
) -> Callable[[int], None]:
    def backward(step: int) -> None:
        opt.backward(mean_square(model(batch(step, 0 if same else dist.get_rank()))))

    return backward


ALL, ONE_AND_TWO = (range(WORLD), range(WORLD)), ([1], [2])


def ddp(make: Maker, **settings: Any) -> Layout:
    model = DistributedDataParallel(net(), **settings)
    opt = st.wrap(make(model.parameters()), config, names=model)
    return Layout(opt, plain_backward(model, opt), ALL)


def ddp_hook(make: Maker) -> Layout:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, fp16_compress_hook)
    opt = st.wrap(make(model.parameters()), config, names=model)
    return Layout(opt, plain_backward(model, opt), ALL)


def sharded(make: Maker, mesh: DeviceMesh, *, uneven: bool = False, **settings: Any) -> Layout:
    model = net(uneven=uneven)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **settings)
    opt = st.wrap(make(model.parameters()), config)
    bad = ONE_AND_TWO if mesh.ndim == 1 else ([1, 3], [0, 2])
    return Layout(opt, plain_backward(model, opt), bad)


def tensor_parallel(make: Maker, mesh: DeviceMesh, data: DeviceMesh | None = None) -> Layout:
    model = net()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if data is not None:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=data)
    opt = st.wrap(make(model.parameters()), config)

    def backward(step: int) -> None:
        # Ranks that share an activation have the same batch.
        rows = 0 if data is None else data.get_local_rank()
        opt.backward(mean_square(model(batch(step, rows))))

    return Layout(opt, backward, ONE_AND_TWO)


def pipeline(make: Maker) -> Layout:
    """Four stages: other parameters on each, and another number of them; only the last one has a loss."""
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        nn.Linear(8, 8, bias=False),
        nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)),
        nn.Linear(8, 4),
    ]
    rank = dist.get_rank()
    own = stages[rank]
    stage = PipelineStage(own, rank, WORLD, torch.device("cpu"))
    opt = st.wrap(make(own.parameters()), config, process_group=dist.group.WORLD)
    scale: list[torch.Tensor] = []

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean_square(output) / 2 * scale[0]

    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of, scale_grads=False)

    def backward(step: int) -> None:
        scale[:] = [opt.scale()]
        x = batch(step, 0)
        if rank == 0:
            schedule.step(x)
        elif rank == WORLD - 1:
            # Not collected by the loss function, which the schedule also calls on uninitialized memory.
            losses: list[torch.Tensor] = []
            schedule.step(target=torch.zeros(4, 4), losses=losses)
            opt.scale(torch.stack(losses).sum() / scale[0])
        else:
            schedule.step()

    return Layout(opt, backward, ONE_AND_TWO, parts="own")


def experts(make: Maker, mesh: DeviceMesh, data: DeviceMesh) -> Layout:
    """Dense layers on all ranks, and an expert on each half of them."""
    dense = net()
    fully_shard(dense, mesh=mesh)
    torch.manual_seed(7 + dist.get_rank() % 2)
    expert = nn.Linear(4, 4)
    fully_shard(expert, mesh=data)
    opt = st.wrap(make([*dense.parameters(), *expert.parameters()]), config, process_group=dist.group.WORLD)

    def backward(step: int) -> None:
        opt.backward(mean_square(expert(dense(batch(step, dist.get_rank())))))

    return Layout(opt, backward, ONE_AND_TWO, parts="own")


def zero_redundancy(make: Maker) -> Layout:
    model = DistributedDataParallel(net())
    inner = ZeroRedundancyOptimizer(model.parameters(), make.func, **make.keywords)  # type: ignore[attr-defined]
    opt = st.wrap(inner, config, names=model)
    return Layout(opt, plain_backward(model, opt), ALL)


def fsdp1(make: Maker) -> Layout:
    model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=torch.device("cpu"))
    opt = st.wrap(make(model.parameters()), config, process_group=dist.group.WORLD)
    return Layout(opt, plain_backward(model, opt), ONE_AND_TWO, parts="shards")


def mixed(make: Maker, mesh: DeviceMesh) -> Layout:
    """Sharded and replicated DTensors, and a plain tensor that all ranks hold."""
    torch.manual_seed(0)
    params = [
        nn.Parameter(distribute_tensor(torch.randn(9, 8), mesh, [Shard(0)])),
        nn.Parameter(distribute_tensor(torch.randn(8, 3), mesh, [Shard(1)])),
        nn.Parameter(distribute_tensor(torch.randn(5), mesh, [Replicate()])),
    ]
    plain = nn.Parameter(torch.randn(4))
    opt = st.wrap(make([*params, plain], foreach=False, fused=False), config)

    def backward(step: int) -> None:
        # Made by hand, because torch has no operation for plain tensors and DTensors together.
        opt.scale(torch.tensor(1.0 + 0.01 * dist.get_rank() + 0.001 * step))
        generator = torch.Generator().manual_seed(step)
        for p in params:
            whole = torch.randn(p.shape, generator=generator) * opt.loss_scale
            p.grad = distribute_tensor(whole, mesh, p.placements)
        plain.grad = torch.randn(4, generator=generator) * opt.loss_scale

    return Layout(opt, backward, ONE_AND_TWO)


# The layouts to try, and those of them on which each rule is tried; None for all.
wanted: set[str] | None = None
with_rules: set[str] | None = None


def layouts() -> dict[str, Callable[[Maker], Layout]]:
    made = every_layout()
    return {name: build for name, build in made.items() if wanted is None or name in wanted}


def every_layout() -> dict[str, Callable[[Maker], Layout]]:
    line = init_device_mesh("cpu", (WORLD,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return {
        "ddp": ddp,
        "ddp static graph": functools.partial(ddp, static_graph=True),
        "ddp hook": ddp_hook,
        "fsdp2": functools.partial(sharded, mesh=line),
        "fsdp2 uneven": functools.partial(sharded, mesh=line, uneven=True),
        "hsdp": functools.partial(sharded, mesh=square),
        "tp": functools.partial(tensor_parallel, mesh=line),
        "fsdp2 tp": functools.partial(tensor_parallel, mesh=square["inner"], data=square["outer"]),
        "pipeline": pipeline,
        "experts": functools.partial(experts, mesh=line, data=square["outer"]),
        "zero": zero_redundancy,
        "fsdp1": fsdp1,
        "cpu offload": functools.partial(
            sharded, mesh=line, offload_policy=CPUOffloadPolicy(pin_memory=False)
        ),
        "mixed": functools.partial(mixed, mesh=line),
    }


# --- faults --------------------------------------------------------------------------------------


def local(grad: Any) -> torch.Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def fill(layout: Layout, ranks: Sequence[int], value: float, *, last: bool = False, which: int = 0) -> None:
    """Write a value into one element of a gradient, on ranks that hold a part of it."""
    if dist.get_rank() not in ranks:
        return
    parts = [local(p.grad) for p in parameters(layout.opt) if p.grad is not None]
    part = next(part for part in [*parts[which:], *parts] if part.numel())
    part.view(-1)[-1 if last else 0] = value


def parameters(opt: st.GuardedOptimizer) -> list[Any]:
    return [p for group in opt.param_groups for p in group["params"]]


def own(layout: Layout) -> list[Any]:
    """The parameters of which no other rank has a copy of this rank's part, where there are any."""
    params = [p for p in parameters(layout.opt) if p.grad is not None]
    return [
        p
        for p in params
        if layout.parts or (hasattr(p, "placements") and not any(x.is_replicate() for x in p.placements))
    ] or params


def zero(layout: Layout, ranks: Sequence[int]) -> None:
    if dist.get_rank() in ranks:
        for p in own(layout):
            local(p.grad).zero_()


def without(layout: Layout, ranks: Sequence[int]) -> None:
    # The reducer of DistributedDataParallel gives all ranks the same gradients, so there it cannot happen.
    if dist.get_rank() in ranks and len(ranks) < WORLD:
        for p in own(layout):
            p.grad = None


def bad_loss(layout: Layout, rank: int, value: float) -> None:
    if dist.get_rank() == rank:
        layout.opt.scale(torch.tensor(value))


FAULTS: dict[str, Callable[[Layout], None]] = {
    "healthy": lambda layout: None,
    "inf on one rank": lambda layout: fill(layout, layout.bad[0], float("inf")),
    "NaN on the last rank": lambda layout: fill(
        layout, [WORLD - 1] if len(layout.bad[0]) == 1 else layout.bad[0], float("nan"), last=True
    ),
    "NaN loss on one rank": lambda layout: bad_loss(layout, 2, float("nan")),
    "loss spike on one rank": lambda layout: bad_loss(layout, WORLD - 1, 1e6),
    "two ranks at once": lambda layout: [  # type: ignore[dict-item, return-value]
        fill(layout, layout.bad[0], float("nan")),
        fill(layout, layout.bad[1], float("inf"), last=True),
    ],
    "huge finite": lambda layout: fill(layout, layout.bad[0], 2e38),
    "all zero on one rank": lambda layout: zero(layout, layout.bad[0]),
    "no gradient on one rank": lambda layout: without(layout, layout.bad[0]),
    "in an uneven shard": lambda layout: fill(
        layout, [0] if len(layout.bad[0]) == 1 else layout.bad[0], float("inf"), last=True, which=1
    ),
}


# --- what one process would decide -----------------------------------------------------------------


def gathered(layout: Layout) -> list[np.ndarray]:
    """The whole gradients, the same list on every rank."""
    return whole(layout, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)


def whole(layout: Layout, of: Callable[[Any], Any]) -> list[np.ndarray]:
    """Whole tensors, made from this rank's parts ``of`` its parameters and those of the other ranks."""
    mine: dict[Any, np.ndarray] = {}
    for i, p in enumerate(parameters(layout.opt)):
        if hasattr(p, "device_mesh"):
            mine["mesh", tuple(p.device_mesh.mesh.flatten().tolist()), i] = (
                of(p).full_tensor().detach().numpy()
            )
        else:
            mine["plain", dist.get_rank() if layout.parts else 0, i] = of(p).detach().numpy().copy()
    found = joined(mine)
    if layout.parts == "shards":
        places = sorted({i for _, _, i in found})
        return [np.concatenate([found["plain", rank, i] for rank in range(WORLD)]) for i in places]
    return [array for _, array in sorted(found.items(), key=lambda item: str(item[0]))]


def joined(own: dict[Any, Any]) -> dict[Any, Any]:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, own)
    return {key: value for part in found for key, value in part.items()}


def mean_loss(opt: st.GuardedOptimizer) -> float | None:
    loss = opt._guard.loss
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, None if loss is None else float(loss))
    given = [x for x in found if x is not None]
    return float(np.mean(np.asarray(given, np.float64))) if given else None


def held(layout: Layout) -> dict[str, str]:
    """A digest of each part that this rank holds, and of its optimizer state, under the part's identity."""
    found = {}
    for i, p in enumerate(parameters(layout.opt)):
        if hasattr(p, "device_mesh"):
            at = p.device_mesh.get_coordinate()
            place = [c for c, placement in zip(at, p.placements, strict=True) if not placement.is_replicate()]
            ranks = p.device_mesh.mesh.flatten().tolist()
            key = f"{i} {ranks} {place}"
        else:
            key = f"{i} {dist.get_rank() if layout.parts else ''}"
        state = layout.opt.state.get(p, {}) if p in layout.opt.state else {}
        tensors = [p, *(state[k] for k in sorted(state) if isinstance(state[k], torch.Tensor))]
        digest = hashlib.sha256(b"".join(local(t).detach().numpy().tobytes() for t in tensors))
        found[key] = digest.hexdigest()
    return found


def replicas_agree(layout: Layout) -> bool:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, held(layout))
    keys = {key for part in found for key in part}
    return all(len({part[key] for part in found if key in part}) == 1 for key in keys)


def run(layout: Layout) -> dict[str, Any]:
    """Train, plant each fault in one step, and compare each step with one process."""
    reference: Guarded | None = None
    found: dict[str, Any] = {}
    faults = ["healthy"] * WARM + [name for name in FAULTS for name in (name, "healthy")]
    for step, fault in enumerate(faults):
        layout.opt.zero_grad()
        layout.backward(step)
        FAULTS[fault](layout)
        grads, loss = gathered(layout), mean_loss(layout.opt)
        if reference is None:
            reference = Guarded([np.zeros_like(g) for g in grads], SGD(lr=0.0), CONFIG)
        before = held(layout)
        wanted = reference.step(grads, loss)
        layout.opt.step()
        last = layout.opt.last
        same = {
            key: [wanted[key], last[key]]  # type: ignore[literal-required]
            for key in ("applied", "reason", "loss_scale", "skipped_total")
            if wanted[key] != last[key]  # type: ignore[literal-required]
        }
        close = {
            key: [wanted[key], last[key]]  # type: ignore[literal-required]
            for key in ("grad_norm", "loss", "clip_coefficient")
            if not np.isclose(wanted[key], last[key], rtol=1e-6, atol=0, equal_nan=True)  # type: ignore[literal-required]
        }
        seen: list[Any] = [None] * WORLD
        dist.all_gather_object(seen, {**last, "worst": last["worst"].index})
        kept = last["applied"] or held(layout) == before
        row = {
            "applied": last["applied"],
            "reason": last["reason"].name,
            "worst_rank": last["worst_rank"],
            "differs": {**same, **close},
            "alike": all(repr(other) == repr(seen[0]) for other in seen),
            "kept": kept,
            "replicas": replicas_agree(layout),
        }
        if fault != "healthy" or step < WARM:
            found[fault] = row
        elif row["differs"] or not (row["alike"] and row["kept"] and row["replicas"] and row["applied"]):
            found[f"after step {step}"] = row
    return found


RULES = {
    "AdaGC": GuardConfig(clip=AdaGC(warmup_steps=1), loss_scale="dynamic"),
    "AdaptiveGradClip": GuardConfig(clip=AdaptiveGradClip(clipping=0.02, output_axis="first")),
    "AdaptiveGradClip and AdaGC": GuardConfig(
        clip=(AdaptiveGradClip(clipping=0.02, output_axis="first"), AdaGC(warmup_steps=1)), loss_scale=256.0
    ),
    "ClipByNorm": GuardConfig(clip=ClipByNorm(0.01)),
    "ClipUpdateRMS": GuardConfig(clip=ClipUpdateRMS(1e-3)),
    "ZClip": GuardConfig(clip=ZClip(warmup_steps=2)),
    "LogMaxLossScale": GuardConfig(loss_scale=LogMaxLossScale()),
    "UnderflowAwareLossScale": GuardConfig(loss_scale=UnderflowAwareLossScale(init_scale=2.0**4)),
}
WITHOUT_UNITS = ("pipeline", "experts", "fsdp1")  # with process_group, AdaptiveGradClip raises


def follow(layout: Layout, rule: str, lr: float) -> dict[str, Any]:
    """Train with a rule, beside one process that has the whole parameters and gradients."""
    reference, free = (
        Guarded(whole(layout, lambda p: p), SGD(lr=lr), used)
        for used in (RULES[rule], GuardConfig(loss_scale=RULES[rule].loss_scale))
    )
    apart: dict[str, Any] = {}
    for step in range(7):
        layout.opt.zero_grad()
        layout.backward(step)
        if step == 4:
            fill(layout, layout.bad[0], float("inf"))
        elif step == 5:
            fill(layout, layout.bad[0], 3.0 * layout.opt.loss_scale)
        grads, loss = gathered(layout), mean_loss(layout.opt)
        wanted = reference.step(grads, loss)
        free.step(grads, loss)
        layout.opt.step()
        last = layout.opt.last
        for key in ("applied", "loss_scale", "grad_norm", "clip_coefficient"):
            if key == "clip_coefficient" and layout.parts == "own":
                continue  # each rank has its own
            if not np.isclose(wanted[key], last[key], rtol=1e-5, equal_nan=True):  # type: ignore[literal-required]
                apart[f"{step} {key}"] = [wanted[key], last[key]]  # type: ignore[literal-required]
    trained = whole(layout, lambda p: p)
    far = [i for i, (a, b) in enumerate(zip(reference.params, trained, strict=True)) if not close(a, b)]
    clips = not all(map(close, reference.params, free.params))
    return {"apart": apart, "parameters apart": far, "acts": clips or rule.endswith("LossScale")}


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-5, atol=1e-7)


def rules() -> dict[str, Any]:
    global config
    found = {}
    for name, build in layouts().items():
        if name.startswith("ddp ") or name == "cpu offload":
            continue
        if with_rules is not None and name not in with_rules:
            continue
        for rule in RULES:
            if "AdaptiveGradClip" in rule and name in WITHOUT_UNITS:
                continue
            config = RULES[rule]
            found[f"{name}, {rule}"] = follow(build(functools.partial(torch.optim.SGD, lr=0.1)), rule, 0.1)
    config = CONFIG
    return found


# --- the same gradients in every layout ------------------------------------------------------------

SHAPES = ((37, 24), (24, 10), (41,))


def same_gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator) * 10.0**k for k, shape in enumerate(SHAPES)]
    for g in found:  # of very different sizes, so that the order of a sum shows
        g.mul_(torch.exp(3 * torch.randn(g.shape, generator=generator)))
    return found


class Divided(NamedTuple):
    """Parameters that hold the same gradients in some layout.

    Attributes:
        params: this rank's.
        set_gradients: gives them their parts of the whole gradients.
        groups: the groups for ``wrap``.
    """

    params: list[nn.Parameter]
    set_gradients: Callable[[list[torch.Tensor]], None]
    groups: dict[str, Any]


def as_dtensors(mesh: DeviceMesh, placements: Sequence[Any]) -> Divided:
    def spread(x: torch.Tensor) -> torch.Tensor:
        fitting = [p if not p.is_shard() or p.dim < x.ndim else Shard(0) for p in placements]
        return distribute_tensor(x, mesh, fitting)

    params = [nn.Parameter(spread(torch.zeros(shape))) for shape in SHAPES]

    def set_gradients(grads: list[torch.Tensor]) -> None:
        for p, g in zip(params, grads, strict=True):
            p.grad = spread(g)

    return Divided(params, set_gradients, {})


def as_plain(pick: Callable[[torch.Tensor], torch.Tensor], chosen: Sequence[int], **groups: Any) -> Divided:
    params = [nn.Parameter(pick(torch.zeros(SHAPES[i])).clone()) for i in chosen]

    def set_gradients(grads: list[torch.Tensor]) -> None:
        for p, i in zip(params, chosen, strict=True):
            p.grad = pick(grads[i]).clone()

    return Divided(params, set_gradients, groups)


def half(x: torch.Tensor) -> torch.Tensor:
    """One of two flat shards, which every other rank holds."""
    flat = x.reshape(-1)
    return flat.split([flat.numel() // 3, flat.numel() - flat.numel() // 3])[dist.get_rank() % 2]


def flat_shard(x: torch.Tensor) -> torch.Tensor:
    sizes = [x.numel() // 7, 0, x.numel() // 3]
    return x.reshape(-1).split([*sizes, x.numel() - sum(sizes)])[dist.get_rank()]


def divisions() -> dict[str, Divided]:
    line = init_device_mesh("cpu", (WORLD,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    world = dist.group.WORLD
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    both = {"process_group": pair, "loss_group": world}
    stages = [[0], [2], [1], [1]][dist.get_rank()]
    mine = as_plain(lambda x: x, stages, process_group=world)
    if dist.get_rank() == 3:  # a rank without gradients
        mine = mine._replace(set_gradients=lambda grads: None)
    return {
        "one process": as_plain(lambda x: x, [0, 1, 2]),
        "copies": as_plain(lambda x: x, [0, 1, 2], loss_group=world),
        "flat shards": as_plain(flat_shard, [0, 1, 2], process_group=world),
        "stages": mine,
        "two copies of flat shards": as_plain(half, [0, 1, 2], **both),
        "two copies of stages": as_plain(lambda x: x, [[0, 2], [1]][dist.get_rank() % 2], **both),
        "Replicate": as_dtensors(line, [Replicate()]),
        "Shard(0)": as_dtensors(line, [Shard(0)]),
        "Shard(1)": as_dtensors(line, [Shard(1)]),
        "Replicate, Shard(0)": as_dtensors(square, [Replicate(), Shard(0)]),
        "Shard(0), Replicate": as_dtensors(square, [Shard(0), Replicate()]),
        "Shard(0), Shard(1)": as_dtensors(square, [Shard(0), Shard(1)]),
        "Shard(1), Shard(0)": as_dtensors(square, [Shard(1), Shard(0)]),
        "Shard(0), Shard(0)": as_dtensors(square, [Shard(0), Shard(0)]),
    }


def norms_of(divided: Divided, **settings: Any) -> list[str]:
    """The joint norms of some steps, to the last bit, and what is left of the gradients' elements."""
    opt = st.wrap(torch.optim.SGD(divided.params, lr=0.0), **divided.groups, **settings)
    found = []
    for seed in range(12 if wanted is None else 4):
        divided.set_gradients(same_gradients(seed))
        opt.step()
        last = opt.last
        found.append(f"{last['grad_norm'].hex()} {last['clip_coefficient'].hex()}")
    return found


def exactly() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, divided in divisions().items():
        found[name] = {
            "plain": norms_of(divided, clip=1.0),
            "exact": norms_of(divided, clip=1.0, exact_norms=True),
        }
        if not name.endswith("stages"):  # where each rank has its own coefficients
            rule = AdaGC(warmup_steps=1)
            found[name]["exact per tensor"] = norms_of(divided, clip=rule, exact_norms=True)
    return found


# --- set-ups -----------------------------------------------------------------------------------------


def collectives(layout: Layout) -> dict[str, Any]:
    """How many collectives a step makes, and the bytes that its all-reduce carries."""
    layout.backward(0)
    layout.opt.step()  # the first one compares settings
    layout.opt.zero_grad()
    layout.backward(1)
    sizes: list[int] = []
    plain = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        with CommDebugMode() as seen:
            layout.opt.step()
    finally:
        dist.all_reduce = plain
    return {"count": seen.get_total_counts(), "bytes": sizes, "tensors": len(parameters(layout.opt))}


def message_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def setups() -> dict[str, Any]:
    line = init_device_mesh("cpu", (WORLD,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    rank = dist.get_rank()
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    w = nn.Parameter(distribute_tensor(torch.ones(8), line, [Shard(0)]))
    part = nn.Parameter(distribute_tensor(torch.ones(8), square["outer"], [Shard(0)]))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[rank // 2]
    copies = DistributedDataParallel(net())
    found: dict[str, Any] = {
        "small group": message_of(lambda: st.wrap(sgd([w]), process_group=half)),
        "small loss group": message_of(lambda: st.wrap(sgd([w]), loss_group=half)),
        "sub-mesh": message_of(lambda: st.wrap(sgd([w, part]))),
        "sub-mesh, copies": message_of(lambda: st.wrap(sgd([w, part]), loss_group=dist.group.WORLD)),
        "copies as parts": message_of(
            lambda: st.wrap(sgd(copies.parameters()), names=copies, process_group=dist.group.WORLD)
        ),
        "other ranks": message_of(lambda: st.wrap(sgd([w]), process_group=halves[1 - rank // 2])),
        "wrong type": message_of(lambda: st.wrap(sgd([w]), loss_group="world")),  # type: ignore[arg-type]
    }
    for name, mine, others in (("clip", 1.0, 2.0), ("loss_scale", None, "dynamic")):
        p = nn.Parameter(torch.ones(3))
        settings = {name: mine if rank else others}
        opt = st.wrap(sgd([p]), loss_group=dist.group.WORLD, **settings)  # type: ignore[arg-type]
        opt.backward(p.sum())
        before = opt.guard_state_dict()
        found[f"other {name}"] = message_of(opt.step)
        found[f"other {name}, unchanged"] = p.tolist() == [1.0] * 3 and opt.guard_state_dict() == before
    found["collectives"] = {
        name: collectives(build(sgd)) for name, build in layouts().items() if name not in ("zero", "mixed")
    }
    return found


def late() -> dict[str, Any]:
    """One rank raises instead of stepping: the others go on once their group's time is up."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=4))
    p = nn.Parameter(torch.ones(3))
    opt = st.wrap(torch.optim.SGD([p], lr=0.1), loss_group=group)
    for _ in range(2):
        opt.zero_grad()
        opt.backward(p.sum())
        opt.step()
    before, waited = p.tolist(), time.perf_counter()
    if dist.get_rank() == 1:
        time.sleep(8)  # it is alive, but makes no step
        return {"raised": True}
    opt.zero_grad()
    opt.backward(p.sum())
    try:
        opt.step()
    except (RuntimeError, dist.DistError) as error:
        return {"seconds": time.perf_counter() - waited, "error": str(error), "kept": p.tolist() == before}
    return {"error": None}


def main(rank: int, store: str, path: str, *names: str) -> None:
    global wanted, with_rules
    wanted, with_rules = (set(given.split(",")) if given else None for given in names)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    result: dict[str, Any] = {}
    with on_device_path() if path == "device" else contextlib.nullcontext():
        for name, build in layouts().items():
            for kind, make in MAKERS.items():
                if name == "mixed" and kind == "fused":
                    continue
                began = time.perf_counter()
                result[f"{name}, {kind}"] = run(build(make))
                sys.stderr.write(f"TIME {name} {kind} {time.perf_counter() - began:.1f}\n")
        followed = rules()
        found = {"faults": result, "rules": followed, "norms": exactly(), "setups": setups()}
    waited = late()
    sys.stdout.write("RESULT " + json.dumps(found, default=str) + "\nLATE " + json.dumps(waited))
    sys.stdout.flush()
    # Gloo's threads sometimes outlive their group and abort the interpreter at exit; the output is written.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:6])
