"""``opt.hold``: a scheduler that stands still at a skipped step."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import stablenum_torch

FACTORS = (1.0, 1.0, float("nan"), 1.0, float("inf"), float("inf"), 1.0)
GOOD = tuple(f for f in FACTORS if f == 1.0)

SCHEDULERS: dict[str, Any] = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=12),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}  # fmt: skip


def guarded() -> stablenum_torch.GuardedOptimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    return stablenum_torch.wrap(torch.optim.SGD([weight], lr=1.0, momentum=0.9))


def train(opt: Any, scheduler: Any, factors: tuple[float, ...]) -> list[float]:
    """The learning rate after each step."""
    rates = []
    for factor in factors:
        opt.zero_grad()
        opt.backward((factor * opt.param_groups[0]["params"][0]).sum())
        opt.step()
        scheduler.step()
        rates.append(opt.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_held_scheduler_ends_where_one_without_the_bad_steps_ends(name: str) -> None:
    opt, reference = guarded(), guarded()
    scheduler, plain = opt.hold(SCHEDULERS[name](opt)), SCHEDULERS[name](reference)
    rates = train(opt, scheduler, FACTORS)
    expected = train(reference, plain, GOOD)
    assert [r for r, f in zip(rates, FACTORS, strict=True) if f == 1.0] == expected
    assert set(scheduler.state_dict()) == set(plain.state_dict())
    assert scheduler.get_last_lr() == plain.get_last_lr()


def test_a_plain_scheduler_moves_on_at_a_skip() -> None:
    opt, reference = guarded(), guarded()
    rates = train(opt, SCHEDULERS["step"](opt), FACTORS)
    assert rates[-1] < train(reference, SCHEDULERS["step"](reference), GOOD)[-1]


def test_the_scheduler_stays_the_same_object_of_its_class() -> None:
    opt = guarded()
    scheduler = lr_scheduler.StepLR(opt, 1)
    assert opt.hold(scheduler) is scheduler
    assert isinstance(scheduler, lr_scheduler.StepLR)
    assert opt.hold(scheduler) is scheduler
    assert type(scheduler).__mro__.count(lr_scheduler.StepLR) == 1


def test_a_scheduler_of_the_inner_optimizer_is_held() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = lr_scheduler.StepLR(inner, 1, 0.5)
    opt = stablenum_torch.wrap(inner)
    opt.hold(scheduler)
    assert train(opt, scheduler, FACTORS)[-1] == 0.5 ** len(GOOD)


def test_a_held_scheduler_is_saved_and_loaded_as_a_plain_one() -> None:
    opt = guarded()
    scheduler = opt.hold(SCHEDULERS["step"](opt))
    train(opt, scheduler, FACTORS)
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    other = guarded()
    plain = SCHEDULERS["step"](other)
    plain.load_state_dict(torch.load(file, weights_only=True))
    assert plain.last_epoch == len(GOOD)


def _pickled(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, _pickled], ids=["deepcopy", "pickle"])


@COPIES
def test_a_copy_of_optimizer_and_scheduler_holds_by_itself(copied: Any) -> None:
    opt = guarded()
    scheduler = opt.hold(SCHEDULERS["step"](opt))
    train(opt, scheduler, FACTORS)
    other, moved = copied((opt, scheduler))
    assert moved.optimizer is other
    train(other, moved, (float("nan"), 1.0))
    assert moved.last_epoch == len(GOOD) + 1
    assert scheduler.last_epoch == len(GOOD)


@COPIES
def test_a_copy_of_a_scheduler_of_the_inner_optimizer_holds_too(copied: Any) -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = lr_scheduler.StepLR(inner, 1, 0.5)
    opt = stablenum_torch.wrap(inner)
    opt.hold(scheduler)
    train(opt, scheduler, GOOD)
    other, moved = copied((opt, scheduler))
    train(other, moved, (float("nan"), 1.0))
    assert moved.last_epoch == len(GOOD) + 1


class Counting:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1


class WithSlot(lr_scheduler.StepLR):
    """A scheduler with ``__dict__`` and an attribute that is not in it."""

    __slots__ = ("count",)

    def __init__(self, optimizer: Any) -> None:
        self.count = 0
        super().__init__(optimizer, 1)
        self.count = 0

    def step(self, epoch: Any = None) -> None:
        super().step()
        self.count += 1


class Reducing(Counting):
    """A scheduler that says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return _reduced, (self.__class__, self.optimizer, self.count)


def _reduced(cls: Any, optimizer: Any, count: int) -> Any:
    made = cls(optimizer)
    made.count = count
    return made


class WithState(Counting):
    """A scheduler that does not pickle all that it has."""

    def __getstate__(self) -> Any:
        return self.optimizer, self.count

    def __setstate__(self, state: Any) -> None:
        (self.optimizer, self.count), self.unpickled = state, True


@COPIES
@pytest.mark.parametrize("cls", [Counting, WithSlot, Reducing, WithState])
def test_schedulers_are_copied_as_their_class_says(cls: Any, copied: Any) -> None:
    opt = guarded()
    scheduler = opt.hold(cls(opt))
    train(opt, scheduler, FACTORS)
    other, moved = copied((opt, scheduler))
    assert isinstance(moved, cls)
    assert (moved.optimizer, moved.count) == (other, len(GOOD))
    assert cls is not WithState or moved.unpickled
    train(other, moved, (float("nan"), 1.0))
    assert (moved.count, scheduler.count) == (len(GOOD) + 1, len(GOOD))


def test_a_copy_without_its_guard_says_so() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = lr_scheduler.StepLR(inner, 1)
    opt = stablenum_torch.wrap(inner)
    opt.hold(scheduler)
    with pytest.raises(RuntimeError, match=r"call opt\.hold again"):
        copy.deepcopy(scheduler).step()


def test_what_is_no_scheduler_of_this_optimizer_is_refused() -> None:
    opt, other = guarded(), guarded()
    with pytest.raises(ValueError, match="scheduler must be made for this optimizer"):
        opt.hold(lr_scheduler.StepLR(other, 1))
    with pytest.raises(TypeError, match="got ReduceLROnPlateau"):
        opt.hold(lr_scheduler.ReduceLROnPlateau(opt))
    with pytest.raises(TypeError, match="scheduler must be"):
        opt.hold(None)
    slotted = type("Slotted", (), {"__slots__": ("optimizer",), "step": lambda self: None})()
    slotted.optimizer = opt
    with pytest.raises(TypeError, match="Slotted must have a __dict__; got a class of __slots__"):
        opt.hold(slotted)


def test_the_first_step_may_be_skipped_without_a_warning() -> None:
    opt = guarded()
    scheduler = opt.hold(SCHEDULERS["step"](opt))
    assert train(opt, scheduler, (float("nan"), float("nan"), 1.0)) == [1.0, 1.0, 0.5]


def test_a_step_without_gradients_leaves_the_last_verdict() -> None:
    opt = guarded()
    assert not opt.step_was_skipped
    train(opt, opt.hold(SCHEDULERS["step"](opt)), (float("nan"),))
    opt.zero_grad()
    opt.step()
    assert opt.step_was_skipped
