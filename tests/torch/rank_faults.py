"""Small programs in which one of four ranks makes a number that is not finite, and the same on one rank.

A program is a layout and a fault. The fault is a line between two layers, which reads data of its own rank:
``scale`` is 1 where nothing fails. Step 0 is good everywhere, step 1 is bad on one rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import stablenum_torch

__all__ = ["FAULTS", "LAYOUTS", "PROGRAMS", "Program", "bad_line", "replayed", "run", "run_alone"]

SIZE = 4
WIDTH = 8


@dataclass(frozen=True)
class Fault:
    """A line that fails.

    Attributes:
        forward: from (n, width) activations and a () scale to activations of the same shape.
        scale: what the scale is where it fails.
        data: whether the input has a row with inf there instead.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    scale: float = 0.0
    data: bool = False


def log_of_zero(h: Tensor, scale: Tensor) -> Tensor:
    h = h.abs().clamp(min=0.1) * scale
    return torch.log(h)  # BAD


def root_at_zero(h: Tensor, scale: Tensor) -> Tensor:
    squares = (h * scale).square().sum(-1, keepdim=True)
    norm = torch.sqrt(squares)  # BAD
    return h + norm


def zero_by_zero(h: Tensor, scale: Tensor) -> Tensor:
    h = h * scale
    top = h.abs().amax()
    return h / top  # BAD


def exp_overflow(h: Tensor, scale: Tensor) -> Tensor:
    h = h.abs().clamp(0.5, 2.0) * scale
    h = torch.exp(h)  # BAD
    return h * 0.1


def half_overflow(h: Tensor, scale: Tensor) -> Tensor:
    h = h.abs().clamp(0.5, 2.0).half()
    h = h * (scale * 1000).half()  # BAD
    return h.float() / 1000


def empty_mean(h: Tensor, scale: Tensor) -> Tensor:
    chosen = h[(scale > 0).expand(len(h))]
    centre = chosen.mean()  # BAD
    return h - centre


def unchanged(h: Tensor, scale: Tensor) -> Tensor:
    return h * scale


FAULTS = {
    "log": Fault(log_of_zero),
    "sqrt": Fault(root_at_zero),
    "div": Fault(zero_by_zero),
    "exp": Fault(exp_overflow, scale=1000.0),
    "half": Fault(half_overflow, scale=60.0),
    "mean": Fault(empty_mean),
    "input": Fault(unchanged, data=True),
}


class Faulty(nn.Module):
    """The faulty line as a layer."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.scale = fault, torch.tensor(1.0)

    def forward(self, h: Tensor) -> Tensor:
        return self.fault.forward(h, self.scale)


class Net(nn.Module):
    """Two linear layers around the faulty line."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = Faulty(fault)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)  # DATA
        return self.last(self.middle(h))


def batch(step: int, rank: int, *, bad: bool) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    if bad:
        x[2, 5] = torch.inf
    return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def trained(net: nn.Module, faulty: Faulty, *, bad: bool, data: int) -> None:
    """Two steps, of which the second is bad.

    Args:
        net: gives the output.
        faulty: the line.
        bad: whether it fails here.
        data: which part of the batches this rank has.
    """
    fault = faulty.fault
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(2):
        now = bad and step == 1
        faulty.scale = torch.tensor(fault.scale if now and not fault.data else 1.0)
        x = batch(step, data, bad=now and fault.data)
        optimizer.zero_grad()
        loss = loss_of(net(x), torch.zeros(4, 2))
        loss.backward()
        optimizer.step()


def run_alone(name: str) -> None:
    """The program on one rank."""
    fault = FAULTS[name]
    net = Net(fault)
    trained(net, net.middle, bad=True, data=0)


def ddp(fault: Fault, rank: int, *, bad: bool) -> None:
    net = Net(fault)
    trained(DistributedDataParallel(net), net.middle, bad=bad, data=rank)


def fsdp2(fault: Fault, rank: int, *, bad: bool) -> None:
    net = Net(fault)
    for layer in (net.first, net.last):
        fully_shard(layer)
    fully_shard(net)
    trained(net, net.middle, bad=bad, data=rank)


def _in_parallel(net: Net, mesh: Any) -> None:
    parallelize_module(net, mesh, {"first": ColwiseParallel(), "last": RowwiseParallel()})


def tensor_parallel(fault: Fault, rank: int, *, bad: bool) -> None:
    net = Net(fault)
    _in_parallel(net, init_device_mesh("cpu", (SIZE,)))
    trained(net, net.middle, bad=bad, data=0)


def fsdp2_and_tensor_parallel(fault: Fault, rank: int, *, bad: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    net = Net(fault)
    _in_parallel(net, mesh["model"])
    fully_shard(net, mesh=mesh["data"])
    trained(net, net.middle, bad=bad, data=rank // 2)


class First(nn.Module):
    """The first stage of a pipeline."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.first, self.middle = net.first, net.middle

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)  # DATA
        return self.middle(h)


class Second(nn.Module):
    """The second stage, which has the faulty line too."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.middle, self.last = Faulty(net.middle.fault), net.last

    def forward(self, h: Tensor) -> Tensor:
        return self.last(self.middle(h))


def pipeline(fault: Fault, rank: int, *, bad: bool) -> None:
    """Two stages, each of them on two ranks that average their gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage, replica = rank // 2, rank % 2
    net = Net(fault)
    part = First(net) if stage == 0 else Second(net)
    pipe = PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = ScheduleGPipe(pipe, 2, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    for step in range(2):
        now = bad and step == 1
        part.middle.scale = torch.tensor(fault.scale if now and not fault.data else 1.0)
        optimizer.zero_grad()
        if stage == 0:
            schedule.step(batch(step, replica, bad=now and fault.data))
        else:
            schedule.step(target=torch.zeros(4, 2))
        for p in part.parameters():
            torch.distributed.all_reduce(p.grad, group=mesh["data"].get_group())
        optimizer.step()


class Table(nn.Module):
    """An embedding before the faulty line; the one row that it uses belongs to rank 0."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(2 * SIZE, WIDTH)
        self.middle = Faulty(fault)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.zeros(4, dtype=torch.int64)
        return self.middle(self.rows(index))[:, :2]


def fsdp2_rows(fault: Fault, rank: int, *, bad: bool) -> None:
    """The rank that makes the number has a finite part of the gradient; rank 0 has the bad row."""
    net = Table(fault)
    fully_shard(net)
    trained(net, net.middle, bad=bad, data=rank)


def tensor_parallel_by_dtensors(fault: Fault, rank: int, *, bad: bool) -> None:
    """The activations are DTensors, so that the faulty line is one of DTensor's operations."""
    net = Net(fault)
    mesh = init_device_mesh("cpu", (SIZE,))
    into = RowwiseParallel(input_layouts=Shard(-1))
    parallelize_module(net, mesh, {"first": ColwiseParallel(use_local_output=False), "last": into})

    def scaled(h: Tensor, scale: Tensor) -> Tensor:
        whole = DTensor.from_local(scale.expand(4, WIDTH // SIZE).contiguous(), mesh, [Shard(-1)])
        return fault.forward(h, whole)

    net.middle.fault = Fault(scaled, fault.scale)
    trained(net, net.middle, bad=bad, data=0)


def sum_of_halves(fault: Fault, rank: int, *, bad: bool) -> None:
    """Gradients that float16 can hold, but not their sum over four ranks."""
    w = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([w], lr=0.01)
    (w * 3e4).sum().backward()
    narrow = w.grad.half()
    torch.distributed.all_reduce(narrow)
    w.grad = narrow.float()
    optimizer.step()


LAYOUTS: dict[str, Callable[..., None]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "TP": tensor_parallel,
    "FSDP2+TP": fsdp2_and_tensor_parallel,
    "pipeline": pipeline,
    "FSDP2 rows": fsdp2_rows,
    "TP by DTensors": tensor_parallel_by_dtensors,
    "sum of halves": sum_of_halves,
}


@dataclass(frozen=True)
class Program:
    """One of the programs: a layout, a fault and the rank on which it fails."""

    layout: str
    fault: str
    rank: int

    def __str__(self) -> str:
        return f"{self.layout}, {self.fault} on rank {self.rank}"


_LINES = [name for name in FAULTS if name != "input"]
PROGRAMS = [
    Program(layout, fault, (3 * i + j + 1) % SIZE)
    for i, layout in enumerate(("DDP", "FSDP2", "TP", "FSDP2+TP", "pipeline"))
    for j, fault in enumerate(_LINES)
] + [Program("DDP", "input", 2), Program("FSDP2", "input", 3), Program("pipeline", "input", 1)]
PROGRAMS += [Program("FSDP2 rows", "sqrt", 3), Program("TP by DTensors", "log", 2)]


def run(program: Program, rank: int) -> None:
    """The program on this rank of four."""
    LAYOUTS[program.layout](FAULTS[program.fault], rank, bad=rank == program.rank)


def replayed(layout: str, name: str, *, bad: bool) -> dict[str, Any]:
    """A guarded step that is skipped, and explained on all ranks: the report, and whether all is as before.

    Args:
        layout: "DDP" or "FSDP2".
        name: that of the fault.
        bad: whether it fails here.
    """
    fault = FAULTS[name]
    net = Net(fault)
    model: nn.Module = net
    if layout == "DDP":
        model = DistributedDataParallel(net)
    else:
        for layer in (net.first, net.last, net):
            fully_shard(layer)
    optimizer = stablenum_torch.wrap(torch.optim.SGD(model.parameters(), lr=0.01), names=model)
    net.middle.scale = torch.tensor(fault.scale if bad else 1.0)
    x = batch(0, torch.distributed.get_rank(), bad=False)

    def loss() -> Tensor:
        return loss_of(model(x), torch.zeros(4, 2))

    optimizer.zero_grad()
    optimizer.backward(loss())
    optimizer.step()
    before = [_part(p).clone() for p in model.parameters()]
    report = optimizer.explain(loss, model=model)
    same = all(torch.equal(_part(p), kept) for p, kept in zip(model.parameters(), before, strict=True))
    return {"report": report.to_dict(), "applied": optimizer.last["applied"], "same": same}


def _part(p: Any) -> Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach()


def bad_line(program: Program) -> int:
    """The number of the faulty line in this file."""
    reader = First if program.layout == "pipeline" else Net
    fault = FAULTS[program.fault]
    owner, mark = (reader.forward, "# DATA") if fault.data else (fault.forward, "# BAD")
    lines, start = inspect.getsourcelines(owner)
    return next(start + i for i, line in enumerate(lines) if line.rstrip().endswith(mark))
