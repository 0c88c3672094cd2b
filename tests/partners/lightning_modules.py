"""What the tests of Lightning share: small modules, batches and a quiet Trainer."""

from __future__ import annotations

import logging
import math
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from benchmarks.partners.torch_parts import whole_state

# Lightning recommends worker processes and saved hyperparameters, and its dependencies use what torch has
# deprecated.
WARNINGS = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:The '.*dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:DeprecationWarning"),
]
BAD = 3

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def data(count: int = 6, bad: int | None = None) -> list[torch.Tensor]:
    made = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    if bad is not None:
        made[bad] = made[bad] * math.nan
    return made


def module_of(package: Any = pl) -> Any:
    """A small module whose ``training_step`` calls parts of it."""

    class Small(package.LightningModule):
        optimizer = staticmethod(lambda params: torch.optim.AdamW(params, lr=0.1))
        interval = "step"
        frequency = 1

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            parts = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
            self.net = torch.nn.Sequential(*parts)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = self.optimizer(self.parameters())
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            made = {"scheduler": self.scheduler, "interval": self.interval, "frequency": self.frequency}
            return {"optimizer": optimizer, "lr_scheduler": made}

    return Small()


def trainer_of(*callbacks: Any, package: Any = pl, **settings: Any) -> Any:
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "log_every_n_steps": 1}
    return package.Trainer(callbacks=list(callbacks), **(usual | quiet | settings))


def fit(trainer: Any, module: Any, batches: list[torch.Tensor], **settings: Any) -> dict[str, np.ndarray]:
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None), **settings)
    return whole_state(module, trainer.optimizers[0])


def without(batches: list[torch.Tensor], *indices: int) -> list[torch.Tensor]:
    return [batch for i, batch in enumerate(batches) if i not in indices]


def gan(guarded: bool) -> Any:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
            self.judge = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            for i, opt in enumerate(self.optimizers()):
                loss = self.judge(self.generator(batch)).square().mean() * (1 if i else -1)
                opt.zero_grad()
                self.manual_backward(opt.scale(loss) if guarded else loss)
                opt.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(part.parameters()) for part in (self.generator, self.judge)]

    return Gan()
