"""The guard in Hugging Face Accelerate: ``guard(accelerator, clip=1.0)`` before ``accelerator.prepare``.

Tested with accelerate 1.0.0 and 1.15.0 on a CPU, in one process and in two (DDP), in float32 and bfloat16;
not tested with FSDP.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stablenum._support.mixins import Mixin, mix_in
from stablenum._support.one_line import one_line
from stablenum._support.partners import imported
from stablenum._support.public_names import present
from stablenum._support.user_warnings import warn
from stablenum.errors import bad_type
from stablenum.guard.config import GuardConfig, Settings, make_config
from stablenum.guard.replicas import steps_between_checks
from stablenum_torch._step.optimizer import GuardedOptimizer, wrap

__all__ = ["GuardedAcceleratedOptimizer", "guard"]

_accelerate = imported(__name__, {"accelerate": "accelerate"}, "1.0")
_AcceleratedOptimizer = _accelerate.optimizer.AcceleratedOptimizer
_DistributedType = _accelerate.utils.DistributedType

A = TypeVar("A")


def guard(
    accelerator: A,
    config: GuardConfig | None = None,
    *,
    check_replicas_every: int | None = None,
    log: str | os.PathLike[str] | None = None,
    **settings: Unpack[Settings],
) -> A:
    """Guard every optimizer that this accelerator prepares from now on.

    Call it between ``Accelerator(...)`` and ``accelerator.prepare(...)``; the loop stays as it is.
    ``accelerator.backward`` gives the loss to the guard and multiplies it by the loss scale. A skipped step
    keeps the parameters, the optimizer's state and the buffers of the prepared model; prepared schedulers
    stand still, and ``accelerator.optimizer_step_was_skipped`` is True. ``save_state`` and ``load_state``
    include the guard. The prepared optimizer's ``optimizer`` is the
    :class:`stablenum_torch.GuardedOptimizer`, for logging too::

        accelerator.log({"loss": loss.item(), **opt.optimizer.scalars("guard/")}, step=step)

    Let the guard clip: ``accelerator.clip_grad_norm_`` still works, but clips before the guard measures.

    If several optimizers are prepared, it is not known which of them a loss belongs to: losses are then
    neither checked nor recorded, and no loss scale is possible. Processes that train together (DDP) decide
    together: a step is judged by the mean of their losses. They must therefore step equally often, which
    rules out ``accelerator.join_uneven_inputs``.

    Args:
        accelerator: an ``accelerate.Accelerator`` that has not prepared an optimizer yet.
        config: a :class:`stablenum.GuardConfig`.
        check_replicas_every: after how many steps replicas are compared, as in
            :func:`stablenum_torch.wrap`.
        log: a file for the record of each step, as in :func:`stablenum_torch.wrap`.
        **settings: fields of ``GuardConfig``: ``clip=1.0``, ``spike="skip"``... With
            ``mixed_precision="fp16"`` give ``loss_scale="dynamic"``, which replaces Accelerate's GradScaler.

    Returns:
        ``accelerator``, the same object; its class becomes a subclass of the one it had.

    Raises:
        TypeError: ``accelerator`` is not an Accelerator, or a setting is unknown.
        ValueError: a setting has a wrong value; ``loss_scale`` is None although Accelerate has a GradScaler;
            or DeepSpeed or Megatron-LM steps the optimizer, where no guard can look. In ``prepare``: there is
            a ``log`` or a loss scale, and a second optimizer.
        RuntimeError: ``accelerator`` is already guarded.

    Example:
        >>> import accelerate
        >>> accelerator = guard(accelerate.Accelerator(cpu=True), clip=1.0)
        >>> model = torch.nn.Linear(3, 1)
        >>> model, opt = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        >>> accelerator.backward(model(torch.full((2, 3), float("nan"))).sum())
        >>> opt.step()
        >>> opt.step_was_skipped, opt.optimizer.last["reason"].name
        (True, 'NONFINITE_LOSS')
    """
    known: Any = accelerator
    if not isinstance(accelerator, _accelerate.Accelerator):
        raise bad_type("accelerator", "an accelerate.Accelerator", accelerator)
    if isinstance(accelerator, _Guarding):
        raise RuntimeError("accelerator is already guarded. Make another Accelerator for other settings.")
    made, every = make_config(config, settings), steps_between_checks(check_replicas_every)
    if known.distributed_type in (_DistributedType.DEEPSPEED, _DistributedType.MEGATRON_LM):
        raise ValueError(
            "accelerator must leave the optimizer's step to the optimizer; got distributed_type "
            f"{known.distributed_type.value}, whose engine computes it. Use DDP."
        )
    if known.scaler is not None:
        if made.loss_scale is None:
            raise ValueError(
                "loss_scale must be set if Accelerate has a GradScaler (mixed_precision='fp16'), because the "
                "guard's takes its place; got None. Write guard(..., loss_scale='dynamic')."
            )
        known.scaler = None
    # MULTI_CPU, MULTI_GPU...: DistributedDataParallel; under FSDP, parameters know their ranks themselves.
    data_parallel = str(known.distributed_type.value).startswith("MULTI_")
    known.stablenum = _Guards(made, data_parallel, every, log)
    return mix_in(_Guarding, accelerator)


@dataclass
class _Guards:
    """What a guarded accelerator knows: settings, the models that it prepared, and the optimizers.

    Attributes:
        data_parallel: whether all processes have the same parameters and step together.
        check_replicas_every: after how many steps replicas are compared.
        log: where the record goes.
    """

    config: GuardConfig
    data_parallel: bool
    check_replicas_every: int | None
    log: str | os.PathLike[str] | None
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[GuardedOptimizer] = field(default_factory=list)

    def know(self, *found: Any) -> None:
        """Remember which of the objects are models."""
        known = {id(model) for model in self.models}
        self.models += [one for one in found if isinstance(one, nn.Module) and id(one) not in known]

    def wrapped(self, optimizer: Optimizer) -> GuardedOptimizer:
        """Return the optimizer guarded, with the names and the buffers of the models that it steps."""
        if self.config.loss_scale is not None and self.optimizers:
            raise ValueError(
                "loss_scale must be None if several optimizers are prepared, because accelerator.backward "
                f"multiplies a loss by one scale only; got {self.config.loss_scale}. Use one optimizer with "
                "several parameter groups."
            )
        if self.log is not None and self.optimizers:
            raise ValueError(
                "log must be None if several optimizers are prepared, because a log is of one guard; got "
                f"{os.fspath(self.log)!r}."
            )
        steps = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [model for model in self.models if any(id(p) in steps for p in model.parameters())]
        module = mine[0] if len(mine) == 1 else nn.ModuleList(mine) if mine else None
        together = torch.distributed.group.WORLD if self.data_parallel else None
        return wrap(
            optimizer,
            self.config,
            names=module,
            buffers=module,
            loss_group=together,
            check_replicas_every=self.check_replicas_every,
            log=self.log,
        )


class GuardedAcceleratedOptimizer(_AcceleratedOptimizer):  # type: ignore[misc, valid-type]
    """The optimizer that a guarded accelerator prepares.

    Attributes:
        optimizer: the :class:`stablenum_torch.GuardedOptimizer`, with ``last``, ``history()``, ``scalars()``.
    """

    def __repr__(self) -> str:
        return one_line(self, config=self.optimizer.config, optimizer=type(self.optimizer.inner))

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, for whatever reason. Reading it waits for the device."""
        return bool(super().step_was_skipped or self.optimizer.step_was_skipped)


class _Guarding(Mixin):
    """Methods in front of those of an accelerator's own class."""

    stablenum: _Guards
    gradient_accumulation_steps: int
    distributed_type: Any

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        # The optimizer may stand before its model in the arguments.
        self.stablenum.know(*args)
        return super().prepare(*args, **kwargs)  # type: ignore[misc]

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        self.stablenum.know(model)
        return super().prepare_model(model, *args, **kwargs)  # type: ignore[misc]

    def prepare_optimizer(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, _AcceleratedOptimizer):
            optimizer = self.stablenum.wrapped(optimizer)
        elif not isinstance(optimizer, GuardedAcceleratedOptimizer):
            raise RuntimeError(
                "optimizer was prepared without a guard. Call guard(accelerator) before the first "
                "accelerator.prepare, and give it the original optimizer."
            )
        prepared = super().prepare_optimizer(optimizer, *args, **kwargs)  # type: ignore[misc]
        prepared.__class__ = GuardedAcceleratedOptimizer
        if prepared.optimizer not in self.stablenum.optimizers:
            self.stablenum.optimizers.append(prepared.optimizer)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = super().prepare_scheduler(scheduler)  # type: ignore[misc]
        # Accelerate does not find an optimizer inside a guard: a skip of any would then hold the scheduler.
        of = getattr(scheduler, "optimizer", None)
        own = [one for one in prepared.optimizers if of is one.optimizer or of is one.optimizer.inner]
        prepared.optimizers = own or prepared.optimizers
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        self.stablenum = replace(self.stablenum, models=[], optimizers=[])
        return super().free_memory(*objects)  # type: ignore[misc]

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        guards = self.stablenum.optimizers
        if not guards:
            raise RuntimeError(
                "accelerator has no guarded optimizer. Call guard(accelerator) before accelerator.prepare."
            )
        if len(guards) > 1:
            super().backward(loss, **kwargs)  # type: ignore[misc]
        else:
            guards[0].backward(loss / self.gradient_accumulation_steps, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        given = self.stablenum.optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, tuple | list) else [given]:
            (one.optimizer if isinstance(one, _AcceleratedOptimizer) else one).unscale_()

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        if max_norm == math.inf and self.distributed_type != _DistributedType.FSDP:
            # Only the norm is wanted. Multiplied by inf / inf, all gradients would be NaN where one is inf.
            self.unscale_gradients()
            found = [p.grad for p in parameters if p.grad is not None]
            return torch.nn.utils.get_total_norm(found, norm_type)
        if max_norm != math.inf:
            _warn_of_clipping("clip_grad_norm_")
        return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[misc]

    def clip_grad_value_(self, *args: Any, **kwargs: Any) -> None:
        _warn_of_clipping("clip_grad_value_")
        super().clip_grad_value_(*args, **kwargs)  # type: ignore[misc]


def _warn_of_clipping(method: str) -> None:
    warn(
        f"accelerator.{method} clips before the guard looks: it then records norms after clipping, its spike "
        "rule has nothing to compare, and clipping by value hides an inf. Let the guard clip instead: "
        "guard(accelerator, clip=1.0)."
    )


__dir__ = present(globals())
