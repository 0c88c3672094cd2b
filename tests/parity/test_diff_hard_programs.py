"""Programs on which a change of one side fails, or heals less than it seems to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import stablenum
import stablenum_jax
import stablenum_torch
from stablenum.diagnosis.diff.sides.sides import host, measured

X = np.random.default_rng(3).normal(size=(6, 6)).astype(np.float32)
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def in_torch(loss: Loss, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = nn.Linear(6, 6)
    return stablenum_torch.program(lambda x: loss(model, x), torch.tensor(X), model=model)


def report_of(left: Loss, right: Loss, **options: Any) -> Any:
    report = stablenum.diff(in_torch(left), in_torch(right), **options)
    assert not report.ok
    return report


# Parts of functions, whose results share memory; numbers of a norm; complex numbers; hooks.
PAIRS: dict[str, tuple[Loss, Loss]] = {
    "an axis of normalize": (
        lambda m, x: functional.normalize(m(x), p=2.0, dim=1).pow(3).sum(),
        lambda m, x: functional.normalize(m(x), p=2.0, dim=0).pow(3).sum(),
    ),
    "the power of a norm": (
        lambda m, x: functional.normalize(m(x), p=2.0, dim=1).pow(3).sum(),
        lambda m, x: functional.normalize(m(x), p=3.0, dim=1).pow(3).sum(),
    ),
    "another mask of a gradient": (
        lambda m, x: hooked(m(x), torch.tril(torch.ones(6, 6))),
        lambda m, x: hooked(m(x), torch.triu(torch.ones(6, 6))),
    ),
    "a part of a spectrum": (
        lambda m, x: torch.fft.fft(m(x)).abs().square().mean(),
        lambda m, x: (torch.fft.fft(m(x)) * (1 + 2j)).abs().pow(3).mean(),
    ),
}


def hooked(h: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda g: g * kept)
    return h.square().mean()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.filterwarnings("error")
def test_what_cannot_be_put_in_place_of_a_value_ends_in_a_report(name: str) -> None:
    assert report_of(*PAIRS[name]).first.causes


@pytest.mark.parametrize("turned", [np.flip, np.transpose, lambda x: x[::-1, ::2].repeat(2, axis=1)])
def test_a_value_is_replaced_by_an_array_whose_entries_lie_in_another_order(
    turned: Callable[[Any], Any],
) -> None:
    loss: Loss = lambda m, x: m(x).tanh().sum()  # noqa: E731 - one line beside those above
    program, seen = in_torch(loss), dict[int, Any]()
    made = program.play(lambda value, data: seen.update({value: host(data).copy()}))
    forward = [s for s in made.trace.steps if s.phase == "forward"]
    matrices = [o for s in forward for o in s.outputs if seen[o].shape == (6, 6)]
    for value in matrices:
        wanted = turned(seen[value])
        for evaluate in (program.show, program.play):
            found = dict[int, Any]()
            evaluate(
                lambda v, data, f=found: f.update({v: host(data).copy()}),
                weights=None,
                replace={value: wanted},
                steps=1,
            )
            np.testing.assert_array_equal(found[value], wanted)


def test_one_of_two_numbers_that_are_added_does_not_make_the_losses_agree() -> None:
    report = report_of(lambda m, x: (m(x).square() + 0.5).mean() + 0.3, lambda m, x: m(x).square().mean())
    for cause in report.causes:
        assert not (cause.confirmed and "agree" in cause.evidence and "0.5" in cause.sentence), str(report)


def test_a_confirmed_cause_says_what_agrees() -> None:
    """In three layers, the first of which is no more than a third of it."""

    def layered(approximate: str) -> Loss:
        def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = functional.gelu(m(x), approximate=approximate)
            return x.square().mean()

        return loss

    (cause,) = report_of(layered("none"), layered("tanh")).causes
    assert (cause.code, cause.confirmed) == ("gelu_variant", True)


def test_a_power_is_no_epsilon() -> None:
    for cause in report_of(
        lambda m, x: torch.cdist(m(x), x, p=1.0).mean(), lambda m, x: torch.cdist(m(x), x, p=3.0).mean()
    ).causes:
        assert cause.code not in ("epsilon_value", "scale")


def test_a_number_that_is_added_is_no_factor() -> None:
    (cause,) = report_of(
        lambda m, x: (m(x) + 1.0).pow(3).mean(), lambda m, x: (m(x) + 2.0).pow(3).mean()
    ).causes
    assert (cause.code, cause.confirmed) == ("other_function", True)


@pytest.mark.filterwarnings("error")
def test_a_mask_that_is_added_is_called_a_mask() -> None:
    def attended(diagonal: int) -> Loss:
        mask = torch.triu(torch.full((6, 6), float("-inf")), diagonal)

        def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return (torch.softmax(m(x) @ x.T + mask, 1) @ x).square().mean()

        return loss

    (cause,) = report_of(attended(1), attended(2)).causes
    assert (cause.code, cause.confirmed) == ("mask_shifted", True)


def test_targets_are_found_in_each_of_several_steps() -> None:
    labels = np.array([0, 1, 2, 3, 4, 5])

    def left() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        return stablenum_torch.program(
            lambda x: functional.cross_entropy(model(x), torch.tensor(labels), label_smoothing=0.1),
            torch.tensor(X),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        )

    def right() -> Any:
        import jax
        import optax

        def loss(p: Any, x: Any) -> Any:
            return -jnp.mean(jax.nn.log_softmax(x @ p["w"] + p["b"])[jnp.arange(6), labels])

        shapes = {"w": np.zeros((6, 6), np.float32), "b": np.zeros(6, np.float32)}
        return stablenum_jax.program(loss, shapes, X, optimizer=optax.sgd(0.1))

    report = stablenum.diff(left(), right(), steps=2)
    assert [(c.code, c.confirmed) for c in report.causes] == [("label_smoothing", True)]


def test_a_side_that_stands_still_in_a_later_step_is_not_said_to_do_so_in_the_first() -> None:
    def trained(rates: tuple[float, ...]) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(6, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = iter(rates)

        def loss(x: torch.Tensor) -> torch.Tensor:
            optimizer.param_groups[0]["lr"] = next(schedule, rates[-1])
            return model(x).square().mean()

        return stablenum_torch.program(loss, torch.tensor(X), model=model, optimizer=optimizer)

    report = stablenum.diff(trained((0.1, 0.0)), trained((0.1, 0.1)), steps=2)
    assert all("first step" not in c.sentence for c in report.causes), str(report)


# Functions that are opened into several operations, of a tensor whose entries share memory.
SHARED: dict[str, Callable[[torch.Tensor, nn.Linear], torch.Tensor]] = {
    "linear": lambda h, m: m(h),
    "layer_norm": lambda h, m: functional.layer_norm(h, (6,), m.weight[0], m.bias),
    "softmax": lambda h, m: torch.softmax(h * m.bias, -1) @ m.weight,
    "gelu": lambda h, m: functional.gelu(h) @ m.weight,
    "addmm": lambda h, m: torch.addmm(h, h, m.weight, alpha=0.5),
    "attention": lambda h, m: functional.scaled_dot_product_attention(h[None], m.weight[None], h[None])[0],
    "half precision": lambda h, m: m(h.bfloat16().float()),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_fault_after_a_shared_initial_state_is_seen(name: str) -> None:
    """Noise cannot be added to a tensor whose entries share memory: what follows must not count as noise."""

    def program(factor: float) -> Any:
        torch.manual_seed(0)
        model, start = nn.Linear(6, 6), nn.Parameter(torch.randn(6))
        x = torch.tensor(X)

        def loss() -> torch.Tensor:
            h = SHARED[name](start.expand(6, -1), model)
            return (h * x * factor).tanh().pow(2).sum()

        return stablenum_torch.program(loss)

    assert stablenum.diff(program(1.0), program(1.0)).ok
    report = stablenum.diff(program(1.0), program(1.001))
    assert not report.ok, str(report)
    assert not any("Rounding in float64 alone moves" in note for note in report.notes)


def test_values_with_noise_are_told_by_their_keys_where_their_numbers_part() -> None:
    """As if an operation were opened in the evaluation without noise alone."""

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(m(x), (6,)).pow(2).tanh().sum()

    program = in_torch(loss)
    program.record(1)
    tape, plain = program._tapes[1], measured(program)
    play = type(program).play

    def not_opened(self: Any, visit: Any, **options: Any) -> Any:
        if not options.get("noise"):
            return play(self, visit, **options)
        before = dict(tape.opened)
        tape.opened.update(dict.fromkeys(tape.opened, False))
        try:
            return play(self, visit, **options)
        finally:
            tape.opened.update(before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(program), "play", not_opened)
        parted = measured(program)
    ends = {r.value for r in plain.play.results}
    assert all(parted.tolerance[v] < 1e-6 for v in ends)
    assert all(parted.tolerance[v] == pytest.approx(plain.tolerance[v], rel=20) for v in ends)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("right", [0.05, 0.2, 0.0])
def test_another_label_smoothing_ends_in_a_report(right: float, bias: bool) -> None:
    """With other targets the loss is computed by other operations, so that values have other numbers."""
    y = torch.tensor([0, 3, 1, 4, 2, 0])

    def program(smoothing: float) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(6, 5, bias=bias)
        return stablenum_torch.program(
            lambda x, y: functional.cross_entropy(model(x), y, label_smoothing=smoothing),
            torch.tensor(X),
            y,
            model=model,
        )

    report = stablenum.diff(program(0.1), program(right))
    assert not report.ok
    assert "cross_entropy" in report.first.right.code
