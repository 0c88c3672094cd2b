"""One rank of the program that test_ranks.py starts: prints what it decided, as JSON."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import pickle
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as distributed
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import stablenum
import stablenum_torch as st
from stablenum_torch._step.guard import on_device_path

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
    w.grad = None if dist.get_rank() == 1 else torch.tensor([6.0, 8.0])  # one rank contributes nothing
    opt.step()
    return first | {"alone": opt.last["grad_norm"]}


def rules(net: torch.nn.Module, **settings) -> dict:
    """What rules that need more than norms measure and do, on shards and on whole parameters."""
    opt = st.wrap(torch.optim.SGD(net.parameters(), lr=1.0), **settings)
    moved = []
    for step in (0, 1, 3, 4):
        opt.zero_grad()
        opt.backward(net(batch(step, dist.get_rank()) * 1e-3).square().mean())
        before = [whole(p).clone() for p in net.parameters()]
        opt.step()
        now = [whole(p) for p in net.parameters()]
        moved.append(
            [(a - b).double().square().mean().sqrt().item() for a, b in zip(now, before, strict=True)]
        )
    return {"scales": [r["loss_scale"] for r in opt.history()] + [opt.loss_scale], "moved": moved}


def whole(p) -> torch.Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()


def refused(net: torch.nn.Module, **settings) -> str:
    try:
        st.wrap(torch.optim.SGD(net.parameters(), lr=1.0), clip=stablenum.AdaptiveGradClip(), **settings)
    except ValueError as error:
        return str(error)
    return "accepted"


def replicated(mesh) -> dict:
    """A DTensor that every rank holds in full is not a shard: its units can be measured."""
    w = torch.nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
    clip = (stablenum.AdaptiveGradClip(clipping=0.1), stablenum.ClipUpdateRMS(0.5))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=clip)
    w.grad = distribute_tensor(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), mesh, [Replicate()])
    opt.step()
    return {"w": w.detach().to_local().tolist(), "norm": opt.last["grad_norm"]}


def stages() -> dict:
    """Each rank has a parameter of its own, as the stages of a pipeline do, and rules in two orders."""
    found, bound = {}, stablenum.ClipByGlobalNorm(1.0)
    each = stablenum.AdaGC(max_norm=0.5)
    for name, clip in (("joint first", (bound, each)), ("joint last", (each, bound))):
        w = torch.nn.Parameter(torch.zeros(2, 1))
        opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=clip, process_group=dist.group.WORLD)
        w.grad = torch.tensor([[3.0], [0.0]] if dist.get_rank() == 0 else [[0.0], [4.0]])
        before = opt.guard_state_dict()
        try:
            opt.step()
        except ValueError as error:
            found[name] = str(error)
            found["unchanged"] = not w.any() and opt.guard_state_dict() == before
        else:
            found[name] = w.flatten().tolist()
    return found


def copies() -> dict:
    """A guard that knows the group of its model is copied and pickled, and finds a compiled model's."""
    net = DistributedDataParallel(model())
    compiled = torch.compile(net, backend="eager")
    found = {}
    for name, names in (("ddp", net), ("compiled", compiled)):
        opt = st.wrap(torch.optim.SGD(net.parameters(), lr=1.0), names=names)
        twins = [opt, copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
        for twin in twins:
            for p in twin.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            twin.scale(torch.tensor(1.0 + 2.0 * dist.get_rank()))
            twin.step()
        found[name] = [(twin.last["loss"], twin.last["worst"].name) for twin in twins]
    return found


def shards_of_updates() -> dict:
    """Halves of one parameter, of different lengths: one RMS, one fraction of lost elements."""
    w = torch.nn.Parameter(torch.zeros(1 if dist.get_rank() else 3))
    opt = st.wrap(
        torch.optim.SGD([w], lr=1.0),
        clip=stablenum.ClipUpdateRMS(0.5),
        loss_scale=stablenum.UnderflowAwareLossScale(init_scale=1.0, max_tiny=0.4, headroom=100.0),
        process_group=dist.group.WORLD,
    )
    opt.scale(torch.ones(()))
    w.grad = torch.full_like(w, -4.0)
    opt.step()
    seen = {"w": w.tolist(), "kept": opt.loss_scale}
    opt.scale(torch.ones(()))
    w.grad = torch.full_like(w, 2.0**-30)
    if dist.get_rank():
        w.grad.fill_(8.0)  # 3 of 4 are lost, though none of them here
    opt.step()
    return seen | {"raised": opt.loss_scale}


def named_fsdp1() -> list[float]:
    """The norms of an FSDP1 model whose group is known from the model given as names."""
    found = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        net = FullyShardedDataParallel(
            model(), use_orig_params=True, device_id=torch.device("cpu"), sharding_strategy=strategy
        )
        opt = st.wrap(torch.optim.SGD(net.parameters(), lr=1.0), names=net)
        opt.backward(net(batch(0, dist.get_rank())).square().mean())
        opt.step()
        found.append(opt.last["grad_norm"])
    net = model()
    torch.cat([net(batch(0, rank)) for rank in (0, 1)]).square().mean().backward()
    return [*found, torch.nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()]


def no_gradients() -> list[int]:
    """The steps that a guard counts: one without any gradient, and one with a gradient on rank 1 alone."""
    w = torch.nn.Parameter(torch.zeros(2))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), process_group=dist.group.WORLD)
    opt.step()
    counted = [int(opt.guard_state.step)]
    w.grad = torch.ones(2) if dist.get_rank() else None
    opt.step()
    return [*counted, int(opt.guard_state.step)]


def huge() -> list[float]:
    """A finite gradient whose square float64 does not hold, in halves."""
    w = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = st.wrap(torch.optim.SGD([w], lr=1.0), clip=1.0, process_group=dist.group.WORLD)
    opt._guard.on_host = True  # on the other path norms saturate in float32, as they do in one process
    w.grad = torch.full_like(w, 4e200 if dist.get_rank() else 3e200)
    opt.step()
    return w.tolist()


def some_updates() -> dict:
    """Halves of parameters, of which other ones move in each step."""
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    inner = torch.optim.SGD(params, lr=1.0)
    opt = st.wrap(inner, clip=stablenum.ClipUpdateRMS(0.5), process_group=dist.group.WORLD)
    kept, moved = [], []
    for step in range(1, 15):
        opt.zero_grad()
        for i, p in enumerate(params):
            p.grad = torch.full((2,), 4.0 * dist.get_rank() - 1.0) if step >> i & 1 else None
        before = [p.detach().clone() for p in params]
        opt.step()
        moved.append([(p.detach() - b).abs().max().item() for p, b in zip(params, before, strict=True)])
        kept.append(len(opt._guard._joint._tensors))
    return {"kept": kept, "moved": moved}


def narrow_weights(mesh) -> dict:
    """Sharded bfloat16 weights beside whole ones: the same bits, which a checkpoint preserves."""

    def make(kind: type, net: torch.nn.Module) -> torch.optim.Optimizer:
        return kind(net.parameters(), lambda p: torch.optim.AdamW(p, lr=0.01))

    def gathered(tree) -> list:
        return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tree]

    def kept(opt: torch.optim.Optimizer) -> list:
        return gathered(s.get(opt._kept_name) for s in opt.state_dict()["state"].values())

    found = {}
    for kind in (st.MasterWeights, st.KahanUpdate, st.StochasticRounding):
        nets = [model().bfloat16(), fully_shard(model().bfloat16(), mesh=mesh)]
        opts = [make(kind, net) for net in nets]
        for step in range(5):
            for net, opt in zip(nets, opts, strict=True):
                opt.zero_grad()
                net(batch(step % 2, 0).bfloat16()).float().square().mean().backward()
                opt.step()
        weights = [gathered(net.parameters()) for net in nets]
        if kind is st.StochasticRounding:  # other random bits, so they agree only approximately
            found[kind.__name__] = all(torch.allclose(a, b, atol=0.02) for a, b in zip(*weights, strict=True))
            continue
        options = checkpoint.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        saved = checkpoint.get_optimizer_state_dict(nets[1], opts[1], options=options)
        again = make(kind, nets[1])
        checkpoint.set_optimizer_state_dict(
            nets[1], again, saved if dist.get_rank() == 0 else {}, options=options
        )
        whole, *sharded = kept(opts[0]), kept(opts[1]), kept(again)
        assert any(c.any() for c in whole)
        # On half a tensor a kernel of the inner optimizer may differ in the last bit.
        same = all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
        last_bit = {"rtol": 1e-6, "atol": float(kind is st.KahanUpdate)}
        found[kind.__name__] = same and all(
            torch.allclose(a.double(), b.double(), **last_bit)
            for part in sharded
            for a, b in zip(whole, part, strict=True)
        )
    return found


def checkpointed(kind: str, mesh, folder: str) -> list[dict[str, bool]]:
    """Training resumed from a sharded checkpoint, with and without the guard's own state beside it."""

    def start(steps: int) -> tuple[torch.nn.Module, st.GuardedOptimizer]:
        net, group = model(), None
        if kind == "fsdp1":
            cpu = torch.device("cpu")
            net = FullyShardedDataParallel(net, use_orig_params=True, device_id=cpu)
            group = dist.group.WORLD
        else:
            fully_shard(net, mesh=mesh)
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        opt = st.wrap(inner, clip=stablenum.ZClip(), loss_scale="dynamic", names=net, process_group=group)
        for step in range(steps):
            once(net, opt, step)
        return net, opt

    def once(net: torch.nn.Module, opt: st.GuardedOptimizer, step: int) -> None:
        opt.zero_grad()
        opt.backward(net(batch(step, dist.get_rank())).square().mean())
        opt.step()

    net, opt = start(4)
    saved = {"model": checkpoint.get_model_state_dict(net)}
    saved["optim"] = checkpoint.get_optimizer_state_dict(net, opt)
    distributed.save(saved | {"guard": opt.guard_state_dict()}, checkpoint_id=folder)
    once(net, opt, 5)
    found = []
    for with_guard in (True, False):
        other, resumed = start(0)
        state = {"model": checkpoint.get_model_state_dict(other), "guard": resumed.guard_state_dict()}
        state["optim"] = checkpoint.get_optimizer_state_dict(other, resumed)
        distributed.load(state, checkpoint_id=folder)
        checkpoint.set_model_state_dict(other, state["model"])
        checkpoint.set_optimizer_state_dict(other, resumed, state["optim"])
        if with_guard:
            resumed.load_guard_state_dict(state["guard"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", stablenum.StatisticsNotLoadedWarning)
            once(other, resumed, 5)
        pairs = zip(net.parameters(), other.parameters(), strict=True)
        same = all(torch.equal(whole(a), whole(b)) for a, b in pairs)
        guards = opt.guard_state_dict() == resumed.guard_state_dict()
        warned = any(w.category is stablenum.StatisticsNotLoadedWarning for w in caught)
        found.append({"parameters": same, "guard": guards, "warned": warned})
    return found


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
    log_max = {"loss_scale": stablenum.LogMaxLossScale(), "clip": stablenum.ClipUpdateRMS(1e-6)}
    underflow = {
        "loss_scale": stablenum.UnderflowAwareLossScale(init_scale=2.0**4),
        "clip": stablenum.AdaGC(),
    }
    for name, settings in (("log max", log_max), ("underflow", underflow)):
        again = model()
        for layer in (again[0], again[2], again):
            fully_shard(layer, mesh=mesh)
        result[name] = {
            "ddp": rules(DistributedDataParallel(model()), **settings),
            "fsdp2": rules(again, **settings),
        }
    result["refused"] = [refused(sharded), refused(model(), process_group=dist.group.WORLD), refused(model())]
    result["replicated"] = replicated(mesh)
    result["narrow"] = narrow_weights(mesh)
    result["stages"], result["copies"] = stages(), copies()
    result["update shards"] = shards_of_updates()
    result["named fsdp1"] = named_fsdp1()
    result["no gradients"] = no_gradients()
    result["huge"] = huge()
    result["some updates"] = some_updates()
    for kind in ("fsdp2", "fsdp1"):
        result[f"checkpointed {kind}"] = checkpointed(kind, mesh, f"{store} {kind}")
    fused = model()
    fully_shard(fused, mesh=mesh)
    result["fsdp2 fused"] = train(fused, fused=True)
    sys.stdout.write("RESULT " + json.dumps(result))
    sys.stdout.flush()
    dist.barrier()
    # Gloo's threads sometimes outlive their group and abort the interpreter at exit; the output is written.
    os._exit(0)


if __name__ == "__main__":
    with on_device_path() if sys.argv[3] == "device" else contextlib.nullcontext():
        main(int(sys.argv[1]), sys.argv[2])
