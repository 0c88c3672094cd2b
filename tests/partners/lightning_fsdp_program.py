"""Two ranks of Lightning's ``ModelParallelStrategy``, whose layers are sharded by FSDP2: a training that is
saved and continued, and the same one unbroken. ``tests.partners.test_lightning``.

Each rank writes what it found to a file in the folder that it is given.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.partners import torchvision_on_cpu

torchvision_on_cpu.allow()

import lightning.pytorch as pl  # noqa: E402

from stablenum_torch.integrations.lightning import GuardCallback  # noqa: E402
from tests.partners.lightning_modules import data, module_of, trainer_of  # noqa: E402

BREAK, STEPS = (
    60,
    80,
)  # the spike guard, which gives its first verdict after 64 steps, learns before the break
SPIKE, NAN = 70, 75


def module() -> Any:
    made, batches = module_of(), data(STEPS)
    made.net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

    def configure_model() -> None:
        for part in (made.net[0], made.net[2], made.net):
            fully_shard(part, mesh=made.device_mesh["data_parallel"])

    def training_step(batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        step = made.trainer.global_step  # a training that is continued begins its epoch again
        factor = {SPIKE: 1e4, NAN: math.nan}.get(step, 1.0)
        return made.net(batches[step] + made.global_rank).square().mean() * factor

    made.configure_model, made.training_step = configure_model, training_step
    return made


def train(form: str, steps: int, *, save: Path | None = None, resume: Path | None = None) -> Any:
    callback, made = GuardCallback(clip=1.0, spike="skip"), module()
    strategy = pl.strategies.ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=form == "sharded"
    )
    trainer = trainer_of(
        callback, strategy=strategy, devices=2, max_epochs=-1, max_steps=steps, use_distributed_sampler=False
    )
    trainer.fit(made, torch.utils.data.DataLoader(data(STEPS), batch_size=None), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    opt = callback.optimizers[0]
    skipped = [row["step"] for row in opt.history() if not row["applied"]]
    return {"guard": opt.guard_state_dict(), "skipped": skipped}, trainer.global_rank


def main(folder: Path, form: str) -> None:
    train(form, BREAK, save=folder / "saved")
    broken, rank = train(form, STEPS, resume=folder / "saved")
    unbroken, _ = train(form, STEPS)
    torch.save({"broken": broken, "unbroken": unbroken}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
