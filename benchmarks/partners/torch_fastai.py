"""fastai's ``Learner``, alone and with a guard."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

import stablenum_torch
from benchmarks.partners.batches import guard_config
from benchmarks.partners.outcome import Fault, Outcome, Row
from benchmarks.partners.torch_parts import (
    RATE,
    Net,
    TorchBatch,
    cut,
    loss_of,
    make_optimizer,
    new_scaler,
    torch_batches,
    whole_state,
)

__all__ = ["fastai"]


def _in_half_precision(fault: Fault | None) -> Any:
    """Return what fastai's ``MixedPrecision``, which is for CUDA only, would be for a CPU."""
    from fastai.callback.core import Callback, CancelStepException

    class InHalfPrecision(Callback):
        order, skipped = 10, False

        def __init__(self) -> None:
            self.scaler = new_scaler(fault)

        def before_batch(self) -> None:
            self.context = torch.autocast("cpu", torch.float16)
            self.context.__enter__()

        def after_loss(self) -> None:
            self.context.__exit__(None, None, None)

        def before_backward(self) -> None:
            self.learn.loss_grad = self.scaler.scale(self.learn.loss_grad)

        def before_step(self) -> None:
            self.skipped = True
            self.scaler.step(self)
            self.scaler.update()
            if self.skipped:
                raise CancelStepException

        @property
        def param_groups(self) -> Any:
            return self.opt.param_groups

        def step(self) -> None:
            self.skipped = False

    return InHalfPrecision()


def _learner(fault: Fault | None, guarded: bool, part: Sequence[TorchBatch], folder: str) -> Any:
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.optimizer import OptimWrapper

    from stablenum_torch.integrations.fastai import GuardCallback

    model = Net()

    def guarded_optimizer(params: Any, **hypers: Any) -> torch.optim.Optimizer:
        return stablenum_torch.wrap(make_optimizer(params, **hypers), guard_config(fault), buffers=model)

    loader = DataLoader([tuple(batch) for batch in part], bs=None, shuffle=False, num_workers=0)
    alone = [_in_half_precision(fault)] if fault is Fault.FP16_OVERFLOW else []
    learn = Learner(
        DataLoaders(loader, loader),
        model,
        loss_func=loss_of,
        opt_func=functools.partial(OptimWrapper, opt=guarded_optimizer if guarded else make_optimizer),
        lr=RATE,
        cbs=[GuardCallback()] if guarded else alone,
        path=folder,
        train_bn=False,
    )
    learn.logger = lambda row: None
    return learn


def fastai(fault: Fault | None, *, guarded: bool, without: bool = False) -> Outcome:
    """fastai's ``Learner``, at a constant rate: its schedules depend on the position in the training."""
    before, after = cut(torch_batches(fault, without=without), without=without)
    with tempfile.TemporaryDirectory() as folder:
        learn = _learner(fault, guarded, before + after, folder)
        learn.fit(1)
        first, second = (_learner(fault, guarded, part, folder) for part in (before, after))
        first.fit(1)
        first.save("half")
        second.load("half")
        second.fit(1)
    log: list[Row] = [{"smooth_loss": float(loss)} for loss in learn.recorder.losses]
    if guarded:
        log = [{**row, "skipped": i in learn.guard.skipped} for i, row in enumerate(log)]
    return Outcome(
        state=whole_state(learn.model, learn.opt.opt),
        log=tuple(log),
        schedule=tuple(float(rate) for rate in learn.recorder.lrs),
        resumed=whole_state(second.model, second.opt.opt),
    )
