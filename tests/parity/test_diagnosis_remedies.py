"""The remedies that a replay gives are for the user's own call, and are tried where that is possible."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from torch.nn import functional

import stablenum_jax
import stablenum_torch
from stablenum.diagnosis import Cause, Report
from tests.selection import REPEATS


def leaf(*numbers: float, **more: Any) -> torch.Tensor:
    return torch.tensor(numbers, requires_grad=True, **more)


def in_jax(function: Any, *args: Any) -> Report:
    return stablenum_jax.replay(function, *args)


def in_torch(function: Any, *args: Any) -> Report:
    return stablenum_torch.replay(function, *args)


def words_of(report: Report) -> str:
    """The title and the facts, without the lines of source."""
    return "\n".join([str(report.findings[0]), *report.verdict.evidence])


def code_of(report: Report) -> str:
    return report.verdict.code.partition("  #")[0].partition("numerics.")[2]


# ---------------------------------------------------------------------------------- the user's arguments

ONES = torch.ones(3, 4, requires_grad=True)
MASK = torch.full((3, 4), -math.inf)


@pytest.mark.parametrize(
    ("function", "code", "tried"),
    [
        (lambda x: x[:1].std(0).sum(), "std(x, dim=0, correction=0)", "finite"),
        (
            lambda x: x[:1].var(0, keepdim=True).sum(),
            "variance(x, dim=0, correction=0, keepdim=True)",
            "finite",
        ),
        (lambda x: (x * math.nan).std((0, 1), correction=2), "", ""),
        (lambda x: x[0, :1].std(), "std(x, dim=None, correction=0)", "finite"),
        (lambda x: (x + MASK).softmax(0).sum(), "softmax(x, dim=0, mask=mask)", ""),
        (
            lambda x: (x + MASK).logsumexp(0, keepdim=True).sum(),
            "logsumexp(x, dim=0, keepdim=True)",
            "",
        ),
        (lambda x: functional.normalize((x - x).half(), dim=0).sum(), "normalize(x, dim=0)", "finite"),
        (lambda x: functional.normalize((x - x).half(), p=1.0, dim=0).sum(), "", ""),
        (lambda x: (x - x).pow(-0.5).sum(), "power(x, -0.5)", "finite"),
    ],
)
def test_the_safe_function_gets_the_arguments_of_the_call_in_torch(function, code, tried):
    report = in_torch(function, ONES)
    assert (code_of(report), report.verdict.tried) == (code, tried), str(report)
    assert Report.from_dict(report.to_dict()).verdict.code == report.verdict.code
    assert Report.from_dict(report.to_dict()).findings[0].options == dict(report.findings[0].options)


@pytest.mark.parametrize(
    ("function", "code", "tried"),
    [
        (lambda x: x.std(0).sum(), "std(x, axis=0, correction=0)", "finite"),
        pytest.param(lambda x: x.std(1).sum(), "std(x, axis=-1, correction=0)", "finite", marks=REPEATS),
        pytest.param(
            lambda x: jnp.std(x, ddof=1), "std(x, axis=None, correction=1)", "finite", marks=REPEATS
        ),
        (lambda x: jnp.std(x[:1], 0, ddof=1).sum(), "std(x, axis=0, correction=0)", "finite"),
        (
            lambda x: jnp.var(x[:1], 0, ddof=1, keepdims=True).sum(),
            "variance(x, axis=0, correction=0, keepdims=True)",
            "finite",
        ),
        (lambda x: jnp.linalg.norm(x - x), "norm(x, axis=None)", "finite"),
        (lambda x: jax.vmap(lambda r: jnp.linalg.norm(r - r))(x).sum(), "norm(x, axis=-1)", "finite"),
        (lambda x: jax.nn.softmax(x - jnp.inf, axis=0).sum(), "softmax(x, axis=0, mask=mask)", ""),
        (lambda x: jax.nn.logsumexp(x - jnp.inf, axis=0).sum(), "logsumexp(x, axis=0)", ""),
        (lambda x: ((x - x) ** 0.5).sum(), "power(x, 0.5)", "finite"),
        (lambda x: ((x - x) ** -2).sum(), "power(x, -2)", "finite"),
    ],
)
def test_the_safe_function_gets_the_arguments_of_the_call_in_jax(function, code, tried):
    report = in_jax(function, jnp.ones((3, 4)))
    assert (code_of(report), report.verdict.tried) == (code, tried), str(report)


def test_a_function_within_a_whole_step_is_tried():
    """Here JAX's function is differentiated inside jit, and split into two calls."""

    @jax.jit
    def step(w):
        loss, slope = jax.value_and_grad(lambda w: jnp.linalg.norm(w, axis=0).sum())(w)
        return w - slope, loss

    report = in_jax(step, jnp.zeros((3, 2)))
    assert (code_of(report), report.verdict.tried) == ("norm(x, axis=0)", "finite"), str(report)


def test_a_power_of_arrays_is_tried():
    exponent = jnp.array([0.5, 2.0])
    report = in_jax(lambda x: (x**exponent).sum(), jnp.array([0.0, 4.0]))
    assert ("exp(y" in report.verdict.code, report.verdict.tried) == (True, "finite")
    powers = torch.tensor([0.5, 2.0])
    report = in_torch(lambda x: (x**powers).sum(), leaf(0.0, 4.0))
    assert ("exp(y" in report.verdict.code, report.verdict.tried) == (True, "finite")


# ---------------------------------------------------------------------------------- updates


def test_a_line_after_the_gradient_is_judged_like_any_other():
    def rms_norm(x):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))

    def step(w, x):
        loss, slope = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        w = w - 0.1 * slope
        return w, loss, rms_norm(x @ w)

    report = in_jax(step, jnp.ones((3, 4)), jnp.zeros((2, 3)))
    assert (report.verdict.cause, code_of(report)) == (Cause.DOMAIN, "divide(x, y, fill=0.0)")
    assert (report.verdict.tried, "optimizer" in words_of(report)) == ("finite", False)


def test_an_update_written_by_hand_without_eps_has_a_remedy_of_its_own():
    class RMSprop(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p -= 0.1 * p.grad / p.grad.square().sqrt()

    w = leaf(0.0, 1.0)
    optimizer = RMSprop([w])

    def step():
        optimizer.zero_grad()
        (w * w).sum().backward()
        optimizer.step()

    report = stablenum_torch.replay(step)
    assert (report.verdict.cause, report.verdict.tried) == (Cause.DOMAIN, "finite"), str(report)
    assert "eps" in report.verdict.remedy


# ---------------------------------------------------------------------------------- overflows on one side


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ((torch.exp, jnp.exp), "up to 415.7"),
        ((torch.expm1, jnp.expm1), "up to 415.7"),
        ((torch.exp2, jnp.exp2), "up to 415.7"),
        ((lambda x: 2.0**x, lambda x: 2.0**x), "up to 415.7"),
        ((lambda x: torch.exp(-x), lambda x: jnp.exp(-x)), "up to 498.3"),
        ((torch.cosh, jnp.cosh), "down to -498.3"),
        ((lambda x: 0.5**x, lambda x: 0.5**x), "down to -498.3"),
    ],
)
def test_the_number_that_overflows_is_shown_not_the_largest(functions, words):
    torchs, jaxs = functions
    numbers = (-498.3, 3.0, 415.7)
    for report in (
        in_torch(lambda x: torchs(x).sum(), leaf(*numbers)),
        in_jax(lambda x: jaxs(x).sum(), jnp.array(numbers)),
    ):
        assert report.verdict.cause is Cause.OVERFLOW
        assert f"of finite numbers {words} is inf" in words_of(report)


def test_values_at_a_failure_are_those_of_the_failure():
    report = in_jax(lambda x, y: (x / y).sum(), jnp.ones(6), jnp.array([1.0, 2.0, 3.0, 4.0, 5.0, 0.0]))
    assert report.findings[0].inputs[1].values == (0.0,)
    assert report.verdict.cause is Cause.DOMAIN


# ---------------------------------------------------------------------------------- squares


def test_a_norm_that_is_squared_is_not_called_discarded():
    def loss(x, same):
        distance = jnp.linalg.norm(x, axis=-1)
        return jnp.where(same, distance**2, jnp.maximum(0.0, 1.0 - distance) ** 2).sum()

    report = in_jax(loss, jnp.zeros((2, 3)), jnp.array([True, True]))
    assert report.verdict.cause is Cause.BOUNDARY_DERIVATIVE
    assert "squared" in words_of(report)
    assert "discarded" not in words_of(report)

    def loss_torch(x, same):
        distance = x.square().sum(-1).sqrt()
        return torch.where(same, distance * distance, 1.0 - distance).sum()

    report = in_torch(loss_torch, torch.zeros(2, 3, requires_grad=True), torch.tensor([True, True]))
    assert (report.verdict.cause, "squared" in words_of(report)) == (Cause.BOUNDARY_DERIVATIVE, True)


def test_a_value_that_is_squared_after_it_was_discarded_is_discarded():
    report = in_torch(lambda x: torch.where(x > 0, x.sqrt(), 0.0).square().sum(), leaf(0.0, 4.0))
    assert report.verdict.cause is Cause.WHERE_TRAP
    assert "squared" not in words_of(report)


def test_a_clip_of_a_nan_is_no_clip_of_an_infinity():
    """The derivative is not at fault where the value is NaN already."""
    report = in_jax(lambda x: jnp.minimum(x / x, 1.0).sum(), jnp.array([0.0, 1.0]))
    assert report.verdict.cause is Cause.DOMAIN
    assert "a clip after it" not in words_of(report)


# ---------------------------------------------------------------------------------- constants


def test_a_number_in_the_code_is_a_constant_without_a_name():
    report = in_jax(lambda x: jnp.maximum(x, jnp.inf).sum(), jnp.ones(3))
    assert "literal" not in words_of(report)
    assert "constant holds inf before the step" in words_of(report)


def test_a_captured_array_is_not_put_in_quotes():
    captured = jnp.array([1.0, math.nan])
    report = in_jax(lambda x: (x * captured).sum(), jnp.ones(2))
    assert "captured float32[2] holds NaN before the step" in words_of(report)


# ---------------------------------------------------------------------------------- eps in a narrow format

HALF = {"dtype": torch.float16}


@pytest.mark.parametrize(
    "functions",
    [
        (lambda x: torch.rsqrt(x + 1e-8), lambda x: jax.lax.rsqrt(x + 1e-8)),
        (lambda x: torch.log(x + 1e-8), lambda x: jnp.log(x + 1e-8)),
        (lambda x: torch.sqrt(x + 1e-10), lambda x: jnp.sqrt(x + 1e-10)),
        (lambda x: 1.0 / (x + 1e-8), lambda x: 1.0 / (x + 1e-8)),
        (lambda x: x / (x.sqrt() + 1e-8), lambda x: x / (jnp.sqrt(x) + 1e-8)),
        (lambda x: x / (x + 1e-8).sqrt(), lambda x: x / jnp.sqrt(x + 1e-8)),
        (lambda x: (x + 1e-8) ** -0.5, lambda x: (x + 1e-8) ** -0.5),
    ],
)
def test_an_eps_that_is_zero_in_its_format_is_named(functions):
    torchs, jaxs = functions
    for report in (
        in_torch(lambda x: torchs(x).float().sum(), leaf(0.0, 1.0, **HALF)),
        in_jax(lambda x: jaxs(x).astype(jnp.float32).sum(), jnp.array([0.0, 1.0], jnp.float16)),
    ):
        assert report.verdict.cause in (Cause.DOMAIN, Cause.BOUNDARY_DERIVATIVE), str(report)
        assert "is 0 in float16, whose smallest number is 6e-08" in words_of(report)
        assert "float32" in report.verdict.remedy


def test_an_eps_that_is_lost_in_a_clamp_is_named():
    report = in_torch(lambda x: x.clamp(min=1e-12).log().float().sum(), leaf(0.0, 1.0, **HALF))
    assert "the 1e-12 before it is 0 in float16" in words_of(report)


def test_an_optimizers_eps_that_is_zero_in_float16_is_named():
    w = leaf(0.0, 1.0, **HALF)
    optimizer = torch.optim.Adam([w], foreach=False)

    def step():
        optimizer.zero_grad()
        (w * w).float().sum().backward()
        optimizer.step()

    report = stablenum_torch.replay(step)
    assert report.verdict.cause is Cause.OPTIMIZER_STATE
    assert "the 1e-08 before it is 0 in float16" in words_of(report)
    assert "float32" in report.verdict.remedy


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_an_eps_that_is_a_number_of_its_format_is_not_called_lost(eps):
    report = in_torch(lambda x: torch.log(x + eps - 1e-3 * (eps > 0)).sum(), leaf(0.0, 1.0))
    assert "whose smallest number" not in words_of(report)


# ---------------------------------------------------------------------------------- through an optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: optax.adam(0.1), "eps_root=1e-8"),
        (lambda: optax.chain(optax.clip_by_global_norm(1e3), optax.adamw(0.1)), "eps_root=1e-8"),
        (lambda: optax.rmsprop(0.1, eps_in_sqrt=False), "eps_in_sqrt=True"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_differentiating_through_an_optimizer_of_optax(make, words, jitted):
    def meta_loss(w):
        optimizer = make()
        slope = jax.grad(lambda w: (w * w).sum())(w)
        updates, _ = optimizer.update(slope, optimizer.init(w), w)
        return (optax.apply_updates(w, updates) ** 2).sum()

    step = jax.jit(lambda w: w - jax.grad(meta_loss)(w))
    report = in_jax(step if jitted else meta_loss, jnp.array([0.0, 1.0]))
    assert report.findings[0].operation == "sqrt", str(report)
    assert words in report.verdict.remedy, str(report)
    assert report.verdict.code == ""


def test_differentiating_through_an_optimizer_of_torch():
    rate = leaf(0.1)

    def meta_loss(w):
        inner = w.clone()
        optimizer = torch.optim.Adam([inner], lr=rate[0], differentiable=True)
        inner.grad = (w * 2).clone()
        optimizer.step()
        return inner.sum()

    report = in_torch(meta_loss, leaf(0.0, 1.0))
    assert report.findings[0].operation == "sqrt", str(report)
    assert "(v + 1e-8).sqrt()" in report.verdict.remedy, str(report)


# ---------------------------------------------------------------------------------- several faults


def rotation_in_jax(w):
    angle = jnp.sqrt(jnp.sum(w * w))
    a = jnp.where(angle > 0, jnp.sin(angle) / angle, 1.0)
    b = jnp.where(angle > 0, (1 - jnp.cos(angle)) / angle**2, 0.5)
    return a + b


def rotation_in_torch(w):
    angle = torch.sqrt(torch.sum(w * w))
    a = torch.where(angle > 0, torch.sin(angle) / angle, 1.0)
    b = torch.where(angle > 0, (1 - torch.cos(angle)) / angle**2, 0.5)
    return a + b


def test_the_places_that_are_left_are_named_beside_what_was_tried():
    for function, report in (
        (rotation_in_jax, in_jax(rotation_in_jax, jnp.zeros(3))),
        (rotation_in_torch, in_torch(rotation_in_torch, torch.zeros(3, requires_grad=True))),
    ):
        line = function.__code__.co_firstlineno
        divisions = {f"line {line + 2} (div)", f"line {line + 3} (div)"}
        (there,) = {f"line {report.findings[0].place.line} (div)"} & divisions
        assert report.verdict.tried == "finite"
        assert set(report.verdict.left) == {f"line {line + 1} (sqrt)", *divisions} - {there}, str(report)
        assert "; not tried: " in " ".join(str(report).split())
        assert Report.from_dict(report.to_dict()).verdict.left == report.verdict.left


def test_a_single_fault_leaves_none():
    for report in (
        in_torch(lambda x: (x.sqrt() * 2).log().sum(), leaf(0.0, 4.0)),
        in_jax(lambda x: jnp.log(x).sum(), jnp.array([0.0, 4.0])),
        in_torch(lambda x: (x / x).sum(), leaf(0.0, 4.0)),
    ):
        left = [p for p in report.verdict.left if "sqrt" not in p]
        assert (left, report.verdict.tried) == ([], "finite"), str(report)


# ---------------------------------------------------------------------------------- rows, by hand


@pytest.mark.parametrize(
    ("functions", "code"),
    [
        (
            (
                lambda x: x / torch.sqrt((x**2).mean(0, keepdim=True)),
                lambda x: x / jnp.sqrt(jnp.mean(x**2, 0, keepdims=True)),
            ),
            "rms_norm(x, {axis}=0)",
        ),
        (
            (
                lambda x: x / (x * x).mean(-1, keepdim=True).sqrt(),
                lambda x: x / jnp.sqrt((x * x).mean(-1))[:, None],
            ),
            "rms_norm(x, {axis}=-1)",
        ),
        (
            (
                lambda x: x / x.square().sum(1, keepdim=True).sqrt(),
                lambda x: x / jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True)),
            ),
            "normalize(x, {axis}={last})",
        ),
        (
            (lambda x: x / x.norm(dim=0), lambda x: x / jnp.linalg.norm(x, axis=0)),
            "normalize(x, {axis}=0)",
        ),
    ],
)
def test_a_norm_written_by_hand_without_eps_has_a_name(functions, code):
    torchs, jaxs = functions
    report = in_torch(lambda x: torchs(x).sum(), torch.zeros(3, 2, requires_grad=True))
    assert code_of(report) == code.format(axis="dim", last=1), str(report)
    assert report.verdict.tried == "finite"
    report = in_jax(lambda x: jaxs(x).sum(), jnp.zeros((3, 2)))
    assert code_of(report) == code.format(axis="axis", last=-1), str(report)
    assert report.verdict.tried == "finite"


def test_a_quotient_by_another_vectors_length_is_a_quotient():
    report = in_torch(lambda x, y: (y / x.norm()).sum(), torch.zeros(3, requires_grad=True), torch.ones(3))
    assert code_of(report) == "divide(x, y, fill=0.0)", str(report)


@pytest.mark.parametrize("power", ["square", "norm"])
def test_a_length_of_a_part_is_no_norm_written_by_hand(power):
    """It divides the rest, too, so that normalizing the whole would be another function."""

    def of_torch(x):
        part = x[..., :2]
        length = part.norm(dim=-1, keepdim=True) if power == "norm" else (part * part).sum(-1, True).sqrt()
        return (x / length).sum()

    def of_jax(x):
        part = x[..., :2]
        return (x / jnp.sqrt(jnp.sum(part * part, axis=-1, keepdims=True))).sum()

    for report in (
        stablenum_torch.replay(lambda: of_torch(torch.zeros(3, 4, requires_grad=True))),
        stablenum_jax.replay(of_jax, jnp.zeros((3, 4))),
    ):
        assert report.findings[0].operation in ("div", "sqrt", "norm")
        assert "normalize" not in report.verdict.remedy, report.verdict.remedy


def test_a_logsumexp_written_by_hand_has_its_axis():
    report = in_torch(lambda x: x.exp().sum(0).log().sum(), torch.full((2, 3), 200.0, requires_grad=True))
    assert code_of(report) == "logsumexp(x, dim=0)", str(report)
    report = in_jax(lambda x: jnp.log(jnp.exp(x).sum(0)).sum(), jnp.full((2, 3), 200.0))
    assert code_of(report) == "logsumexp(x, axis=0)", str(report)
    report = in_jax(lambda x: (jnp.exp(x) / jnp.exp(x).sum(0)).sum(), 200.0 * jnp.ones((2, 3)))
    assert code_of(report) == "softmax(x, axis=0)", str(report)
