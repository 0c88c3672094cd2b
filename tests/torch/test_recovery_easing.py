"""Steps that are taken more carefully for a while: for exactly the steps named, unseen by schedulers."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import pytest
import torch

import stablenum_torch as st
from stablenum import AdaGC, ClipByGlobalNorm, EscalatePrecision, NonFiniteError, ZClip
from stablenum.recovery.hooks import Easing
from stablenum.typing import Response
from stablenum_torch._recovery.easing import Eased
from tests.torch.recovering import AGAIN, Training, halved, made_nan, numbered, same, sgd


class Noting(torch.optim.SGD):
    """Notes the learning rate of each step that is taken."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


def eased(**response: Any) -> Any:
    return dataclasses.replace(AGAIN, responses=(Response(skip_data=False, **response),))


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)])
@pytest.mark.parametrize("steps", [5, 7])
def test_the_learning_rate_is_lower_for_exactly_the_steps_named(lr: Any, steps: int) -> None:
    lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
    usual = Training(numbered, lambda params: Noting(params, 0.01), halved)
    usual.run()
    training = Training(numbered, lambda params: Noting(params, lr), halved)
    recovery = training.run(hurt=made_nan, policy=eased(rate=0.25, steps=steps))
    assert recovery.events[0].to_step == 30
    # Steps 31 to 35 were made once before the symptom at step 35.
    expected = usual.opt.rates[:35] + usual.opt.rates[30:]
    factors = [a / b for a, b in zip(training.opt.rates, expected, strict=True)]
    assert factors == pytest.approx([1.0] * 35 + [0.25] * (5 + steps) + [1.0] * (10 - steps))
    assert training.scheduler.get_last_lr() == pytest.approx(usual.scheduler.get_last_lr())
    assert training.opt.param_groups[0]["lr"] == pytest.approx(usual.opt.param_groups[0]["lr"])
    if isinstance(lr, torch.Tensor):
        assert training.opt.param_groups[0]["lr"] is lr


def test_a_rate_of_1_changes_no_bit() -> None:
    training = Training(numbered, sgd)
    training.run(hurt=made_nan, policy=eased(clip=1e9, steps=7))
    expected = Training(numbered, sgd)
    expected.run()
    assert same(dict(training.model.state_dict()), dict(expected.model.state_dict()))


def test_an_exception_in_a_step_leaves_the_usual_learning_rate() -> None:
    training = Training(numbered, sgd, on_nonfinite="raise")
    training.run(3)
    Eased(training.opt).ease(Easing(0.5, None, False, 10))
    with pytest.raises(NonFiniteError):
        training.step((torch.full((3, 6), math.nan), torch.zeros(3, 1)))
    assert training.opt.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize(
    ("clip", "during"),
    [
        (None, (ClipByGlobalNorm(2.0),)),
        (1.0, (ClipByGlobalNorm(1.0),)),
        (5.0, (ClipByGlobalNorm(2.0),)),
        (AdaGC(), (ClipByGlobalNorm(2.0), AdaGC())),
    ],
)
def test_the_clip_threshold_is_the_lower_one(clip: Any, during: Any) -> None:
    training = Training(numbered, sgd, clip=clip)
    before, easing = training.opt.config, Eased(training.opt)
    easing.ease(Easing(1.0, 2.0, False, 10))
    assert training.opt.config.clip == during
    easing.ease(None)
    assert training.opt.config == before


def test_gradients_are_clipped_at_the_usual_norm_for_exactly_the_steps_named() -> None:
    training = Training(numbered, sgd)
    recovery = training.run(hurt=made_nan, policy=eased(clip=1e-3, steps=5))
    clipped = [row["clip_coefficient"] < 1 for row in training.opt.history()]
    assert clipped == [False] * 30 + [True] * 10 + [False] * 5
    (event,) = recovery.events
    norms = [row["grad_norm"] * row["clip_coefficient"] for row in training.opt.history()[30:40]]
    assert norms == pytest.approx([event.clip_at] * 10)


def test_rules_that_learn_keep_what_they_have_learnt() -> None:
    expected = Training(numbered, sgd, clip=ZClip())
    expected.run(45)
    training = Training(numbered, sgd, clip=ZClip())
    recovery, easing = training.recovery(), Eased(training.opt)
    for batch in recovery.batches(45):
        if recovery.step == 20:
            easing.ease(Easing(1.0, 1e9, False, 30))
        if recovery.step == 30:
            easing.ease(None)
        training.step(batch)
    assert training.opt.guard_state_dict() == expected.opt.guard_state_dict()


def test_a_wider_format_is_held_for_exactly_the_steps_named() -> None:
    escalate = EscalatePrecision(after=3, for_steps=2, formats=("bfloat16", "float32"))
    training = Training(numbered, sgd, escalate=escalate)
    training.run(hurt=made_nan, policy=eased(wider=True, steps=7))
    levels = [row["precision_level"] for row in training.opt.history()]
    assert levels == [0] * 30 + [1] * 12 + [0] * 3


def test_a_format_that_the_guard_has_widened_itself_stays() -> None:
    escalate = EscalatePrecision(after=1, for_steps=50, formats=("float16", "bfloat16", "float32"))
    training = Training(numbered, sgd, escalate=escalate)
    easing = Eased(training.opt)
    easing.ease(Easing(1.0, None, True, 10))
    training.step((torch.full((3, 6), math.nan), torch.zeros(3, 1)))
    assert int(training.opt.guard_state.escalation.level) == 2
    easing.ease(None)
    assert int(training.opt.guard_state.escalation.level) == 2


def test_it_is_said_once_that_there_is_no_wider_format(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(numbered, sgd)
    easing = Eased(training.opt)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            response = easing.possible(Response(rate=0.5, wider=True, steps=10))
            assert response == Response(rate=0.5, steps=10)
    assert caplog.text.count("Response.wider has no effect") == 1


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_compiled_step_follows(lr: Any) -> None:
    w = torch.nn.Parameter(torch.zeros(3))
    lr = lr.clone() if isinstance(lr, torch.Tensor) else lr
    opt = st.wrap(torch.optim.AdamW([w], lr=lr, fused=True, weight_decay=0.0))
    step, easing = torch.compile(opt.step, backend="eager"), Eased(opt)
    moves = []
    for number in range(9):
        if number in (3, 6):
            easing.ease(Easing(0.5, None, False, 9) if number == 3 else None)
        before = w.detach().clone()
        opt.zero_grad()
        opt.backward(w.sum())
        step()
        moves.append(float((before - w.detach())[0]))
    assert moves == pytest.approx([0.1] * 3 + [0.05] * 3 + [0.1] * 3, rel=1e-3)
