"""Lightning: a callback that guards the optimizers of a training.

Tested with Lightning 2.6.6, as ``lightning.pytorch`` and as ``pytorch_lightning``.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any, Unpack

import torch

from stablenum._support.one_line import one_line
from stablenum._support.partners import imported
from stablenum._support.public_names import present
from stablenum._support.user_warnings import warn
from stablenum.guard.config import GuardConfig, Settings, make_config
from stablenum.guard.replicas import steps_between_checks
from stablenum.rules.clipping import ClipByGlobalNorm, ClipByValue
from stablenum_torch._devices.groups import Groups, groups_of
from stablenum_torch._step.inner_protocol import put_in_place_of_scaler, take_lost_rules
from stablenum_torch._step.optimizer import GuardedOptimizer, wrap

__all__ = ["GuardCallback"]

_lightning = imported(
    __name__, {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}, "2.6"
)


_logger = logging.getLogger("stablenum")

# Formats that need no loss scale, by Lightning's names of precisions.
_WIDE_ENOUGH = {
    "32-true": "float32",
    "64-true": "float64",
    "bf16-mixed": "bfloat16",
    "bf16-true": "bfloat16",
}


class GuardCallback(_lightning.Callback):  # type: ignore[name-defined]
    """Guards the optimizers that ``configure_optimizers`` returned: ``Trainer(callbacks=GuardCallback())``.

    When training begins, each optimizer is replaced by a guarded one, which also keeps the model's buffers at
    a skipped step, and each scheduler with ``interval="step"`` and ``frequency=1`` is held at skipped steps.
    In manual optimization, where Lightning ignores interval and frequency, each scheduler is held, except
    ``ReduceLROnPlateau``; one that you step per epoch stands still if the epoch's last step is skipped.
    An optimizer that is guarded already keeps its settings. Every ``log_every_n_steps`` steps the guard's
    numbers are logged. Checkpoints contain the guard's state. With ``strategy="ddp"`` the ranks decide
    together without further settings.

    - ``precision="16-mixed"`` needs ``loss_scale="dynamic"`` (or another scale) here: the guard's scale then
      replaces Lightning's. With other precisions ``loss_scale`` must be None in automatic optimization,
      also on a CPU, where Lightning trains in bf16-mixed instead; in manual optimization, ``opt.scale``
      multiplies by the scale in any precision.
    - ``Trainer(gradient_clip_val=...)`` becomes the guard's clip rule, so that one place clips.
    - In manual optimization write ``self.manual_backward(opt.scale(loss))``, where ``opt`` comes from
      ``self.optimizers()``; without ``opt.scale`` the loss is neither checked, recorded nor scaled.
    - ``global_step`` and ``max_steps`` count skipped steps, too.

    Args:
        config: a :class:`stablenum.GuardConfig`.
        prefix: put in front of each logged name. With several optimizers, their index follows.
        check_replicas_every: after how many steps replicas are compared, as in
            :func:`stablenum_torch.wrap`.
        log: a file for the record of each step, as in :func:`stablenum_torch.wrap`; for one optimizer.
        **settings: fields of ``GuardConfig``: ``clip=1.0``, ``spike="skip"``...

    Attributes:
        optimizers: the guarded optimizers of the current training.

    Raises:
        ValueError: a setting has a wrong value. When training begins: the Trainer has a second
            ``GuardCallback``; an optimizer is guarded already, but settings were given here as well; both the
            Trainer and the guard clip; or precision and ``loss_scale`` do not fit together.

    Warns:
        UserWarning: a scheduler with ``interval="step"`` cannot be held, because of its frequency or because
            it is not made for one of the optimizers.
    """

    def __init__(
        self,
        config: GuardConfig | None = None,
        *,
        prefix: str = "guard/",
        check_replicas_every: int | None = None,
        log: str | os.PathLike[str] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self.config = make_config(config, settings)
        self.prefix, self._log = prefix, log
        self._check_replicas_every = steps_between_checks(check_replicas_every)
        self.optimizers: list[GuardedOptimizer] = []
        self._has_settings = bool(settings) or any(
            given is not None for given in (config, check_replicas_every, log)
        )
        self._taken: tuple[Any, Any] = (None, None)
        self._steps = 0  # the Trainer's global_step after the last batch

    def __repr__(self) -> str:
        return one_line(
            self,
            config=self.config,
            prefix=self.prefix,
            check_replicas_every=self._check_replicas_every,
            log=self._log,
            optimizers=len(self.optimizers),
        )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Guard the optimizers, hold the schedulers, and take clipping and loss scaling over."""
        _check_alone(trainer)
        config = _with_clip_of(trainer, self.config)
        groups = groups_of(trainer.strategy.model)
        if self._log is not None and len(trainer.optimizers) > 1:
            raise ValueError(
                "log must be None if there are several optimizers, because a log is of one guard; got "
                f"{os.fspath(self._log)!r}. Return guarded optimizers from configure_optimizers, each with a "
                "log of its own: wrap(optimizer, log=...)."
            )
        optimizers = [self._guarded(optimizer, config, pl_module, groups) for optimizer in trainer.optimizers]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        automatic = pl_module.automatic_optimization
        _check_loss_scale(trainer, optimizers, scaler, automatic)
        self.optimizers = trainer.optimizers = optimizers
        self._steps = trainer.global_step
        self._taken = trainer.gradient_clip_val, scaler
        trainer.gradient_clip_val = None
        if scaler is not None:
            trainer.precision_plugin.scaler = _GuardsAsScaler(optimizers, automatic)
            for optimizer in optimizers:
                put_in_place_of_scaler(optimizer, True)
        for scheduler in trainer.lr_scheduler_configs:
            if _is_stepped_with_the_optimizer(scheduler, automatic):
                _hold(scheduler, optimizers, automatic)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Say once that the guard starts afresh if the checkpoint that was loaded was made without one."""
        lost = [take_lost_rules(optimizer) for optimizer in self.optimizers]
        if any(rules is not None for rules in lost):
            _logger.warning(_starts_afresh([rule for rules in lost for rule in rules or ()]))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the Trainer back its own clipping and loss scaling."""
        self._give_back(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the Trainer back its own clipping and loss scaling."""
        self._give_back(trainer)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Give the loss to the guard. A loss that is to be scaled has been given by then."""
        if pl_module.automatic_optimization and not self.optimizers[0].scales_loss:
            self.optimizers[0].scale(loss)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the last step, if Lightning's loggers write in this one: the host waits to read it."""
        if not self._is_logged(trainer, pl_module):
            return
        for i, optimizer in enumerate(self.optimizers):
            place = self.prefix if len(self.optimizers) == 1 else f"{self.prefix}{i}/"
            pl_module.log_dict(optimizer.scalars(place))

    def _is_logged(self, trainer: Any, pl_module: Any) -> bool:
        """Return whether this batch had a step, and Lightning's loggers write after it."""
        before, self._steps = self._steps, trainer.global_step
        # Lightning counts the batches that had a step. In manual optimization, which does not accumulate,
        # these are all batches, whereas global_step counts the steps of each optimizer.
        automatic = pl_module.automatic_optimization
        count = trainer.global_step if automatic else trainer.fit_loop.total_batch_idx + 1
        every = trainer.log_every_n_steps
        return every > 0 and count % every == 0 and trainer.global_step != before

    def _guarded(
        self, optimizer: Any, config: GuardConfig, pl_module: Any, groups: Groups
    ) -> GuardedOptimizer:
        if not isinstance(optimizer, GuardedOptimizer):
            return wrap(
                optimizer,
                config,
                names=pl_module,
                buffers=pl_module,
                process_group=groups.parts,
                loss_group=groups.loss,
                check_replicas_every=self._check_replicas_every,
                log=self._log,
            )
        if self._has_settings or config != self.config:
            raise ValueError(
                "GuardCallback must have no settings and no log, and the Trainer no gradient_clip_val, if "
                f"configure_optimizers returns a guarded optimizer; got {config}. Give them to wrap, "
                "or return the optimizer without it."
            )
        return optimizer

    def _give_back(self, trainer: Any) -> None:
        (clip, scaler), self._taken = self._taken, (None, None)
        if clip is not None:
            trainer.gradient_clip_val = clip
        if scaler is not None:
            trainer.precision_plugin.scaler = scaler
            for optimizer in self.optimizers:
                put_in_place_of_scaler(optimizer, False)


class _GuardsAsScaler:
    """Stands where Lightning has its ``GradScaler``: the guards scale, and decide whether to step."""

    def __init__(self, optimizers: list[GuardedOptimizer], automatic: bool) -> None:
        self._optimizers, self._automatic = optimizers, automatic

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        # In manual optimization, the user says whose loss it is by calling opt.scale(loss).
        return self._optimizers[0].scale(loss) if self._automatic else loss

    def unscale_(self, optimizer: GuardedOptimizer) -> None:
        optimizer.unscale_()  # on_before_optimizer_step is documented to see unscaled gradients

    def step(self, optimizer: GuardedOptimizer, **kwargs: Any) -> Any:
        return optimizer.step(**kwargs)

    def update(self) -> None:
        pass  # the guard has done so in its step

    def state_dict(self) -> dict[str, Any]:
        return {}  # the scale is in the optimizer's state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def _starts_afresh(rules: list[str]) -> str:
    again = f", and these rules learn from scratch: {', '.join(dict.fromkeys(rules))}" if rules else ""
    return (
        "The checkpoint was made without a guard. The guard starts afresh: its steps count from 0"
        f"{again}. The next checkpoints contain its state."
    )


def _check_alone(trainer: Any) -> None:
    found = [callback for callback in trainer.callbacks if isinstance(callback, GuardCallback)]
    if len(found) > 1:
        raise ValueError(
            "callbacks of the Trainer must contain one GuardCallback, which guards all optimizers; got two, "
            f"with the prefixes {found[0].prefix!r} and {found[1].prefix!r}. Remove one of them."
        )


def _with_clip_of(trainer: Any, config: GuardConfig) -> GuardConfig:
    """Return the settings with the clip rule that the Trainer's arguments ask for."""
    bound = trainer.gradient_clip_val
    if not bound:
        return config
    if config.clip:
        raise ValueError(
            f"gradient_clip_val of the Trainer must be None if the guard clips; got {bound} beside "
            f"clip={config.clip}. One place has to clip: leave gradient_clip_val out."
        )
    by_value = trainer.gradient_clip_algorithm == "value"
    return dataclasses.replace(config, clip=ClipByValue(bound) if by_value else ClipByGlobalNorm(bound))


def _check_loss_scale(trainer: Any, optimizers: list[GuardedOptimizer], scaler: Any, automatic: bool) -> None:
    if scaler is not None and not all(optimizer.scales_loss for optimizer in optimizers):
        raise ValueError(
            f"precision={trainer.precision!r} needs a loss scale, which must be the guard's; got "
            "loss_scale=None. Write GuardCallback(loss_scale='dynamic')."
        )
    if scaler is None and automatic and any(optimizer.scales_loss for optimizer in optimizers):
        raise ValueError(
            f"loss_scale must be None with precision={trainer.precision!r}, in which Lightning scales no "
            f"loss. Leave loss_scale out{_instead_of_a_loss_scale(trainer)}"
        )


def _instead_of_a_loss_scale(trainer: Any) -> str:
    """Return the end of a message: why a precision needs no loss scale, or how to train with one."""
    on_cpu = trainer.strategy.root_device.type == "cpu"
    if trainer.precision == "bf16-mixed" and on_cpu:
        return (
            ": bfloat16 needs none, and on a CPU Lightning trains in bf16-mixed even with "
            "precision='16-mixed'. plugins=[MixedPrecision('16-mixed', 'cpu')] trains in float16 there."
        )
    if trainer.precision in _WIDE_ENOUGH:
        return f": {_WIDE_ENOUGH[trainer.precision]} needs none."
    mixed = "plugins=[MixedPrecision('16-mixed', 'cpu')]" if on_cpu else "precision='16-mixed'"
    return f", or train with {mixed}, which keeps the parameters in float32."


def _is_stepped_with_the_optimizer(config: Any, automatic: bool) -> bool:
    # Lightning sets reduce_on_plateau in automatic optimization only. In manual optimization the user steps
    # the scheduler, and the interval, by default "epoch", means nothing.
    if config.reduce_on_plateau or isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return False
    return config.interval == "step" or not automatic


def _hold(config: Any, optimizers: list[GuardedOptimizer], automatic: bool) -> None:
    """Hold a scheduler at the skipped steps of its optimizer, or warn that this cannot be done."""
    scheduler = config.scheduler
    of = getattr(scheduler, "optimizer", None)
    guards = [guarded for guarded in optimizers if of is guarded or of is guarded.inner]
    if guards and (config.frequency == 1 or not automatic):
        guards[0].hold(scheduler)
        return
    why = f"frequency={config.frequency} counts batches" if guards else "it has none of these optimizers"
    warn(f"{type(scheduler).__name__} does not stand still at skipped steps: {why}.", UserWarning)


__dir__ = present(globals())
