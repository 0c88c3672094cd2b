"""What is advised where an operation's arguments are at fault, in both frameworks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import stablenum_torch
from stablenum.diagnosis import Cause, Report
from tests.parity.test_diagnosis_remedies import in_jax, in_torch, leaf


class SurrogateOfStep(torch.autograd.Function):
    """A step function with a derivative written by hand, in which exp overflows for large negative x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        e = torch.exp(-x)
        return grad * e / (1 + e) ** 2


@jax.custom_vjp
def surrogate_of_step(x):
    return (x > 0).astype(x.dtype)


surrogate_of_step.defvjp(
    lambda x: (surrogate_of_step(x), x),
    lambda x, grad: (grad * jnp.exp(-x) / (1 + jnp.exp(-x)) ** 2,),
)


def test_a_derivative_written_by_hand_is_named_so():
    for report in (
        in_torch(lambda x: SurrogateOfStep.apply(x).sum(), leaf(-200.0, 1.0)),
        in_jax(lambda x: jax.grad(lambda x: surrogate_of_step(x).sum())(x), jnp.array([-200.0, 1.0])),
    ):
        assert "this derivative is written by hand" in report.verdict.remedy, str(report)


def recurrence_in_torch(x):
    state = x
    for _ in range(60):
        state = state * x
    return state.sum()


def recurrence_in_jax(x):
    return jax.lax.scan(lambda state, _: (state * x, None), x, None, length=60)[0].sum()


def layers_in_jax(x):
    for _ in range(60):
        x = x * x
    return x.sum()


def test_a_result_that_grows_turn_by_turn_is_called_a_recurrence():
    for report in (
        in_torch(recurrence_in_torch, leaf(10.0)),
        in_jax(recurrence_in_jax, jnp.array([10.0])),
        in_jax(jax.jit(recurrence_in_jax), jnp.array([10.0])),
        in_jax(layers_in_jax, jnp.array([10.0])),
    ):
        assert "from its own earlier result" in report.verdict.remedy, str(report)
        assert "exp" not in report.verdict.remedy.split(";")[-1], str(report)


def test_a_recurrence_whose_factor_is_an_exponential_names_its_line():
    def gated(x):
        gate = torch.exp(x)
        state = x
        for _ in range(60):
            state = state * gate
        return state.sum()

    report = in_torch(gated, leaf(4.0))
    assert "carry the largest exponent" in report.verdict.remedy, str(report)


@pytest.mark.parametrize(
    "function", [lambda xp, x: xp.exp(x) * xp.exp(x), lambda xp, x: (xp.exp(x) + 1.0) * 3e20]
)
def test_a_product_of_exponentials_leads_back_to_exp(function):
    for report in (
        in_torch(lambda x: function(torch, x).sum(), leaf(60.0)),
        in_jax(lambda x: function(jnp, x).sum(), jnp.array([60.0])),
    ):
        assert "come from exp in line" in report.verdict.remedy, str(report)


def test_an_exponential_is_clamped_to_half_its_range():
    for report in (
        in_torch(lambda x: torch.exp(x).sum(), leaf(100.0)),
        in_jax(lambda x: jnp.exp(x).sum(), jnp.array([100.0])),
    ):
        assert "(to at most 44, and to less where" in report.verdict.remedy, str(report)
        assert "must stay below 3.4e+38" in report.verdict.remedy, str(report)


def test_a_sum_over_many_terms_is_no_recurrence():
    def total(xs):
        result = xs[0] * 0
        for x in xs:
            result = result + x
        return result

    report = in_torch(total, torch.full((12,), 3e38, requires_grad=True))
    assert report.verdict.remedy.startswith("bound its inputs"), str(report)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda xp, x: xp.sqrt((x * x).mean() - x.mean() ** 2 - 1.0), "a subtraction takes the argument"),
        (lambda xp, x: xp.log(x).sum(), "positive by construction"),
        (lambda xp, x: (x**0.5).sum(), "positive by construction"),
    ],
)
def test_an_argument_below_0_is_to_be_made_positive(function, words):
    for report in (
        in_torch(lambda x: function(torch, x), leaf(-0.5, 0.1)),
        in_jax(lambda x: function(jnp, x), jnp.array([-0.5, 0.1])),
    ):
        assert words in report.verdict.remedy, str(report)
        assert report.verdict.tried == "finite", str(report)


def test_a_quotient_of_densities_that_underflow_is_a_difference_of_logarithms():
    from jax.scipy.stats import norm

    reports = [
        in_jax(lambda x: (norm.pdf(x) / norm.cdf(x)).sum(), jnp.array([-20.0])),
        in_jax(lambda x: (jnp.exp(-x) / jnp.exp(-2 * x)).sum(), jnp.array([200.0])),
        in_torch(lambda x: (torch.exp(-x) / torch.exp(-2 * x)).sum(), leaf(200.0)),
    ]
    for report in reports:
        assert "subtract their logarithms" in report.verdict.remedy, str(report)


def test_a_logarithm_of_a_sample_is_no_softmax_written_by_hand():
    """A sample of a Dirichlet distribution is made by a softmax, inside the library."""

    def loss(alpha):
        return jnp.log(jax.random.dirichlet(jax.random.key(0), alpha, (64,))).sum()

    report = in_jax(loss, jnp.full((8,), 1e-3))
    assert "written by hand" not in report.verdict.remedy, str(report)


def test_the_exponential_of_a_large_matrix_is_no_condition_number():
    report = in_jax(lambda x: jax.scipy.linalg.expm(x).sum(), jnp.eye(3) * 1e9)
    assert report.findings[0].operation == "expm", str(report)
    assert "max_squarings" in report.verdict.remedy


def test_a_branch_is_no_condition_number():
    def loss(x):
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.log(x - x), lambda x: x, x).sum()

    report = in_jax(jax.jit(loss), jnp.array([1.0]))
    assert report.findings[0].operation == "log", str(report)


def test_a_sample_at_the_edge_of_its_support():
    distribution = torch.distributions.Kumaraswamy(
        torch.tensor([0.5]), torch.tensor([0.5]), validate_args=False
    )
    report = in_torch(lambda x: distribution.log_prob(x).sum(), leaf(1.0))
    assert "a sample can be rounded to the edge" in report.verdict.remedy, str(report)


def test_a_transformation_without_eps_is_not_told_to_take_one():
    transformation = optax.contrib.normalize()

    def update(gradients):
        return transformation.update(gradients, transformation.init(gradients))[0]

    report = in_jax(jax.jit(update), jnp.zeros(3))
    assert "optax.normalize divides it by its length without an eps" in report.verdict.remedy, str(report)
    assert "eps above 0" not in report.verdict.remedy


def test_a_safe_function_is_tried_inside_a_transformation_of_torch_func():
    def step(x):
        def loss(x):
            return (1.0 / x).sum()

        torch.func.vmap(torch.func.grad(loss))(x.detach() + 1.0)
        return loss(x)

    report = in_torch(step, leaf(0.0, 1.0))
    assert report.verdict.tried == "finite", str(report)


def test_what_was_upstream_survives_plain_values():
    report = in_torch(recurrence_in_torch, leaf(10.0))
    assert Report.from_dict(report.to_dict()).findings[0].upstream == report.findings[0].upstream
    report = in_torch(lambda x: torch.exp(x).sum(), leaf(100.0))
    again = Report.from_dict(report.to_dict()).findings[0].upstream
    assert again == report.findings[0].upstream
    assert again.exponential is not None


def test_a_bias_correction_that_counts_from_0_has_a_plain_divisor():
    beta, t = 0.9, 0
    for report in (
        in_torch(lambda x: (x / (1 - beta**t)).sum(), leaf(1.0)),
        in_jax(lambda x: (x / (1 - beta**t)).sum(), jnp.array([1.0])),
    ):
        assert "count steps from 1" in report.verdict.remedy, str(report)


def test_a_divisor_whose_squares_underflow_is_computed_in_float32():
    for report in (
        in_torch(lambda x: (x / (x * x).sum()).sum(), leaf(1e-4, dtype=torch.float16)),
        in_jax(lambda x: (x / (x * x).sum()).sum(), jnp.array([1e-4], jnp.float16)),
    ):
        assert "in float16 squares of numbers below 0.0002 are 0" in report.verdict.evidence[0], str(report)
        assert "in float32" in report.verdict.remedy, str(report)
    report = in_torch(lambda x: (x / (x * x).sum()).sum(), leaf(1e-30))
    assert "squares" not in report.verdict.evidence[0], str(report)


def test_the_argument_at_the_failure_is_shown():
    report = in_torch(lambda x: torch.log(x).sum(), leaf(-0.25, 1.0))
    assert report.verdict.evidence[0].endswith("; here it is -0.25"), str(report)


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, x: xp.log(xp.exp(-x * x)).sum(),
        lambda xp, x: xp.log((0.5 * xp.exp(-x * x) + 0.5 * xp.exp(-((x - 1.0) ** 2))).sum()),
        lambda xp, x: xp.log((xp.exp(-x) * xp.ones(4)).prod()),
    ],
)
def test_a_logarithm_of_what_underflows_is_computed_from_logarithms(function):
    for report in (
        in_torch(lambda x: function(torch, x), leaf(40.0)),
        in_jax(lambda x: function(jnp, x), jnp.array([40.0])),
    ):
        assert "compute with logarithms from the start" in report.verdict.remedy, str(report)
        assert report.verdict.tried == "finite", str(report)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda xp, x: xp.log(xp.cosh(x)).sum(), "softplus(-2 * abs(x))"),
        (lambda xp, x: (x * xp.ones(60)).prod(), "add logarithms"),
        (lambda xp, x: ((x * 1e23) ** 2).sum(), "numerics.norm"),
        (lambda xp, x: (10.0**x).sum(), "clamp what is exponentiated"),
    ],
)
def test_operations_that_overflow_have_advice_of_their_own(function, words):
    for report in (
        in_torch(lambda x: function(torch, x), leaf(100.0)),
        in_jax(lambda x: function(jnp, x), jnp.array([100.0])),
    ):
        assert words in report.verdict.remedy, str(report)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda xp, x: xp.log(xp.exp(x) - 1.0).sum(), 200.0),
        (lambda xp, x: xp.log(xp.exp(x) - 1.0).sum(), 1e-9),
        (lambda xp, x: xp.log(xp.expm1(x)).sum(), 200.0),
    ],
)
def test_an_inverse_of_softplus_written_by_hand_has_a_form_that_stays_in_range(function, x):
    for report, module in (
        (in_torch(lambda x: function(torch, x), leaf(x)), "torch"),
        (in_jax(lambda x: function(jnp, x), jnp.array([x])), "jnp"),
    ):
        assert "this is inverse softplus written by hand" in report.verdict.remedy, str(report)
        assert report.verdict.code == f"x + {module}.log(-{module}.expm1(-x))"


def test_a_temperature_that_is_passed_in_is_a_setting():
    for tau in (jnp.float32(0.0), 0.0):
        report = in_jax(jax.jit(lambda x, tau: (x * 2.0 / tau).sum()), jnp.array([1.0]), tau)
        assert "a temperature, a scale, a length" in report.verdict.remedy, str(report)


def test_an_eps_of_a_clamp_that_is_lost_in_float16_is_named_in_jax():
    def normalised(v):
        return (v * jax.lax.rsqrt(jnp.maximum(jnp.sum(v * v), 1e-12))).sum()

    report = in_jax(normalised, jnp.zeros(3, jnp.float16))
    assert any("is 0 in float16" in fact for fact in report.verdict.evidence), str(report)
    report = in_jax(lambda v: jax.lax.rsqrt(jnp.maximum(v - 1.0, 0.0)).sum(), jnp.zeros(3, jnp.float16))
    assert not any("is 0 in float16" in fact for fact in report.verdict.evidence), str(report)


def test_a_power_of_two_arrays_that_overflows_is_no_base_of_0():
    exponents = -np.arange(160.0, dtype=np.float32)
    for report in (
        in_torch(lambda x: (x ** torch.tensor(exponents)).sum(), leaf(0.5)),
        in_jax(lambda x: (x ** jnp.array(exponents)).sum(), jnp.array([0.5])),
    ):
        assert report.verdict.cause is Cause.OVERFLOW, str(report)
        assert "combine the exponents first" in report.verdict.remedy


def test_a_captured_array_with_nan_is_no_batch():
    captured = jnp.array([1.0, jnp.nan])
    report = in_jax(jax.jit(lambda x: (x * captured).sum()), jnp.array([1.0, 2.0]))
    assert "mend the array where it is prepared" in report.verdict.remedy, str(report)


def test_a_root_of_a_negative_number_in_the_users_own_update_is_judged_like_any_other():
    class Rectified(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data -= 0.1 * p.grad * torch.sqrt(p.grad.abs() - 5.0)

    w = torch.nn.Parameter(torch.ones(3))
    optimizer = Rectified([w], lr=0.1)

    def step():
        optimizer.zero_grad()
        w.square().sum().backward()
        optimizer.step()

    report = stablenum_torch.replay(step, optimizer=optimizer)
    assert report.verdict.cause is Cause.DOMAIN, str(report)
    assert "a subtraction takes the argument below 0" in report.verdict.remedy


@pytest.mark.parametrize("factor", [3e3, 3e30])
def test_a_record_that_is_far_from_the_rest_is_named(factor):
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    w = np.full((6, 3), 0.5, np.float32)
    x[37] = np.abs(x[37]) * factor
    for report in (
        in_torch(lambda w: (torch.from_numpy(x) @ w).exp().square().mean(), torch.tensor(w)),
        in_jax(lambda w, x: jnp.square(jnp.exp(x @ w)).mean(), jnp.asarray(w), jnp.asarray(x)),
    ):
        assert report.verdict.cause is Cause.OVERFLOW
        named = [fact for fact in report.verdict.evidence if "holds entries far from the rest" in fact]
        assert len(named) == 1, str(report)
        assert "row 37 of 64 (from 0) reaches" in named[0]
        assert "an input of exp" not in named[0]  # but the program's own
        assert report.verdict.remedy.startswith("if the outlier is an error"), str(report)


def test_where_all_numbers_are_large_no_record_is_named():
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32) * 300
    for report in (
        in_torch(lambda w: (torch.from_numpy(x) @ w).exp().mean(), torch.ones(6, 3)),
        in_jax(lambda w, x: jnp.exp(x @ w).mean(), jnp.ones((6, 3)), jnp.asarray(x)),
    ):
        assert report.verdict.cause is Cause.OVERFLOW
        assert "far from the rest" not in str(report)
        assert report.verdict.remedy.startswith("clamp what is exponentiated"), str(report)
