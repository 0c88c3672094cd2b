"""Plain PyTorch on two processes, with DDP or FSDP2, alone and with a guard.

    outcome = LOOPS["ddp"](Fault.NAN_BATCH, guarded=True)
    outcome = LOOPS["fsdp2"]("nan_loss_on_one_rank", guarded=True)

Each rank trains on every second row of a batch. The outcome is that of rank 0. A run that takes longer than
the time limit is ended, with a ``TimeoutError``.
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stablenum_torch
from benchmarks.partners.batches import BAD, guard_config
from benchmarks.partners.outcome import Fault, Outcome, Row, State
from benchmarks.partners.torch_parts import (
    GAMMA,
    Net,
    TorchBatch,
    cut,
    loss_of,
    make_optimizer,
    new_scaler,
    torch_batches,
    whole_state,
)

__all__ = ["LOOPS", "RankFault"]

RankFault: TypeAlias = Fault | Literal["nan_loss_on_one_rank"] | None

RANKS = 2
LIMIT = 90.0  # seconds


class _Training:
    """One rank's model, optimizer and scheduler, and what it logs."""

    def __init__(self, kind: str, fault: Fault | None, guarded: bool) -> None:
        self.kind, self.guarded = kind, guarded
        self.net = Net(half=fault is Fault.FP16_OVERFLOW)
        if kind == "fsdp2":
            self.model: Any = fully_shard(self.net, mesh=init_device_mesh("cpu", (RANKS,)))
        else:
            self.model = DistributedDataParallel(self.net)
        self.opt: Any = make_optimizer(self.model.parameters())
        if guarded:
            self.opt = stablenum_torch.wrap(self.opt, guard_config(fault), buffers=self.net)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, GAMMA)
        if guarded:
            self.opt.hold(self.scheduler)
        self.scaler = new_scaler(fault)
        self.log: list[Row] = []
        self.rates: list[float] = []

    def train(self, batches: list[TorchBatch]) -> None:
        for x, z, y in batches:
            self.opt.zero_grad()
            loss = loss_of(self.model(x, z), y)
            if self.guarded:
                self.opt.backward(loss)
                self.opt.step()
            else:
                self.scaler.scale(loss).backward()
                self.scaler.step(self.opt)
                self.scaler.update()
            self.scheduler.step()
            self.log.append({"loss": loss.item()} | (self.opt.scalars() if self.guarded else {}))
            self.rates.append(self.opt.param_groups[0]["lr"])

    def state(self) -> State:
        """Return the whole state by name, gathered from the ranks."""
        if self.kind == "ddp":
            return whole_state(self.net, self.opt)
        options = StateDictOptions(full_state_dict=True)
        model = get_model_state_dict(self.model, options=options)
        moments = get_optimizer_state_dict(self.model, self.opt, options=options)["state"]
        found = {f"model/{name}": value for name, value in model.items()}
        for parameter, of_one in moments.items():
            found |= {f"moments/{parameter}/{name}": value for name, value in of_one.items()}
        return {name: value.detach().numpy().copy() for name, value in found.items()}

    def save(self, folder: Path) -> None:
        """Save as the documentation of DDP and FSDP2 says; the scaler is left out, as it is there."""
        if self.kind == "ddp":
            if dist.get_rank() == 0:
                torch.save(
                    {"model": self.net.state_dict(), "opt": self.opt.state_dict()}, folder / "saved.pt"
                )
            dist.barrier()
        else:
            dcp.save(self._distributed_state(), checkpoint_id=folder)
        # Each rank has its own batch statistics under FSDP2, of which dcp saves those of one rank.
        own = {"scheduler": self.scheduler.state_dict(), "buffers": dict(self.net.named_buffers())}
        torch.save(own, folder / f"rank{dist.get_rank()}.pt")

    def load(self, folder: Path) -> None:
        if self.kind == "ddp":
            saved = torch.load(folder / "saved.pt")
            self.net.load_state_dict(saved["model"])
            self.opt.load_state_dict(saved["opt"])
        else:
            state = self._distributed_state()
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(self.model, state["model"])
            set_optimizer_state_dict(self.model, self.opt, state["opt"])
            if self.guarded:
                self.opt.load_guard_state_dict(state["guard"])
        own = torch.load(folder / f"rank{dist.get_rank()}.pt")
        self.scheduler.load_state_dict(own["scheduler"])
        if self.kind == "fsdp2":
            for name, buffer in self.net.named_buffers():
                buffer.copy_(own["buffers"][name])

    def _distributed_state(self) -> dict[str, Any]:
        state = {
            "model": get_model_state_dict(self.model),
            "opt": get_optimizer_state_dict(self.model, self.opt),
        }
        return state | ({"guard": self.opt.guard_state_dict()} if self.guarded else {})


def _rows_of(rank: int, fault: RankFault, without: bool) -> list[TorchBatch]:
    """Return the rows of every batch on which a rank trains."""
    shared = fault if isinstance(fault, Fault) else None
    made = torch_batches(shared)
    if fault == "nan_loss_on_one_rank":
        made[BAD].y[RANKS - 1] = torch.nan
    chosen = [batch for i, batch in enumerate(made) if not (without and i == BAD)]
    return [TorchBatch(*(part[rank::RANKS] for part in batch)) for batch in chosen]


def _trained(kind: str, fault: RankFault, guarded: bool, without: bool, folder: Path) -> Outcome:
    known = fault if isinstance(fault, Fault) else None
    before, after = cut(_rows_of(dist.get_rank(), fault, without), without=without)
    first, second = (_Training(kind, known, guarded) for _ in range(2))
    first.train(before)
    first.save(folder)
    first.train(after)
    second.load(folder)
    second.train(after)
    return Outcome(
        state=first.state(), log=tuple(first.log), schedule=tuple(first.rates), resumed=second.state()
    )


def _rank(rank: int, kind: str, fault: RankFault, guarded: bool, port: int, folder: str) -> None:
    """Train on one rank, with the bad batch and without it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    try:
        found = []
        for without in (False, True) if fault is not None else (False,):
            here = Path(folder, f"without-{without}")
            here.mkdir(exist_ok=True)
            found.append(_trained(kind, fault, guarded, without, here))
        if rank == 0:
            outcome, *references = found
            complete = Outcome(**{**vars(outcome), "reference": references[0] if references else None})
            Path(folder, "outcome.pickle").write_bytes(pickle.dumps(complete))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _on_two_ranks(kind: str, fault: RankFault, guarded: bool) -> Outcome:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (kind, fault, guarded, port, folder)
        ranks = mp.spawn(_rank, arguments, nprocs=RANKS, join=False)
        ends = time.monotonic() + LIMIT
        while not ranks.join(timeout=max(0.0, ends - time.monotonic())):
            if time.monotonic() >= ends:
                for process in ranks.processes:
                    process.kill()
                raise TimeoutError(f"{kind} with {fault} had not ended after {LIMIT:g} seconds.")
        return pickle.loads(Path(folder, "outcome.pickle").read_bytes())


LOOPS: dict[str, Callable[..., Outcome]] = {
    kind: functools.partial(_on_two_ranks, kind) for kind in ("ddp", "fsdp2")
}
