"""Where only one program stops gradients: the losses agree, and both lines are named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import stablenum
import stablenum_jax
import stablenum_torch

W = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
stop = jax.lax.stop_gradient


def torch_auxiliary(w: Any, x: Any) -> Any:
    h = torch.tanh(x @ w)
    aside = (h.detach() @ w).square().mean()  # torch
    return h.exp().mean() + aside


def jax_auxiliary(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    aside = jnp.mean((h @ w) ** 2)  # jax
    return jnp.mean(jnp.exp(h)) + aside


def torch_no_grad(w: Any, x: Any) -> Any:
    h = torch.tanh(x @ w)
    with torch.no_grad():
        gate = torch.sigmoid(h)  # torch
    return (gate * h).square().mean()


def jax_no_grad(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    gate = jax.nn.sigmoid(h)  # jax
    return jnp.mean((gate * h) ** 2)


def torch_head(w: Any, h: Any) -> Any:
    y = h @ w
    return y.square().mean()


def jax_head(w: Any, h: Any) -> Any:
    y = h @ w
    return jnp.mean(y**2)


def torch_called(w: Any, x: Any) -> Any:
    h = torch.tanh(x @ w)
    return torch_head(w, h)  # torch


def jax_called(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    return jax_head(w, stop(h))  # jax


def torch_target(w: Any, x: Any) -> Any:
    z = torch.tanh(x @ w)
    near = torch.round(2 * z) / 2
    passed = z + (near - z).detach()  # torch
    return (passed @ w).square().mean()


def jax_target(w: Any, x: Any) -> Any:
    z = jnp.tanh(x @ w)
    near = jnp.round(2 * z) / 2  # jax
    return jnp.mean((near @ w) ** 2)


def torch_part(w: Any, x: Any) -> Any:
    with torch.no_grad():
        h = torch.tanh(x @ w)
        h = torch.sigmoid(h @ w)
        guess = 2 * h - x  # torch
    return torch.tanh(torch.cat((guess, x), -1) @ torch.cat((w, w))).exp().mean()


def jax_part(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    h = jax.nn.sigmoid(h @ w)
    guess = 2 * h - x
    y = jnp.concatenate((guess, x), -1) @ jnp.concatenate((w, w))  # jax
    return jnp.mean(jnp.exp(jnp.tanh(y)))


def torch_behind(w: Any, x: Any) -> Any:
    noisy = torch.sin(3 * x)
    with torch.no_grad():
        h = torch.sigmoid(torch.tanh(noisy @ w) @ w)
        guess = 2 * h - noisy  # torch
    return torch.tanh(torch.cat((noisy, guess), -1) @ torch.cat((w, w))).exp().mean()


def jax_behind(w: Any, x: Any) -> Any:
    noisy = jnp.sin(3 * x)
    h = jax.nn.sigmoid(jnp.tanh(noisy @ w) @ w)
    guess = 2 * h - noisy
    y = jnp.concatenate((noisy, guess), -1) @ jnp.concatenate((w, w))  # jax
    return jnp.mean(jnp.exp(jnp.tanh(y)))


def torch_temperature(w: Any, x: Any) -> Any:
    h, a = torch.tanh(x @ w).mean(1), w[0, 0]
    temperature = (-a * (h.detach() + 0.3)).mean()  # torch
    return (a.detach() * h).exp().mean() + temperature


def jax_temperature(w: Any, x: Any) -> Any:
    h, a = jnp.mean(jnp.tanh(x @ w), 1), w[0, 0]
    gap = h + 0.3  # jax
    temperature = jnp.mean(-a * gap)
    return jnp.mean(jnp.exp(stop(a) * h)) + temperature


class Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.round(2 * x)  # torch function

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0]


def torch_function(w: Any, x: Any) -> Any:
    return Around.apply(torch.tanh(x @ w)).square().mean()  # type: ignore[no-untyped-call]


def jax_function(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.round(2 * jnp.tanh(x @ w)) ** 2)  # jax


def torch_sum(w: Any, x: Any) -> Any:
    total = torch.zeros(())
    for part in x:
        total = total + torch.tanh(part @ w).square().mean()  # torch
    return total


def jax_sum(w: Any, x: Any) -> Any:
    total = jnp.zeros(())
    for part in x:
        total = stop(total) + jnp.mean(jnp.tanh(part @ w) ** 2)  # jax
    return total


def torch_quantised(w: Any, x: Any) -> Any:
    z = torch.tanh(x @ w)
    codes = torch.sin(z)
    codebook = torch.nn.functional.mse_loss(codes, z.detach())
    commitment = torch.nn.functional.mse_loss(z, codes.detach())
    passed = z + (codes - z).detach()  # torch
    return (passed @ w).square().mean() + codebook + commitment


def jax_quantised(w: Any, x: Any) -> Any:
    z = jnp.tanh(x @ w)
    codes = jnp.sin(z)  # jax
    codebook = jnp.mean((codes - stop(z)) ** 2)
    commitment = jnp.mean((z - stop(codes)) ** 2)
    return jnp.mean((codes @ w) ** 2) + codebook + commitment


def chosen(pass_by: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A choice of 0 and 1 that gradients pass by; its values say nothing about where programs agree."""

    def program(w: Any, x: Any) -> Any:
        chance = torch.sigmoid(w)
        passed = pass_by(chance, (chance > 0.5).to(chance.dtype))
        return torch.tanh(x @ (passed * w)).square().mean()

    return program


def jax_chosen(w: Any, x: Any) -> Any:
    chance = jax.nn.sigmoid(w)
    hard = jnp.where(chance > 0.5, 1.0, 0.0)
    return jnp.mean(jnp.tanh(x @ (hard * w)) ** 2)


PAIRS = {
    "a detached input": (torch_auxiliary, jax_auxiliary, "stopped_gradient", True),
    "a part without gradients": (torch_no_grad, jax_no_grad, "stopped_gradient", True),
    "an argument that is stopped": (torch_called, jax_called, "stopped_gradient", True),
    "a long part without gradients": (torch_part, jax_part, "stopped_gradient", True),
    "a long part that is put behind another value": (torch_behind, jax_behind, "stopped_gradient", True),
    "a sum that hands gradients on": (torch_temperature, jax_temperature, "stopped_gradient", True),
    "a straight-through estimator": (torch_target, jax_target, "straight_through_missing", True),
    "a quantiser with both terms": (torch_quantised, jax_quantised, "straight_through_missing", False),
    "a derivative written by hand": (torch_function, jax_function, "straight_through_missing", True),
    "a running sum": (torch_sum, jax_sum, "accumulation", True),
}


def line_of(*functions: Any, mark: str) -> int:
    """The line that ends with a comment."""
    for function in functions:
        lines, first = inspect.getsourcelines(function)
        for i, line in enumerate(lines):
            if line.rstrip().endswith(f"# {mark}"):
                return first + i
    raise AssertionError(mark)


def compared(left: Callable[..., Any], right: Callable[..., Any]) -> Any:
    w = torch.nn.Parameter(torch.from_numpy(W.copy()))
    model = torch.nn.ParameterDict({"w": w})
    mine = stablenum_torch.program(lambda x: left(model["w"], x), torch.from_numpy(X), model=model)
    return stablenum.diff(mine, stablenum_jax.program(lambda p, x: right(p["w"], x), {"w": W}, X))


@pytest.mark.parametrize("name", PAIRS)
def test_the_line_that_stops_gradients_and_its_counterpart_are_named(name: str) -> None:
    left, right, code, confirmed = PAIRS[name]

    report = compared(left, right)

    first, cause = report.first, report.causes[0]
    wanted = line_of(left, Around.forward, mark="torch" if left is not torch_function else "torch function")
    assert first.left.phase == "backward"
    assert first.left.where.endswith(f":{wanted}")
    assert first.right.where.endswith(f":{line_of(right, mark='jax')}")
    assert (cause.code, cause.confirmed) == (code, confirmed)


@pytest.mark.parametrize(
    "pass_by",
    [
        lambda soft, hard: soft + (hard - soft).detach(),
        lambda soft, hard: hard + soft - soft.detach(),
        lambda soft, hard: hard.detach() - soft.detach() + soft,
    ],
)
def test_a_choice_of_zeros_and_ones_that_gradients_pass_by_is_no_stop(pass_by: Any) -> None:
    report = compared(chosen(pass_by), jax_chosen)

    cause = report.causes[0]
    assert (cause.code, cause.confirmed) == ("straight_through_missing", True)
    assert cause.sentence.startswith("the left program passes the gradient around")


def test_stops_on_both_sides_are_no_difference() -> None:
    def with_stop(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w)
        return jnp.mean(jnp.exp(h)) + jnp.mean((stop(h) @ w) ** 2)

    assert compared(torch_auxiliary, with_stop).ok


def test_what_autograd_detaches_to_keep_it_is_no_stop() -> None:
    def with_stop(w: Any, x: Any) -> Any:
        h = stop(jnp.tanh(x @ w))
        return jnp.mean((h @ w) ** 2)

    def without(w: Any, x: Any) -> Any:
        h = torch.tanh(x @ w)  # keeps a detached result
        return (h @ w).square().mean()

    report = compared(without, with_stop)

    assert report.first.left.operation is None
    assert report.first.right.operation == "stop_gradient"
    assert "the right program blocks the gradient here" in report.causes[0].sentence


def test_two_stops_that_are_missing_are_both_named() -> None:
    def two(w: Any, x: Any) -> Any:
        h = torch.tanh(x @ w)
        first = (h.detach() @ w).square().mean()
        return h.exp().mean() + first + (h.sin().detach() * h).mean()

    def none(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w)
        first = jnp.mean((h @ w) ** 2)
        return jnp.mean(jnp.exp(h)) + first + jnp.mean(jnp.sin(h) * h)

    report = compared(two, none)

    assert [d.causes[0].code for d in report.differences] == ["stopped_gradient"] * 2


def test_a_table_of_which_one_gradient_of_each_row_is_kept() -> None:
    index = np.array([0, 1, 1, 3, 3, 3])

    @jax.custom_vjp
    def rows(w: Any) -> Any:
        return w[index]

    rows.defvjp(lambda w: (w[index], None), lambda _, g: (jnp.zeros_like(W).at[index].set(g),))

    def right(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(rows(w)) ** 2)

    def left(w: Any, x: Any) -> Any:
        return torch.tanh(torch.nn.functional.embedding(torch.from_numpy(index), w)).square().mean()

    cause = compared(left, right).causes[0]

    assert (cause.code, cause.confirmed) == ("accumulation", True)
    assert "2 of 4 rows agree" in cause.evidence


def test_complex_values_are_not_exchanged_for_real_ones() -> None:
    def left(w: Any, x: Any) -> Any:
        even, odd = (x @ w)[:, 0::2], (x @ w)[:, 1::2]
        return torch.cat([even * 0.6 - odd * 0.8, even * 0.8 + odd * 0.6], -1).exp().mean()

    def right(w: Any, x: Any) -> Any:
        z = jax.lax.complex(*jnp.split(x @ w, 2, axis=-1)) * jax.lax.complex(0.6, 0.8)
        return jnp.mean(jnp.exp(jnp.concatenate([z.real, z.imag], -1)))

    assert compared(left, right).first.result == "loss"


# --- stops that products, targets and a whole formula hide -------------------------------------------------


def torch_product(w: Any, x: Any) -> Any:
    p = torch.softmax(x @ w, 1)
    share = (p > 0.3).float().mean(0)
    return p.square().mean() + (share * p.mean(0)).sum()  # torch


def jax_product(w: Any, x: Any) -> Any:
    p = jax.nn.softmax(x @ w, axis=1)
    share = jnp.mean(p > 0.3, axis=0)
    mean = stop(jnp.mean(p, axis=0))  # jax
    return jnp.mean(p**2) + jnp.dot(share, mean)


def torch_advantage(w: Any, x: Any) -> Any:
    h = torch.tanh(x @ w)
    with torch.no_grad():
        goal = torch.sigmoid(x).sum(1)
    gap = goal - h.sum(1)
    return (h[:, 0] * gap).mean() + gap.square().mean()  # torch


def jax_advantage(w: Any, x: Any) -> Any:
    h = jnp.tanh(x @ w)
    goal = stop(jnp.sum(jax.nn.sigmoid(x), axis=1))
    gap = goal - jnp.sum(h, axis=1)
    return jnp.mean(h[:, 0] * stop(gap)) + jnp.mean(gap**2)  # jax


def torch_log_softmax(w: Any, x: Any) -> Any:
    return -(torch.log_softmax(x @ w, 1) * torch.sigmoid(x)).mean()  # torch


def jax_log_softmax(w: Any, x: Any) -> Any:
    y = x @ w
    total = stop(jnp.log(jnp.sum(jnp.exp(y), axis=1, keepdims=True)))  # jax
    return -jnp.mean((y - total) * jax.nn.sigmoid(x))


@pytest.mark.parametrize(
    ("of_torch", "of_jax"),
    [(torch_product, jax_product), (torch_advantage, jax_advantage), (torch_log_softmax, jax_log_softmax)],
    ids=["product", "advantage", "log_softmax"],
)
def test_a_stop_without_an_operation_of_one_kind_is_placed(
    of_torch: Callable[[Any, Any], Any], of_jax: Callable[[Any, Any], Any]
) -> None:
    w = torch.tensor(W, requires_grad=True)
    left = stablenum_torch.program(lambda x: of_torch(w, x), torch.tensor(X))
    first = stablenum.diff(left, stablenum_jax.program(of_jax, jnp.asarray(W), jnp.asarray(X))).first
    assert first is not None
    assert first.left is not None
    assert first.right is not None
    assert first.left.code.endswith("# torch")
    assert first.right.code.endswith("# jax")
    assert (first.causes[0].code, first.causes[0].confirmed) == ("stopped_gradient", True)


# --- derivatives written by hand ---------------------------------------------------------------------------


@jax.custom_vjp
def bent(x: Any) -> Any:
    return x * jnp.tanh(x)


def bent_forward(x: Any) -> Any:
    return bent(x), x


def bent_backward(x: Any, g: Any) -> Any:
    t = jnp.tanh(x)
    return (g * (t + x * (1.0 - t)),)  # jax: t is not squared


bent.defvjp(bent_forward, bent_backward)


def test_a_wrong_derivative_written_by_hand_is_confirmed_by_finite_differences() -> None:
    w = torch.tensor(W, requires_grad=True)

    def of_torch(x: Any) -> Any:
        h = x @ w
        return (h * torch.tanh(h)).square().mean()

    right = stablenum_jax.program(lambda w, x: jnp.mean(bent(x @ w) ** 2), jnp.asarray(W), jnp.asarray(X))
    first = stablenum.diff(stablenum_torch.program(of_torch, torch.tensor(X)), right).first
    assert first is not None
    assert first.right is not None
    assert "(1.0 - t)" in first.right.code
    assert (first.causes[0].code, first.causes[0].confirmed) == ("other_function", True)


def test_a_mask_stays_a_mask_if_it_is_replaced() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.where(x > 0, x @ w, 0.0))

    program = stablenum_jax.program(loss, W, X)
    trace = program.play(lambda value, data: None).trace
    mask = next(s.outputs[0] for s in trace.steps if s.primitive == "gt")
    values: dict[int, Any] = {}

    replayed = program.play(values.__setitem__, replace={mask: np.zeros(X.shape)})

    assert float(values[replayed.results[0].value]) == 0.0
