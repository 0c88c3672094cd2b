"""Loops of PyTorch's trainers, alone and with a guard.

    outcome = LOOPS["lightning"](Fault.NAN_BATCH, guarded=True)
    judge(outcome)

A loop alone is written as its documentation says, and the guarded one differs from it in about two lines.
"""

from __future__ import annotations

import csv
import functools
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import stablenum_torch
from benchmarks.partners import torchvision_on_cpu
from benchmarks.partners.batches import guard_config
from benchmarks.partners.outcome import Fault, Outcome, Row
from benchmarks.partners.torch_fastai import fastai
from benchmarks.partners.torch_parts import (
    GAMMA,
    Loop,
    Net,
    TorchBatch,
    cut,
    loss_of,
    make_optimizer,
    new_scaler,
    torch_batches,
    whole_state,
    with_reference,
)

__all__ = ["LOOPS"]

torchvision_on_cpu.allow()


# --- Lightning --------------------------------------------------------------------------------------


def _lightning_module(parts: Sequence[list[TorchBatch]], guarded: bool, manual: bool) -> Any:
    import lightning.pytorch as pl

    class Trained(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, z, y = batch
            loss = loss_of(self.net(x, z), y)
            self.log("loss", loss.detach())
            if not manual:
                return loss
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(opt.scale(loss) if guarded else loss)
            opt.step()
            self.lr_schedulers().step()
            return None

        def on_train_batch_end(self, *args: Any) -> None:
            self.log("rate", self.optimizers(use_pl_optimizer=False).param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self.parameters())
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def train_dataloader(self) -> Any:
            part = parts[self.trainer.current_epoch]
            return torch.utils.data.DataLoader([tuple(batch) for batch in part], batch_size=None)

    return Trained()


def _lightning_trainer(fault: Fault | None, guarded: bool, folder: Path, epochs: int) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.plugins import MixedPrecision

    from stablenum_torch.integrations.lightning import GuardCallback

    half = fault is Fault.FP16_OVERFLOW  # "16-mixed" for a CPU, which Trainer(precision=...) does not allow
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[GuardCallback(guard_config(fault))] if guarded else [],
        plugins=MixedPrecision("16-mixed", "cpu", new_scaler(fault)) if half else None,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        reload_dataloaders_every_n_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _csv_rows(file: Path) -> tuple[Row, ...]:
    with file.open(encoding="utf-8") as lines:
        return tuple({key: float(value) for key, value in row.items()} for row in csv.DictReader(lines))


def lightning(fault: Fault | None, *, guarded: bool, without: bool = False, manual: bool = False) -> Outcome:
    """Lightning, in two epochs, with a checkpoint after the first."""
    parts = cut(torch_batches(fault, without=without), without=without)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = _lightning_module(parts, guarded, manual)
        trainer = _lightning_trainer(fault, guarded, folder / "whole", epochs=2)
        trainer.fit(module)
        rows = _csv_rows(folder / "whole" / "metrics.csv")

        half = _lightning_trainer(fault, guarded, folder / "first", epochs=1)
        half.fit(_lightning_module(parts, guarded, manual))
        half.save_checkpoint(folder / "half.ckpt")
        second = _lightning_module(parts, guarded, manual)
        resumed = _lightning_trainer(fault, guarded, folder / "second", epochs=2)
        resumed.fit(second, ckpt_path=folder / "half.ckpt")
    return Outcome(
        state=whole_state(module.net, trainer.optimizers[0]),
        log=tuple({name: row[name] for name in row if name != "rate"} for row in rows),
        schedule=tuple(float(row["rate"]) for row in rows),
        resumed=whole_state(second.net, resumed.optimizers[0]),
    )


# --- ignite -----------------------------------------------------------------------------------------


class _Ignite:
    """A trainer with its scheduler, its log and what a checkpoint saves."""

    def __init__(self, fault: Fault | None, guarded: bool) -> None:
        from ignite.engine import Engine, Events, create_supervised_trainer
        from ignite.handlers.param_scheduler import LRScheduler

        from stablenum_torch.integrations.ignite import GuardHandler

        self.model = Net(half=fault is Fault.FP16_OVERFLOW)
        self.opt = opt = make_optimizer(self.model.parameters())
        if guarded:
            self.opt = opt = stablenum_torch.wrap(opt, guard_config(fault), buffers=self.model)
            self.trainer = create_supervised_trainer(
                self.model,
                opt,
                lambda prediction, y: opt.scale(loss_of(prediction, y)),
                prepare_batch=lambda batch, **_: ((batch.x, batch.z), batch.y),
                model_fn=lambda model, inputs: model(*inputs),
            )
        else:  # the step that ignite's documentation shows
            self.trainer = Engine(functools.partial(self._plain_step, new_scaler(fault)))
        self.scheduler = LRScheduler(torch.optim.lr_scheduler.ExponentialLR(opt, GAMMA))
        advance: Any = self.scheduler
        if guarded:
            handler = GuardHandler(opt)
            handler.attach(self.trainer)
            advance = handler.hold(self.scheduler)
        self.rates: list[float] = []
        self.log: list[Row] = []
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, advance)
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED, self._note)
        self.saved = {"model": self.model, "optimizer": opt, "scheduler": self.scheduler}

    def _plain_step(self, scaler: torch.amp.GradScaler, engine: Any, batch: TorchBatch) -> float:
        self.model.train()
        self.opt.zero_grad()
        loss = loss_of(self.model(batch.x, batch.z), batch.y)
        scaler.scale(loss).backward()
        scaler.step(self.opt)
        scaler.update()
        return loss.item()

    def _note(self, engine: Any) -> None:
        self.rates.append(self.opt.param_groups[0]["lr"])
        self.log.append({"output": engine.state.output} | engine.state.metrics)


def ignite(fault: Fault | None, *, guarded: bool, without: bool = False) -> Outcome:
    """ignite's ``create_supervised_trainer`` or, alone, the step that its documentation shows."""
    from ignite.engine import Events
    from ignite.handlers import Checkpoint, DiskSaver

    before, after = cut(torch_batches(fault, without=without), without=without)
    made, second = _Ignite(fault, guarded), _Ignite(fault, guarded)
    with tempfile.TemporaryDirectory() as folder:
        saver = Checkpoint(made.saved, DiskSaver(folder))
        made.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=len(before)), saver)
        made.trainer.run(before + after, max_epochs=1)
        (file,) = Path(folder).glob("*.pt")
        Checkpoint.load_objects(second.saved, torch.load(file))
        second.trainer.run(after, max_epochs=1)
    return Outcome(
        state=whole_state(made.model, made.opt),
        log=tuple(made.log),
        schedule=tuple(made.rates),
        resumed=whole_state(second.model, second.opt),
    )


LOOPS: dict[str, Loop] = {
    "lightning": with_reference(lightning),
    "lightning-manual": with_reference(functools.partial(lightning, manual=True)),
    "ignite": with_reference(ignite),
    "fastai": with_reference(fastai),
}
