"""Two ranks that Lightning starts itself; on one of them, one loss is NaN. ``tests.partners.test_lightning``.

Each rank writes what it has at the end to a file in the folder that it is given.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.partners import torchvision_on_cpu

torchvision_on_cpu.allow()

from stablenum_torch.integrations.lightning import GuardCallback  # noqa: E402
from tests.partners.lightning_modules import BAD, data, module_of, trainer_of  # noqa: E402


def poisoned_on_rank_1() -> Any:
    """A module whose loss of one batch is NaN on rank 1, where its gradients stay finite."""
    module = module_of()

    def training_step(batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = module.net(batch + module.global_rank).square().mean()
        return loss + (math.nan if batch_idx == BAD and module.global_rank == 1 else 0.0)

    module.training_step = training_step
    return module


def main(folder: Path) -> None:
    callback, module = GuardCallback(clip=1.0), poisoned_on_rank_1()
    trainer = trainer_of(callback, strategy="ddp", devices=2)
    # Lightning gives each rank every other batch.
    trainer.fit(module, torch.utils.data.DataLoader(data(12), batch_size=None))
    opt = callback.optimizers[0]
    found = {"model": module.state_dict(), "optimizer": opt.inner.state_dict(), "history": opt.history()}
    torch.save(found, folder / f"{module.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
