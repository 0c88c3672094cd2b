"""fastai: a callback that gives each loss to the guard and, with a loss scale, computes in float16.

Tested with fastai 2.8.12.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from stablenum._support.one_line import one_line
from stablenum._support.partners import imported
from stablenum._support.public_names import present
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["GuardCallback"]

imported(__name__, {"fastai": "fastai"}, "2.8")
_fastai = importlib.import_module("fastai.callback.core")
_torch_core = importlib.import_module("fastai.torch_core")

# Callbacks that do what the guard does, before it: MixedPrecision skips steps, of which the guard then knows
# nothing, and GradientClip clips gradients that are still multiplied by the loss scale.
_RIVALS = {
    "MixedPrecision": 'Give the guard loss_scale="dynamic" instead.',
    "GradientClip": "Give the guard clip=1.0, or another bound, instead.",
}


class GuardCallback(_fastai.Callback):  # type: ignore[name-defined]
    """Gives the losses of a ``Learner`` to its guarded optimizer: ``Learner(..., cbs=GuardCallback())``.

    The optimizer function makes the guarded optimizer::

        def adamw(params, **hypers):
            return stablenum_torch.wrap(torch.optim.AdamW(params, **hypers), buffers=model)

        learn = Learner(dls, model, opt_func=partial(OptimWrapper, opt=adamw), cbs=GuardCallback())

    If the guard has a loss scale, the forward pass runs under its ``autocast()``, and predictions are made
    float32 before the loss, as with fastai's ``MixedPrecision``, which must be left out. fastai's schedules
    depend on the position in the training, so they go on at a skipped step.

    Attributes:
        optimizer: the guarded optimizer of the current training; None for predictions before any training.
        skipped: the ``train_iter`` of each batch of the current training whose step was skipped.

    Raises:
        TypeError: when training begins, the optimizer is not guarded.
        ValueError: when training begins, ``MixedPrecision`` or ``GradientClip`` is among the callbacks.
    """

    order = 10  # that of MixedPrecision, in whose place it stands
    optimizer: Any
    skipped: list[int]

    def __init__(self) -> None:
        self._autocast = contextlib.ExitStack()

    def __repr__(self) -> str:
        # Not self.optimizer: what a callback of fastai does not have is looked up in its Learner.
        optimizer, skipped = self.__dict__.get("optimizer"), self.__dict__.get("skipped", ())
        inner = None if optimizer is None else type(optimizer.inner)
        return one_line(self, optimizer=inner, skipped=len(skipped))

    def before_fit(self) -> None:
        """Find the guarded optimizer. There is none where a model that has not been trained predicts."""
        self.after_loss()  # in case that the last run was interrupted in a forward pass
        wrapper = self.learn.opt
        optimizer = getattr(wrapper, "opt", None)
        if wrapper is not None and not isinstance(optimizer, GuardedOptimizer):
            raise TypeError(
                "opt_func must make an OptimWrapper around a guarded optimizer, as in partial(OptimWrapper, "
                "opt=lambda params, **hypers: wrap(torch.optim.AdamW(params, **hypers))); got "
                f"{type(wrapper).__name__} with {type(optimizer).__name__}."
            )
        for callback in self.learn.cbs:
            if (name := type(callback).__name__) in _RIVALS:
                raise ValueError(f"cbs must not contain {name} beside a guard. {_RIVALS[name]}")
        self.optimizer, self.skipped = optimizer, []

    @property
    def _scales_loss(self) -> bool:
        return self.optimizer is not None and self.optimizer.scales_loss

    def before_batch(self) -> None:
        """Begin to compute in float16, if the guard has a loss scale."""
        if self._scales_loss:
            self._autocast.enter_context(self.optimizer.autocast())

    def after_pred(self) -> None:
        """Make predictions float32, so that the loss is computed in float32."""
        if self._scales_loss:
            self.learn.pred = _torch_core.to_float(self.learn.pred)

    def after_loss(self) -> None:
        """Compute in float32 again, also if the batch is cancelled before there is a loss."""
        self._autocast.close()

    after_cancel_batch = after_fit = after_loss

    def before_backward(self) -> None:
        """Give the loss to the guard, which scales it."""
        self.learn.loss_grad = self.optimizer.scale(self.learn.loss_grad)

    def after_step(self) -> None:
        """Note a skipped step."""
        if self.optimizer.step_was_skipped:
            self.skipped.append(self.learn.train_iter)


__dir__ = present(globals())
