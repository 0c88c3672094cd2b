"""One of the four ranks that test_replicas.py starts: what comparing the replicas found, as JSON."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import stablenum
import stablenum_torch as st
from stablenum_torch._step.guard import on_device_path

WORLD = 4


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


class Loop:
    """A guarded training, the same on all ranks but for the batches."""

    def __init__(self, net: torch.nn.Module, inner: torch.optim.Optimizer, *, average: bool = False, **kw):
        self.net, self.inner, self.average = net, inner, average
        self.opt = st.wrap(inner, **kw)
        self.steps = 0

    def step(self, *, bad: bool = False) -> None:
        """One step; with ``bad`` it is skipped on all ranks, and leaves every bit as it is."""
        self.opt.zero_grad()
        seed = WORLD * self.steps + dist.get_rank()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        self.opt.backward(self.net(x.to(next(self.net.parameters()).dtype)).float().square().mean())
        for p in self.net.parameters():
            if self.average:
                dist.all_reduce(p.grad)
            if bad:
                p.grad.mul_(math.nan)
        self.steps += 1
        self.opt.step()

    def found(self, **how) -> dict | None:
        """Step; return what the error says, or None if there is none."""
        try:
            self.step(**how)
        except stablenum.ReplicasPartedError as error:
            return {"parted": error.parted, "step": error.step, "text": str(error)}
        return None


adamw = functools.partial(torch.optim.AdamW, lr=0.01)
sgd = functools.partial(torch.optim.SGD, lr=0.1)


def ddp(make: Callable = adamw, every: int = 1, **settings) -> Loop:
    net = DistributedDataParallel(model())
    return Loop(net, make(net.parameters()), names=net, check_replicas_every=every, **settings)


def words(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1).view({2: torch.int16, 4: torch.int32}[local.element_size()])


def flip(tensor: torch.Tensor, bit: int, place: int = 0, rank: int | None = None) -> None:
    """Flip one bit, here or on one rank alone."""
    if rank is None or dist.get_rank() == rank:
        bits = words(tensor)
        bits[place] ^= -(2**31) if bit == 31 else 2**bit


def tensors(loop: Loop) -> dict[str, torch.Tensor]:
    """The first weight and its moments."""
    p = next(loop.net.parameters())
    return {"parameter": p, **{key: loop.inner.state[p][key] for key in ("exp_avg", "exp_avg_sq")}}


def all_equal(loop: Loop) -> bool:
    """Whether the bits are the same on all ranks, by sending them all."""
    own = [words(t).clone() for p in loop.net.parameters() for t in (p, *loop.inner.state[p].values())]
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, torch.cat(own))
    return all(torch.equal(everyone[0], other) for other in everyone)


# --- flipped bits ----------------------------------------------------------------------------------


def flips() -> list:
    """Every bit of a weight and of its moments, flipped on one rank alone: what was found."""
    loop, seen = ddp(), []
    loop.step()
    for name, tensor in tensors(loop).items():
        for bit in range(32):
            rank, place = bit % WORLD, (7 * bit) % tensor.numel()
            flip(tensor, bit, place, rank)
            found = loop.found(bad=True)
            flip(tensor, bit, place, rank)  # back
            seen.append([name, bit, rank, found and found["parted"]])
    return seen


def flips_before_steps() -> list:
    """Bits that are flipped before applied steps: whether they are found, and whether ranks then differ."""
    seen = []
    for bit in range(0, 32, 3):
        loop = ddp(every=3)
        loop.step()
        for tensor in tensors(loop).values():
            flip(tensor, bit, 5, rank=1)
        loop.step()
        found = loop.found()
        ranks = found and sorted({rank for *_, odd in found["parted"] for rank in odd})
        seen.append([found is not None, not all_equal(loop), ranks])
    return seen


def healthy(steps: int) -> dict:
    loop = ddp()
    with counted() as calls:
        for _ in range(steps):
            loop.step()
    applied = loop.opt.last["step"] + 1 - loop.opt.last["skipped_total"]
    return {"compared": calls.count("MAX"), "applied": applied, "equal": all_equal(loop)}


class counted:  # noqa: N801
    """The collectives that are called meanwhile, by name."""

    def __enter__(self) -> list[str]:
        self.calls: list[str] = []
        self.plain = dist.all_reduce, dist.all_gather_object

        def reduce(*args, **kw):
            self.calls.append("MAX" if kw.get("op") == dist.ReduceOp.MAX else "SUM")
            return self.plain[0](*args, **kw)

        def gather(*args, **kw):
            self.calls.append("gather")
            return self.plain[1](*args, **kw)

        dist.all_reduce, dist.all_gather_object = reduce, gather
        return self.calls

    def __exit__(self, *_: object) -> None:
        dist.all_reduce, dist.all_gather_object = self.plain


def collectives() -> dict:
    """What each of seven steps calls, with and without a check every three steps."""

    def each(loop: Loop) -> Iterator[list[str]]:
        for _ in range(7):
            with counted() as calls:
                loop.step()
            yield list(calls)

    return {"checked": list(each(ddp(every=3))), "plain": list(each(ddp(every=10**6)))}


# --- other ways to part ----------------------------------------------------------------------------


def other_seed() -> dict | None:
    net = model(seed=int(dist.get_rank() == 3))  # no DistributedDataParallel, which would make them equal
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    settings = {"names": net, "loss_group": dist.group.WORLD, "check_replicas_every": 2}
    loop = Loop(net, inner, average=True, **settings)
    loop.step()
    return loop.found()


def race() -> dict | None:
    """The step of one rank is applied twice."""
    loop = ddp(sgd, every=2)
    loop.step()
    if dist.get_rank() == 2:
        loop.inner.step()
    return loop.found()


def special_values() -> dict:
    """0.0 and -0.0, and NaNs of different payloads, have different bits."""
    loop, seen = ddp(functools.partial(sgd, momentum=0.9)), {}
    loop.step()
    p = next(loop.net.parameters())
    buffer = loop.inner.state[p]["momentum_buffer"]
    for name, tensor in (("weight", p.detach()), ("momentum", buffer)):
        tensor.zero_()
        seen[f"zero {name}"] = loop.found(bad=True)
        if dist.get_rank() == 1:
            tensor.neg_()
        seen[f"negative zero {name}"] = loop.found(bad=True)
        tensor.zero_()
    buffer.fill_(math.nan)
    seen["nan"] = loop.found(bad=True)
    words(buffer)[3] = 0x7FC00000 + (dist.get_rank() == 1)
    seen["payload"] = loop.found(bad=True)
    return seen


def swapped() -> dict | None:
    """Two values of opposite signs change places on one rank."""
    loop = ddp()
    p = next(loop.net.parameters()).detach()
    p[0, 1], p[3, 4] = (-0.5, 0.5) if dist.get_rank() == 0 else (0.5, -0.5)
    return loop.found(bad=True)


def missing_state() -> dict | None:
    loop = ddp(every=2)
    loop.step()
    if dist.get_rank() == 2:
        loop.inner.state[next(loop.net.parameters())].pop("exp_avg")
    return loop.found(bad=True)


def untouched() -> bool:
    """A check that finds something changes nothing on any rank."""
    loop = ddp(every=1)
    loop.step()
    flip(next(loop.net.parameters()), 3, 1, rank=0)
    before = [words(t).clone() for t in (*loop.net.parameters(), *tensors(loop).values())]
    assert loop.found(bad=True)
    after = [words(t) for t in (*loop.net.parameters(), *tensors(loop).values())]
    return all(map(torch.equal, before, after))


def mended() -> dict:
    """The remedy of the message: copy from a good rank."""
    loop = ddp()
    loop.step()
    flip(tensors(loop)["exp_avg"], 20, 4, rank=1)
    found = loop.found(bad=True)
    for p in loop.net.parameters():
        for tensor in (p.detach(), *loop.inner.state[p].values()):
            dist.broadcast(tensor, src=0)
    return {"found": found, "after": loop.found()}


# --- other places of copies ------------------------------------------------------------------------


def hsdp() -> dict:
    """Two replicas of two shards: ranks 0 and 2 hold the same, and 1 and 3."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(model(), mesh=mesh)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    loop = Loop(net, inner, names=net, check_replicas_every=1)
    seen = {"healthy": [loop.found() for _ in range(5)]}
    for name, tensor in tensors(loop).items():
        flip(tensor, 2, 3, rank=3)
        seen[name] = loop.found(bad=True)
        flip(tensor, 2, 3, rank=3)
    return seen


def nothing_to_compare(kind: str) -> dict:
    """FSDP2 alone has no copies; of ranks without a known group, nothing is known."""
    net = model()
    if kind == "fsdp2":
        fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (WORLD,)))
    logged = Logged()
    loop = Loop(net, torch.optim.AdamW(net.parameters()), average=kind != "fsdp2", check_replicas_every=1)
    with logged, counted() as calls:
        seen = [loop.found() for _ in range(4)]
    return {"found": seen, "compared": calls.count("MAX"), "logged": logged.messages}


class Logged(logging.Handler):
    """The messages of the library's logger about replicas."""

    def __enter__(self) -> None:
        self.messages: list[str] = []
        logging.getLogger("stablenum").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("stablenum").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "check_replicas_every" in record.getMessage():
            self.messages.append(record.getMessage())


def other_intervals() -> str:
    """Ranks that compare after different numbers of steps would wait for each other forever."""
    try:
        ddp(every=1 + dist.get_rank() // 3).step()
    except ValueError as error:
        return str(error)
    return ""


def groups_of(*groups: list[int]) -> dist.ProcessGroup:
    """Return this rank's of several groups."""
    made = {rank: dist.new_group(ranks) for ranks in groups for rank in ranks}
    return made[dist.get_rank()]


def plain_shards() -> dict:
    """Ranks 0 and 1 hold the halves of a parameter, and so do ranks 2 and 3."""
    parts = groups_of([0, 1], [2, 3])
    w = torch.nn.Parameter(torch.full((3,), float(dist.get_rank() % 2)))
    opt = st.wrap(
        torch.optim.SGD([("w", w)], lr=0.1),
        process_group=parts,
        loss_group=dist.group.WORLD,
        check_replicas_every=1,
    )
    return of_parameter(opt, w)


def pipeline(*, parts_known: bool) -> dict:
    """Two stages, of other parameters, on ranks 0 and 1, and on ranks 2 and 3."""
    parts = groups_of([0, 2], [1, 3]) if parts_known else None
    stage = dist.get_rank() // 2
    w = torch.nn.Parameter(torch.full((3 + stage,), float(stage)))
    more = [(f"stage{stage}.b", torch.nn.Parameter(torch.zeros(2)))] * stage
    inner = torch.optim.SGD([(f"stage{stage}.w", w), *more], lr=0.1)
    opt = st.wrap(inner, process_group=parts, loss_group=dist.group.WORLD, check_replicas_every=1)
    return of_parameter(opt, w)


def of_parameter(opt: st.GuardedOptimizer, w: torch.nn.Parameter) -> dict:
    """What is found after a healthy step, and after a bit of rank 1's part was flipped."""
    seen = {}
    for name in ("healthy", "flipped"):
        w.grad = torch.full_like(w, 0.0)
        try:
            opt.step()
        except stablenum.ReplicasPartedError as error:
            seen[name] = error.parted
        flip(w, 7, 1, rank=1)
    return seen


def added_parameters() -> dict:
    """A group that is added between two checks is compared, too."""
    w, more = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(5))
    inner = torch.optim.SGD([("w", w)], lr=0.1)
    opt = st.wrap(inner, loss_group=dist.group.WORLD, check_replicas_every=1)
    w.grad = torch.zeros(3)
    opt.step()
    opt.add_param_group({"params": [("more", more)]})
    return of_parameter(opt, more)


def zero_redundancy() -> dict:
    """The state of a parameter is on one rank, so only parameters are compared."""
    make = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=0.01)
    loop = ddp(make)
    seen = {"healthy": [loop.found() for _ in range(3)]}
    loop.inner.consolidate_state_dict(to=0)
    saved = [loop.inner.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    loop.inner.load_state_dict(saved[0])  # each rank keeps a part of it
    seen["loaded"] = loop.found()
    flip(next(loop.net.parameters()), 7, 1, rank=1)
    return seen | {"flipped": loop.found(bad=True)}


def master_weights() -> dict:
    net = DistributedDataParallel(model().bfloat16())
    inner = st.MasterWeights(net.parameters(), lambda p: torch.optim.AdamW(p, lr=0.01))
    loop = Loop(net, inner, names=net, check_replicas_every=1)
    seen = {"healthy": [loop.found() for _ in range(3)]}
    p = next(net.parameters())
    for name, tensor in {"master": inner.state[p]["master"], "parameter": p}.items():
        flip(tensor, 5, 2, rank=3)
        seen[name] = loop.found(bad=True)
        flip(tensor, 5, 2, rank=3)
    return seen


def on_device() -> dict:
    """The path of accelerators, with CPU tensors."""
    with on_device_path():
        loop = ddp(functools.partial(adamw, fused=True), every=2)
        seen = {"healthy": [loop.found() for _ in range(4)]}
        flip(tensors(loop)["exp_avg_sq"], 0, 2, rank=0)
        return seen | {"between": loop.found(bad=True), "flipped": loop.found(bad=True)}


CASES = {
    "flips": flips,
    "flips before steps": flips_before_steps,
    "healthy": functools.partial(healthy, 50),
    "collectives": collectives,
    "other seed": other_seed,
    "race": race,
    "special values": special_values,
    "swapped": swapped,
    "missing state": missing_state,
    "untouched": untouched,
    "mended": mended,
    "hsdp": hsdp,
    "fsdp2": lambda: nothing_to_compare("fsdp2"),
    "no group": lambda: nothing_to_compare("no group"),
    "other intervals": other_intervals,
    "plain shards": plain_shards,
    "pipeline": functools.partial(pipeline, parts_known=True),
    "other parameters": functools.partial(pipeline, parts_known=False),
    "added parameters": added_parameters,
    "zero": zero_redundancy,
    "master weights": master_weights,
    "on device": on_device,
}
LONG = {"healthy": functools.partial(healthy, 1000)}


def main(rank: int, store: str, cases: str) -> None:
    logging.getLogger("stablenum").addHandler(logging.NullHandler())  # most steps here are skipped
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    result = {name: case() for name, case in {"all": CASES, "long": LONG}[cases].items()}
    sys.stdout.write("RESULT " + json.dumps(result))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes outlive their group and abort the interpreter at exit


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
