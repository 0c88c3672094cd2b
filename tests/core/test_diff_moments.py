"""How ``stablenum diff`` recovers the decay rates of moments, against the optimizers of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from stablenum.diagnosis.diff.causes.by_moment import cause_of_moments
from stablenum.diagnosis.diff.places.results import Update

SHAPES = ((4, 3), (6,))
# What the sides compute with, as the constants of their programs: rates, epsilons, and what is missing to 1.
NUMBERS = {0.9, 0.1, 0.95, 0.05, 0.999, 0.001, 0.8, 1e-8, 1e-2, 0.5}


def steps_of(
    left: Callable[[Any], torch.optim.Optimizer],
    right: Callable[[Any], torch.optim.Optimizer],
    count: int = 3,
    largest: float = float("inf"),
) -> list[list[Update]]:
    """Return what two optimizers make of the same gradients, those of the right one from the left one's
    parameters, so that a step that differs does not move the next ones."""
    rng = np.random.default_rng(0)
    start = [rng.normal(size=s) for s in SHAPES]
    sides = []
    for make in (left, right):
        parameters = [torch.nn.Parameter(torch.tensor(p)) for p in start]
        sides.append((parameters, make(parameters)))
    steps = []
    for _ in range(count):
        gradients = [rng.normal(size=s) for s in SHAPES]
        before = [p.detach().numpy().copy() for p in sides[0][0]]
        made = []
        for parameters, optimizer in sides:
            for p, b, g in zip(parameters, before, gradients, strict=True):
                p.data, p.grad = torch.tensor(b), torch.tensor(g)
            torch.nn.utils.clip_grad_norm_(parameters, largest)
            optimizer.step()
            made.append([p.detach().numpy() - b for p, b in zip(parameters, before, strict=True)])
        steps.append([Update(*row, "") for row in zip(before, gradients, *made, strict=True)])
    return steps


def adamw(*betas: float, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: torch.optim.AdamW(p, lr=1e-2, betas=betas, **options)  # type: ignore[arg-type]


def sgd(momentum: float, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: torch.optim.SGD(p, lr=1e-2, momentum=momentum, **options)


def cause(left: Any, right: Any, *, clips: tuple[int, int] = (0, 0), **options: Any) -> Any:
    return cause_of_moments(steps_of(left, right, **options), (NUMBERS, NUMBERS), clips)


@pytest.mark.parametrize("steps", [2, 3, 5])
@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ((0.9, 0.95), (0.9, 0.999), "beta2 is 0.95 on the left and 0.999 on the right."),
        ((0.8, 0.95), (0.9, 0.95), "beta1 is 0.8 on the left and 0.9 on the right."),
        (
            (0.5, 0.999),
            (0.9, 0.9),
            "beta1 is 0.5 on the left and 0.9 on the right; beta2 is 0.999 on the left and 0.9 on the right.",
        ),
    ],
)
def test_other_betas_of_adam_are_recovered_from_the_updates(
    mine: tuple[float, float], theirs: tuple[float, float], said: str, steps: int
) -> None:
    found = cause(adamw(*mine), adamw(*theirs), count=steps)
    assert found is not None
    assert found[:2] == ("betas", said)


def test_decay_of_any_kind_does_not_hide_them() -> None:
    for decay in (0.1, 0.0):
        assert cause(adamw(0.9, 0.95, weight_decay=decay), adamw(0.9, 0.999, weight_decay=0.3))[0] == "betas"
    coupled = [
        lambda p, b=b: torch.optim.Adam(p, lr=1e-2, betas=(0.9, b), weight_decay=0.1) for b in (0.95, 0.999)
    ]
    assert cause(*coupled)[0] == "betas"


def test_a_parameter_that_is_treated_in_another_way_does_not_hide_them() -> None:
    def of(beta: float) -> Any:
        return lambda p: torch.optim.AdamW(
            [{"params": p[:1]}, {"params": p[1:], "lr": 3e-3}], betas=(0.9, beta)
        )

    assert cause(of(0.95), of(0.999))[1] == "beta2 is 0.95 on the left and 0.999 on the right."


def test_clipped_gradients_do_not_hide_them() -> None:
    found = cause(adamw(0.9, 0.95), adamw(0.9, 0.999), clips=(1, 1), largest=0.5)
    assert found is not None
    assert found[1] == "beta2 is 0.95 on the left and 0.999 on the right."


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.1}])
def test_another_momentum_of_sgd_is_recovered(options: dict[str, Any]) -> None:
    found = cause(sgd(0.9, **options), sgd(0.5, **options))
    assert found is not None
    assert found[:2] == ("momentum", "the momentum is 0.9 on the left and 0.5 on the right.")


def test_no_momentum_is_one_of_zero() -> None:
    assert cause(sgd(0.9), sgd(0.0))[1] == "the momentum is 0.9 on the left and 0 on the right."


def test_equal_betas_are_no_cause() -> None:
    assert cause(adamw(0.9, 0.95), adamw(0.9, 0.95, eps=1e-2)) is None
    assert cause(sgd(0.9), sgd(0.9)) is None


def test_one_step_does_not_hold_them() -> None:
    assert cause(adamw(0.9, 0.95), adamw(0.9, 0.999), count=1) is None


def test_an_update_that_follows_another_formula_has_no_betas() -> None:
    amsgrad = adamw(0.9, 0.95, amsgrad=True)
    assert cause(lambda p: torch.optim.NAdam(p, lr=1e-2), adamw(0.9, 0.95)) is None
    assert cause(lambda p: torch.optim.RMSprop(p, lr=1e-2), amsgrad) is None


def test_betas_that_the_program_does_not_compute_with_are_not_guessed() -> None:
    assert cause(adamw(0.9, 0.123), adamw(0.9, 0.95)) is None
