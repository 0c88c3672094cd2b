"""Hugging Face's training loops and PyTorch's own, alone and with a guard.

    outcome = LOOPS["trainer"](Fault.NAN_BATCH, guarded=True)
    judge(outcome)

A loop alone is written as its documentation says, and the guarded one differs from it in about two lines.
On a CPU, Accelerate and so each Trainer neither cast nor scale in float16, whatever ``mixed_precision`` or
``fp16`` says: for ``FP16_OVERFLOW`` their models compute in float16 by themselves.
"""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stablenum_torch
from benchmarks.partners import torchvision_on_cpu
from benchmarks.partners.batches import ROWS, guard_config
from benchmarks.partners.outcome import Fault, Outcome, Row
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
from benchmarks.partners.torch_texts import sentence_transformer_trainer, sft_trainer

__all__ = ["LOOPS", "UNREFERENCED", "quiet"]

torchvision_on_cpu.allow()

CLIP = 1.0


class Trained(nn.Module):
    """The common model with its loss, as a Trainer wants it."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__()
        self.net = Net(half=fault is Fault.FP16_OVERFLOW)

    def forward(self, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the loss of a batch, () float32."""
        return {"loss": loss_of(self.net(x, z), y)}


# --- plain PyTorch ------------------------------------------------------------------------------------


def plain(fault: Fault | None, *, guarded: bool, without: bool = False) -> Outcome:
    """A loop of one's own, with ``GradScaler`` and ``clip_grad_norm_`` or with a guard."""
    before, after = cut(torch_batches(fault, without=without), without=without)
    loop, second = _Plain(fault, guarded), _Plain(fault, guarded)
    loop.train(before)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({name: part.state_dict() for name, part in loop.parts.items()}, f"{folder}/all.pt")
        saved = torch.load(f"{folder}/all.pt")
    loop.train(after)
    for name, part in second.parts.items():
        part.load_state_dict(saved[name])
    second.train(after)
    return Outcome(
        state=whole_state(loop.model, loop.opt),
        log=tuple(loop.log),
        schedule=tuple(loop.rates),
        resumed=whole_state(second.model, second.opt),
    )


class _Plain:
    def __init__(self, fault: Fault | None, guarded: bool) -> None:
        self.model, self.guarded = Trained(fault), guarded
        self.opt: Any = make_optimizer(self.model.parameters())
        if guarded:
            self.opt = stablenum_torch.wrap(self.opt, guard_config(fault), clip=CLIP, buffers=self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, GAMMA)
        if guarded:
            self.opt.hold(self.scheduler)
        self.scaler = new_scaler(fault)
        self.parts = {"model": self.model, "opt": self.opt, "scheduler": self.scheduler}
        self.parts |= {} if guarded else {"scaler": self.scaler}
        self.log: list[Row] = []
        self.rates: list[float] = []

    def train(self, batches: list[TorchBatch]) -> None:
        for batch in batches:
            self.opt.zero_grad()
            loss = self.model(*batch)["loss"]
            if self.guarded:
                self.opt.backward(loss)
                self.opt.step()
                self.log.append(self.opt.scalars("guard/"))
            else:
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.opt)
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
                self.scaler.step(self.opt)
                self.scaler.update()
                self.log.append({"loss": loss.item(), "grad_norm": norm.item()})
            self.scheduler.step()
            self.rates.append(self.scheduler.get_last_lr()[0])


# --- Accelerate ---------------------------------------------------------------------------------------


def accelerate(fault: Fault | None, *, guarded: bool, without: bool = False, resume: bool = True) -> Outcome:
    """The loop of Accelerate's documentation, with its loader, scheduler, tracker, and saved state."""
    before, after = cut(torch_batches(fault, without=without), without=without)
    loop, resumed = _Accelerated(fault, guarded), None
    loop.train(before)
    with tempfile.TemporaryDirectory() as folder:
        if resume:
            loop.accelerator.save_state(folder)
        loop.train(after)
        state = whole_state(loop.module, loop.opt)
        if resume:
            second = _Accelerated(fault, guarded)
            second.accelerator.load_state(folder)
            second.train(after)
            resumed = whole_state(second.module, second.opt)
    return Outcome(state=state, log=tuple(loop.log), schedule=tuple(loop.rates), resumed=resumed)


class _Accelerated:
    def __init__(self, fault: Fault | None, guarded: bool) -> None:
        from accelerate import Accelerator
        from accelerate.tracking import GeneralTracker

        from stablenum_torch.integrations.accelerate import guard

        class Tracker(GeneralTracker):
            name, requires_logging_directory, tracker, rows = "rows", False, None, []

            def log(self, values: Any, step: Any = None, **kwargs: Any) -> None:
                self.rows.append(values)

        tracker = Tracker(_blank=True)
        tracker.rows = []
        self.log: list[Row] = tracker.rows
        self.accelerator = Accelerator(cpu=True, log_with=tracker)
        self.accelerator.init_trackers("rows")
        if guarded:
            guard(self.accelerator, guard_config(fault), clip=CLIP)
        self.module, self.guarded = Trained(fault), guarded
        opt = make_optimizer(self.module.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, GAMMA)
        self.model, self.opt, self.scheduler = self.accelerator.prepare(self.module, opt, scheduler)
        self.rates: list[float] = []

    def train(self, batches: list[TorchBatch]) -> None:
        rows = [row for batch in batches for row in zip(*batch, strict=True)]
        size = ROWS // self.accelerator.num_processes
        loader = self.accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=size))
        for batch in loader:
            loss = self.model(*batch)["loss"]
            self.accelerator.backward(loss)
            if not self.guarded:
                self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
            self.opt.step()
            self.scheduler.step()
            self.opt.zero_grad()
            seen = self.opt.optimizer.scalars("guard/") if self.guarded else {}
            self.accelerator.log({"loss": loss.item(), **seen})
            self.rates.append(self.scheduler.get_last_lr()[0])


# --- Trainer, TRL and sentence-transformers -----------------------------------------------------------


def trainer(
    fault: Fault | None, *, guarded: bool, without: bool = False, resume: bool = True, **given: Any
) -> Outcome:
    """``transformers.Trainer`` with an optimizer and a scheduler of one's own, and given arguments."""

    def make(folder: str) -> Any:
        from transformers import Trainer, TrainingArguments

        model = Trained(fault)
        made = torch_batches(fault, without=without)
        rows = [row for batch in made for row in zip(*batch, strict=True)]
        optimizer = make_optimizer(model.parameters())
        arguments = TrainingArguments(
            folder,
            **{
                "per_device_train_batch_size": ROWS,
                "num_train_epochs": 1,
                "fp16": fault is Fault.FP16_OVERFLOW,
                "train_sampling_strategy": "sequential",
                **quiet(),
                **given,
            },
        )
        return Trainer(
            model,
            arguments,
            train_dataset=[dict(zip(TorchBatch._fields, row, strict=True)) for row in rows],
            optimizers=(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)),
        )

    return _trained(make, fault, guarded, without, resume)


def sft(fault: Fault | None, *, guarded: bool, without: bool = False) -> Outcome:
    """TRL's ``SFTTrainer`` with a small language model, whose last layer meets the fault."""
    make = functools.partial(sft_trainer, fault, without, quiet())
    return _trained(make, fault, guarded, without)


def sentence_transformers(fault: Fault | None, *, guarded: bool, without: bool = False) -> Outcome:
    """``SentenceTransformerTrainer`` with embeddings and batch norm."""
    make = functools.partial(sentence_transformer_trainer, fault, without, quiet())
    return _trained(make, fault, guarded, without)


def quiet() -> dict[str, Any]:
    """Return arguments of a Trainer that stays on the CPU and logs each step, but prints nothing."""
    names = ("disable_tqdm", "use_cpu")
    return dict.fromkeys(names, True) | {
        "logging_steps": 1,
        "report_to": "none",
        "dataloader_pin_memory": False,
        "save_strategy": "steps",
    }


def _trained(
    make: Callable[[str], Any], fault: Fault | None, guarded: bool, without: bool, resume: bool = True
) -> Outcome:
    """Train to the end and, to resume, once more from the checkpoint in the middle."""
    saved_at = len(cut(torch_batches(fault, without=without), without=without)[0])
    with tempfile.TemporaryDirectory() as folder, _silence():
        runs = [_started(make, folder, saved_at, fault, guarded) for _ in range(1 + resume)]
        runs[0].train()
        for second in runs[1:]:
            second.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{saved_at}")))
    rows = [row for row in runs[0].state.log_history if "loss" in row]
    state, *resumed = [whole_state(made.model, made.optimizer) for made in runs]
    return Outcome(
        state=state,
        log=tuple(rows),
        schedule=tuple(row["learning_rate"] for row in rows),
        resumed=resumed[0] if resumed else None,
    )


def _started(
    make: Callable[[str], Any], folder: str, saved_at: int, fault: Fault | None, guarded: bool
) -> Any:
    from transformers import PrinterCallback

    from stablenum_torch.integrations.transformers import guard

    made = make(folder)
    made.args.save_steps = saved_at
    made.remove_callback(PrinterCallback)
    return guard(made, guard_config(fault)) if guarded else made


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


UNREFERENCED: dict[str, Loop] = {
    "plain": plain,
    "accelerate": accelerate,
    "trainer": trainer,
    "trl-sft": sft,
    "sentence-transformers": sentence_transformers,
}
LOOPS: dict[str, Loop] = {name: with_reference(loop) for name, loop in UNREFERENCED.items()}
