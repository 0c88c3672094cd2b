"""The guard in Hugging Face's ``Trainer``: ``guard(trainer, ...)`` before ``trainer.train()``.

TRL's and sentence-transformers' trainers are subclasses of it. Tested with transformers 5.24.0 (a short
training also with 5.0.0), trl 1.16.0 and sentence-transformers 6.2.0.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from typing import Any, TypeVar, Unpack

from stablenum._support.mixins import Mixin, mix_in
from stablenum._support.partners import imported
from stablenum._support.public_names import present
from stablenum.errors import bad_type
from stablenum.guard.config import GuardConfig, Settings, make_config
from stablenum.guard.reasons import Reason
from stablenum_torch.integrations import accelerate

__all__ = ["guard"]

_transformers = imported(__name__, {"transformers": "transformers"}, "5.0")
_accelerate = imported(__name__, {"accelerate": "accelerate"}, "1.0")

T = TypeVar("T")


def guard(
    trainer: T,
    config: GuardConfig | None = None,
    *,
    check_replicas_every: int | None = None,
    log: str | os.PathLike[str] | None = None,
    **settings: Unpack[Settings],
) -> T:
    """Guard the optimizer of a ``Trainer``, whether the Trainer makes it or was given it.

    Call it between ``Trainer(...)`` and ``trainer.train()``, with or without ``resume_from_checkpoint``. A
    skipped step keeps the parameters, the optimizer's state, the model's buffers and the learning rate,
    however the trainer computes the loss. Checkpoints include the guard.

    ``global_step`` and ``max_steps`` count batches, so skipped steps too; the scheduler counts applied steps.
    With gradient accumulation, one bad batch skips the whole step that it belongs to.

    Entries of the training log, and so TensorBoard, W&B and others, get the keys of
    :meth:`stablenum_torch.GuardedOptimizer.scalars` with the prefix ``guard/``. A skipped step is always
    logged (except with ``logging_strategy="no"``). If its loss is NaN or inf, so is ``loss`` in that entry;
    only the final ``train_loss`` follows ``logging_nan_inf_filter``, which replaces such losses by a mean.

    Only the guard clips. Without a clip rule it gets the bound ``max_grad_norm`` of the arguments, by default
    1; ``max_grad_norm=0`` means none. ``trainer.args`` becomes a copy in which ``max_grad_norm`` is 0.

    Args:
        trainer: a ``transformers.Trainer``, or a subclass that leaves the step to it, as those of TRL and
            sentence-transformers do.
        config: a :class:`stablenum.GuardConfig`.
        check_replicas_every: after how many steps replicas are compared, as in
            :func:`stablenum_torch.wrap`.
        log: a file for the record of each step, as in :func:`stablenum_torch.wrap`.
        **settings: fields of ``GuardConfig``: ``clip=1.0``, ``spike="skip"``... With ``fp16=True`` give
            ``loss_scale="dynamic"``, which replaces Accelerate's GradScaler.

    Returns:
        ``trainer``, the same object; its class becomes a subclass of the one it had, and
        ``trainer.accelerator`` is guarded (:func:`stablenum_torch.integrations.accelerate.guard`).

    Raises:
        TypeError: ``trainer`` is not a Trainer, or a setting is unknown.
        ValueError: a setting has a wrong value, or does not fit how the Trainer trains: see
            :func:`stablenum_torch.integrations.accelerate.guard`.
        RuntimeError: ``trainer`` is already guarded, or has already trained without a guard. In ``train()``:
            the optimizer is not the guarded one.

    Example:
        >>> import tempfile, torch
        >>> from transformers import PrinterCallback, Trainer, TrainingArguments
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return {"loss": super().forward(x).square().mean()}
        >>> rows = [{"x": torch.ones(3)}, {"x": torch.full((3,), float("nan"))}]
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), per_device_train_batch_size=1, max_steps=4, logging_steps=1, use_cpu=True,
        ...     report_to="none", disable_tqdm=True, save_strategy="no", log_level="error")
        >>> trainer = guard(Trainer(Model(3, 1), args, train_dataset=rows))
        >>> trainer.remove_callback(PrinterCallback)
        >>> _ = trainer.train()
        >>> trainer.optimizer.optimizer.last["skipped_total"]
        2
    """
    known: Any = trainer
    if not isinstance(trainer, _transformers.Trainer):
        raise bad_type("trainer", "a transformers.Trainer", trainer)
    _check_fresh(trainer)
    made = make_config(config, settings)
    if not made.clip and known.args.max_grad_norm > 0:
        made = dataclasses.replace(made, clip=known.args.max_grad_norm)
    accelerate.guard(known.accelerator, made, check_replicas_every=check_replicas_every, log=log)
    known.args = copy.copy(known.args)  # the caller's may be for other trainers, too
    known.args.max_grad_norm = 0.0
    known.add_callback(_LogSkips())
    return mix_in(_Logging, trainer)


def _check_fresh(trainer: Any) -> None:
    if isinstance(trainer, _Logging):
        raise RuntimeError("trainer is already guarded. Make another Trainer for other settings.")
    if isinstance(trainer.optimizer, _accelerate.optimizer.AcceleratedOptimizer):  # train() has prepared it
        raise RuntimeError(
            "trainer has already trained, and its optimizer was prepared without a guard. Make a new Trainer "
            "and call guard(trainer) before trainer.train()."
        )


class _LogSkips(_transformers.TrainerCallback):  # type: ignore[name-defined]
    """Has each skipped step logged."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        if not isinstance(optimizer, accelerate.GuardedAcceleratedOptimizer):
            raise RuntimeError(
                "the Trainer's optimizer is not guarded: its accelerator or its optimizer has been replaced "
                "since guard(trainer), as hyperparameter_search does. Call guard on a new Trainer."
            )

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> Any:
        if optimizer.step_was_skipped and args.logging_strategy != "no":
            control.should_log = True
        return control


class _Logging(Mixin):
    """Methods in front of those of a trainer's own class."""

    optimizer: Any

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        guarded = isinstance(self.optimizer, accelerate.GuardedAcceleratedOptimizer)
        if guarded and "loss" in logs:  # and not "eval_loss" or "train_loss"
            seen = self.optimizer.optimizer.scalars("guard/")
            if not math.isfinite(seen.get("guard/loss", 0.0)):
                logs["loss"] = seen["guard/loss"]  # logging_nan_inf_filter has put some other number there
            # Still a number, as loggers want, but one that is printed by its name.
            logs.update(seen | {"guard/reason": Reason(int(seen["guard/reason"]))})
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


__dir__ = present(globals())
