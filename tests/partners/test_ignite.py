"""The guard in ignite's trainers: schedulers, logs, checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from ignite.handlers import TerminateOnNan
from ignite.handlers.param_scheduler import LRScheduler, PiecewiseLinear

import stablenum_torch
from benchmarks.partners.judge import judge, same_bits
from benchmarks.partners.outcome import Fault
from benchmarks.partners.torch_parts import whole_state
from benchmarks.partners.torch_trainers import LOOPS
from stablenum_torch.integrations.ignite import GuardHandler

BAD = 2


def data(bad: int | None = BAD) -> list[tuple[torch.Tensor, torch.Tensor]]:
    xs = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    if bad is not None:
        xs[bad] = xs[bad] * math.nan
    return [(x, torch.ones(8, 1)) for x in xs]


def without(batches: list[Any], *indices: int) -> list[Any]:
    return [batch for i, batch in enumerate(batches) if i not in indices]


def made(**settings: Any) -> tuple[torch.nn.Module, Any, Engine]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    opt = stablenum_torch.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), buffers=model)

    def loss_fn(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return opt.scale(torch.nn.functional.mse_loss(prediction, y))

    return model, opt, create_supervised_trainer(model, opt, loss_fn, **settings)


@pytest.mark.parametrize("fault", Fault)
def test_a_guarded_run_ends_bit_equal_to_the_run_without_the_bad_batch(fault):
    verdict = judge(LOOPS["ignite"](fault, guarded=True))
    assert verdict.finite
    assert verdict.bit_equal
    assert verdict.visible
    assert verdict.scheduler_held
    assert verdict.resumes


@pytest.mark.parametrize("fault", Fault)
def test_trap_ignite_alone_keeps_what_the_bad_batch_did(fault):
    verdict = judge(LOOPS["ignite"](fault, guarded=False))
    assert not verdict.bit_equal
    assert not verdict.scheduler_held
    assert verdict.finite == (fault is Fault.LOSS_SPIKE)


@pytest.mark.parametrize("event", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
@pytest.mark.parametrize(
    "scheduler_of",
    [
        lambda opt: LRScheduler(torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)),
        lambda opt: PiecewiseLinear(opt, "lr", milestones_values=[(0, 0.0), (5, 0.5)]),
    ],
    ids=["LRScheduler", "PiecewiseLinear"],
)
def test_a_scheduler_stands_still_at_a_skipped_step(event, scheduler_of):
    rates, states = [], []
    for batches in (data(), without(data(), BAD)):
        model, opt, trainer = made()
        trainer.add_event_handler(event, GuardHandler(opt).hold(scheduler_of(opt)))
        rates.append([])
        trainer.add_event_handler(event, lambda _, opt=opt: rates[-1].append(opt.param_groups[0]["lr"]))
        trainer.run(batches)
        states.append(whole_state(model, opt))
    assert same_bits(*states)
    assert without(rates[0], BAD + (event is Events.ITERATION_STARTED)) == rates[1]


def test_accumulated_micro_batches_are_skipped_together():
    states = []
    for batches in (data()[1:], data()[3:]):
        model, opt, trainer = made(gradient_accumulation_steps=2)
        trainer.run(batches)
        states.append(whole_state(model, opt))
    assert same_bits(*states)


def test_ignites_logger_writes_the_skip(tmp_path):
    from ignite.handlers.tensorboard_logger import TensorboardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, opt, trainer = made()
    GuardHandler(opt).attach(trainer)
    with TensorboardLogger(log_dir=str(tmp_path)) as logger:
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, tag="training", metric_names="all")
        trainer.run(data())
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    skipped = [event.value for event in events.Scalars("training/guard/skipped_total")]
    assert skipped == [0, 0, 1, 1, 1]
    losses = [event.value for event in events.Scalars("training/guard/loss")]
    assert [math.isnan(loss) for loss in losses] == [i == BAD for i in range(5)]


def test_trap_terminate_on_nan_ends_the_run_at_a_step_that_was_skipped():
    model, _, trainer = made()
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    trainer.run(data())
    assert trainer.state.iteration == BAD + 1
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_the_handler_takes_a_guarded_optimizer_and_a_handler():
    opt = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    with pytest.raises(TypeError, match=r"optimizer must be what stablenum_torch.wrap returned; got .*SGD"):
        GuardHandler(opt)
    guarded = stablenum_torch.wrap(opt)
    with pytest.raises(TypeError, match="scheduler must be a scheduler among ignite's handlers"):
        GuardHandler(guarded).hold(torch.optim.lr_scheduler.ExponentialLR(guarded, 0.5))


def test_the_handler_is_shown_in_one_line():
    opt = stablenum_torch.wrap(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
    assert repr(GuardHandler(opt, "g/")) == "GuardHandler(optimizer=SGD, prefix='g/')"
