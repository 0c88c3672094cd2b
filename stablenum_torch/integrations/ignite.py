"""ignite: a handler that shows the guard's numbers in a trainer and holds its schedulers.

Tested with ignite 0.5.5.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from stablenum._support.one_line import one_line
from stablenum._support.partners import imported
from stablenum._support.public_names import present
from stablenum._support.settings_checks import check_callable
from stablenum.errors import bad_type
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["GuardHandler"]

imported(__name__, {"ignite": "pytorch-ignite"}, "0.5.3")
_engine = importlib.import_module("ignite.engine")


class GuardHandler:
    """Shows a guarded optimizer's last step in ``trainer.state.metrics``, and holds ignite's schedulers.

    ``create_supervised_trainer`` calls ``loss.backward()`` itself, so the guard sees only the gradients. Give
    it ``lambda y_pred, y: opt.scale(loss_fn(y_pred, y))`` as the loss function: the guard then sees the loss,
    too, and scales it if it has a loss scale (the trainer's output is then the scaled loss).

    Args:
        optimizer: the guarded optimizer with which the trainer trains.
        prefix: put in front of each name in ``trainer.state.metrics``.

    Raises:
        TypeError: ``optimizer`` is not guarded.

    Example:
        >>> import torch, stablenum_torch
        >>> from ignite.engine import create_supervised_trainer
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = stablenum_torch.wrap(torch.optim.SGD(model.parameters(), lr=0.1), buffers=model)
        >>> trainer = create_supervised_trainer(model, opt, torch.nn.functional.mse_loss)
        >>> GuardHandler(opt).attach(trainer)
        >>> batch = torch.full((4, 2), torch.nan), torch.zeros(4, 1)
        >>> trainer.run([batch]).metrics["guard/skipped_total"]
        1
    """

    def __init__(self, optimizer: GuardedOptimizer, prefix: str = "guard/") -> None:
        if not isinstance(optimizer, GuardedOptimizer):
            raise bad_type("optimizer", "what stablenum_torch.wrap returned", optimizer)
        self.optimizer, self.prefix = optimizer, prefix

    def __repr__(self) -> str:
        return one_line(self, optimizer=type(self.optimizer.inner), prefix=self.prefix)

    def attach(self, trainer: Any, event: Any = _engine.Events.ITERATION_COMPLETED) -> None:
        """Write the last step into ``trainer.state.metrics``, where ignite's loggers and handlers read it.

        Attach it before the loggers. Each time, the host waits for the device:
        ``Events.ITERATION_COMPLETED(every=100)`` makes that rare.
        """
        trainer.add_event_handler(event, self._show)

    def hold(self, scheduler: Callable[..., Any]) -> Callable[[Any], None]:
        """Return a handler that calls ``scheduler``, unless the last step was skipped.

        Args:
            scheduler: ``PiecewiseLinear``, ``LRScheduler`` or another handler that is called once for each
                step, before or after it. Save and load ``scheduler`` itself.

        Raises:
            TypeError: ``scheduler`` is not callable: torch's own are held by ``opt.hold(scheduler)``.
        """
        check_callable("scheduler", scheduler, "a scheduler among ignite's handlers")

        def held(trainer: Any) -> None:
            if not self.optimizer.step_was_skipped:
                scheduler(trainer)

        return held

    def _show(self, trainer: Any) -> None:
        trainer.state.metrics.update(self.optimizer.scalars(self.prefix))


__dir__ = present(globals())
