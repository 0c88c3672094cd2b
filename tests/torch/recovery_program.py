"""One of the two ranks that test_recovery_ranks.py starts: where it ended after each trouble, as JSON."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import stablenum_torch as st
from stablenum import CheckpointError, RecoveryStopped
from stablenum_torch._devices.ranks import local_part
from tests.torch.recovering import AGAIN, network

WORLD = 2


class Loop:
    """A training on several ranks, each with its own part of the data and its own dropout."""

    def __init__(self, layout: str) -> None:
        torch.manual_seed(0)
        rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))
        data = TensorDataset(rows, rows.sum(1, keepdim=True))
        sampler = DistributedSampler(data, num_replicas=WORLD, rank=dist.get_rank(), shuffle=True)
        self.data = DataLoader(data, batch_size=3, sampler=sampler)
        self.inside: Any = network()
        if layout == "ddp":
            self.model: nn.Module = DistributedDataParallel(self.inside, broadcast_buffers=False)
            inner: Any = torch.optim.Adam(self.model.parameters(), lr=1e-2, fused=True)
        else:
            for layer in (self.inside[0], self.inside[4]):
                fully_shard(layer)
            self.model = fully_shard(self.inside)
            inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=True)
        self.opt = st.wrap(inner, names=self.model, clip=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 12, gamma=0.5)
        torch.manual_seed(100 + dist.get_rank())

    def recovery(self, policy: Any = AGAIN, **options: Any) -> st.Recovery:
        return st.Recovery(self.model, self.opt, policy, data=self.data, scheduler=self.scheduler, **options)

    def run(
        self, steps: int = 45, *, recovery: st.Recovery | None = None, trouble: Any = None, **options: Any
    ) -> st.Recovery:
        recovery = recovery or self.recovery(**options)
        for x, y in recovery.batches(steps):
            self.opt.zero_grad()
            self.opt.backward((self.model(x) - y).square().mean())
            self.opt.step()
            self.scheduler.step()
            # A forward pass without a backward pass leaves the parameters of FSDP2 whole.
            self.model.eval()
            with torch.no_grad():
                self.model(x)
            self.model.train()
            if trouble is not None and recovery.step + 1 == 33 and not recovery.events:
                trouble(self, recovery)
        return recovery

    def digest(self) -> str:
        """The bits of all that this rank holds."""
        if hasattr(self.model, "reshard"):
            self.model.reshard()
        parts: list[Any] = [*self.inside.parameters(), *self.inside.buffers()]
        for p in self.opt.param_groups[0]["params"]:
            parts += self.opt.state[p].values()
        words = b"".join(_bytes(part) for part in parts)
        words += json.dumps([self.opt.guard_state_dict(), self.scheduler.state_dict()], default=str).encode()
        return hashlib.sha256(words + _bytes(torch.get_rng_state())).hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return local_part(tensor).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def nan_buffer(loop: Loop, recovery: st.Recovery) -> None:
    if dist.get_rank() == 1:
        loop.inside[1].running_var[3] = math.nan


def nan_moment(loop: Loop, recovery: st.Recovery) -> None:
    if dist.get_rank() == 1:
        p = loop.opt.param_groups[0]["params"][0]
        local_part(loop.opt.state[p]["exp_avg_sq"]).view(-1)[0] = math.nan


def seen_by_one(loop: Loop, recovery: st.Recovery) -> None:
    if dist.get_rank() == 1:
        recovery.report("seen on rank 1 alone")


def where(recovery: st.Recovery) -> list[Any]:
    return [[event.symptom.detail, event.to_step] for event in recovery.events]


def result(layout: str, folder: Path) -> dict[str, Any]:
    """Where a run ended after each trouble."""
    clean = Loop(layout)
    found: dict[str, Any] = {"untroubled": where(clean.run()), "clean": clean.digest()}
    troubles: dict[str, Callable[..., None]] = {
        "buffer": nan_buffer, "moment": nan_moment, "report": seen_by_one,
    }  # fmt: skip
    for name, trouble in troubles.items():
        loop = Loop(layout)
        found[name] = [where(loop.run(trouble=trouble)), loop.digest()]
    Loop(layout).run(38, trouble=nan_buffer, folder=folder)
    found["files"] = sorted(str(path.relative_to(folder))[:25] for path in folder.glob("rank-*/step-*"))
    found["resumed"] = resumed(layout, folder)
    Loop(layout).run(38, trouble=nan_buffer, folder=folder / "lost")
    dist.barrier()
    if dist.get_rank() == 1:
        (newest,) = (folder / "lost" / "rank-00001").glob("step-000000030*")
        shutil.rmtree(newest)
    found["lost"] = resumed(layout, folder / "lost")
    if dist.get_rank() == 1:
        shutil.rmtree(folder / "lost" / "rank-00001")
    dist.barrier()
    try:
        Loop(layout).recovery(folder=folder / "lost").resume()
    except CheckpointError as error:
        found["gone"] = str(error)
    found["stopped"] = stopped(layout)
    return found


def resumed(layout: str, folder: Path) -> list[Any]:
    loop = Loop(layout)
    torch.manual_seed(999)
    recovery = loop.recovery(folder=folder)
    step = recovery.resume()
    loop.run(recovery=recovery)
    return [step, where(recovery), loop.digest()]


def stopped(layout: str) -> list[Any]:
    """One rank sees a symptom at every check."""
    loop = Loop(layout)
    predicate = (lambda: "always") if dist.get_rank() == 1 else None
    try:
        loop.run(predicate=predicate, every=10, check_every=5, good_after=0, budget=2, policy=None)
    except RecoveryStopped as error:
        return [error.step, error.report.splitlines()[0]]
    return []


def main(rank: int, layout: str, folder: str) -> None:
    torch.set_num_threads(1)
    store = Path(folder) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    found = result(layout, Path(folder) / "snapshots")
    sys.stdout.write(f"RESULT {json.dumps(found)}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
