"""The causes that a replay tells apart, and the remedies that it gives, in both frameworks."""

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
from stablenum_torch._diagnosis.watch.script_errors import is_about_a_closure


def line_of(report: Report) -> str:
    place = report.findings[0].place
    assert place is not None
    return place.code


def leaf(*numbers: float, **more: Any) -> torch.Tensor:
    return torch.tensor(numbers, requires_grad=True, **more)


# ---------------------------------------------------------------------------------- masks and constants

MASK = [[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("tags", [[0, 2], [1, 0, 2]])
def test_a_forbidden_transition_is_blamed_on_the_line_that_reads_it(tags):
    """The constraint of a conditional random field is legitimate; the index into it is not."""
    constraint = torch.tensor(MASK)

    def score(transitions, tags):
        allowed = transitions + constraint
        return -allowed[tags[:-1], tags[1:]].sum()

    report = stablenum_torch.replay(score, torch.zeros(3, 3, requires_grad=True), torch.tensor(tags))
    assert (report.verdict.cause, line_of(report)) == (
        Cause.MASK,
        "return -allowed[tags[:-1], tags[1:]].sum()",
    )
    assert "in constraint" in str(report)
    fixed = jnp.array(MASK)

    def score_jax(transitions, tags):
        allowed = transitions + fixed
        return -allowed[tags[:-1], tags[1:]].sum()

    report = stablenum_jax.replay(score_jax, jnp.zeros((3, 3)), jnp.array(tags))
    assert (report.verdict.cause, line_of(report)) == (
        Cause.MASK,
        "return -allowed[tags[:-1], tags[1:]].sum()",
    )
    assert "the mask allows" in report.verdict.remedy


def test_a_mask_in_a_buffer_is_not_blamed_for_the_sum_that_reads_it():
    model = torch.nn.Linear(3, 3)
    model.register_buffer("mask", torch.tensor(MASK))

    def loss():
        scores = model.weight + model.mask
        return scores.sum()

    report = stablenum_torch.replay(loss, model=model)
    assert (report.verdict.cause, line_of(report)) == (Cause.MASK, "return scores.sum()")


def written_torch(x, at, number):
    x = x.clone()
    x[at] = number
    return x


def written_jax(x, at, number):
    return x.at[at].set(number)


@pytest.mark.parametrize("number", [math.inf, -math.inf])
@pytest.mark.parametrize("at", [1, (1, 0), slice(1, 2)], ids=str)
def test_an_infinity_that_is_written_into_what_a_layer_reads_is_bad_data(at, number):
    def in_torch(w, x):
        return (written_torch(x, at, number) @ w).square().mean()

    def in_jax(w, x):
        return jnp.square(written_jax(x, at, number) @ w).mean()

    for report in (
        stablenum_torch.replay(in_torch, leaf(1.0, 0.0), torch.ones(3, 2)),
        stablenum_jax.replay(in_jax, jnp.array([1.0, 0.0]), jnp.ones((3, 2))),
    ):
        first = report.findings[0]
        assert (report.verdict.cause, first.phase, first.kind) == (Cause.BATCH, "before", "inf"), str(report)


def test_an_infinity_that_is_written_into_a_target_is_bad_data():
    def in_torch(w, y):
        return (w - written_torch(y, 0, math.inf)).square().sum()

    def in_jax(w, y):
        return jnp.square(w - written_jax(y, 0, math.inf)).sum()

    for report in (
        stablenum_torch.replay(in_torch, leaf(1.0, 0.0), torch.ones(2)),
        stablenum_jax.replay(in_jax, jnp.ones(2), jnp.ones(2)),
    ):
        assert (report.verdict.cause, report.findings[0].operation) == (Cause.BATCH, "constant"), str(report)


def test_an_infinity_that_is_written_for_a_minimum_or_a_softmax_is_a_mask():
    """A point is not its own neighbour, and padding takes no part: here nothing is left."""
    both = slice(0, 2)
    for report in (
        stablenum_torch.replay(lambda w: written_torch(w * 2.0, both, math.inf).amin(0), leaf(1.0, 0.0)),
        stablenum_torch.replay(
            lambda w: torch.softmax(written_torch(w * 2.0, both, -math.inf), 0).sum(), leaf(1.0, 0.0)
        ),
        stablenum_jax.replay(lambda w: written_jax(w * 2.0, both, math.inf).min(), jnp.ones(2)),
        stablenum_jax.replay(
            lambda w: jax.nn.softmax(written_jax(w * 2.0, both, -math.inf)).sum(), jnp.ones(2)
        ),
    ):
        assert report.verdict.cause is Cause.MASK, str(report)


def test_the_derivative_of_a_row_that_is_masked_whole_is_a_mask():
    mask = torch.tensor([[0.0, -math.inf], [0.0, -math.inf]])

    def loss(w):
        a = (w + mask).logsumexp(0)
        return a.logsumexp(0)

    report = stablenum_torch.replay(loss, torch.zeros(2, 2, requires_grad=True))
    assert (report.verdict.cause, line_of(report)) == (Cause.MASK, "a = (w + mask).logsumexp(0)")


def test_a_nan_that_stands_for_padding_under_a_mask_is_a_constant():
    valid = jnp.array([True, True, False])

    def attend(q, k):
        k = jnp.where(valid[:, None], k, jnp.nan)
        scores = jnp.where(valid, q @ k.T, -jnp.inf)
        return (jax.nn.softmax(scores) @ jnp.ones((3, 2)))[0, 0]

    report = stablenum_jax.replay(attend, jnp.ones((3, 4)), jnp.ones((3, 4)))
    assert (report.verdict.cause, report.findings[0].operation) == (Cause.BATCH, "constant")
    assert "0 x NaN" in report.verdict.remedy


def test_nan_keys_under_a_mask_are_to_be_replaced_not_dropped():
    q, k = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4)
    k[2] = math.nan

    def attend(q, k):
        scores = (q @ k.T).masked_fill(torch.tensor([False, False, True]), -math.inf)
        return scores.softmax(-1)[0, 0]

    report = stablenum_torch.replay(attend, q, k)
    assert report.evidence.loss_finite
    assert report.verdict.cause is Cause.BATCH
    assert "0 x NaN" in report.verdict.remedy


def test_an_eps_that_is_zero_in_float16_is_the_cause_in_normalize():
    x = torch.zeros(2, 4, dtype=torch.float16, requires_grad=True)
    report = stablenum_torch.replay(lambda: functional.normalize(x, dim=-1).sum())
    assert (report.verdict.cause, report.findings[0].operation) == (Cause.DOMAIN, "normalize")
    assert report.verdict.safe_function == "stablenum_torch.numerics.normalize"


# ---------------------------------------------------------------------------------- clips


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (lambda x: torch.exp(x * 100).clamp(max=10.0).sum(), Cause.OVERFLOW),
        (lambda x: torch.relu(torch.sqrt(x - 1.0)).sum(), Cause.BOUNDARY_DERIVATIVE),
        (lambda x: torch.minimum(torch.log(x - 1.0), torch.tensor(0.0)).clamp(min=-5.0).sum(), Cause.DOMAIN),
    ],
)
def test_a_clip_is_no_where(function, cause):
    report = stablenum_torch.replay(function, leaf(1.0, 2.0))
    assert report.verdict.cause is cause, str(report)
    assert "a clip, a maximum or a ReLU after it cuts the value but not the derivative" in str(report)


def test_a_clip_in_jax_is_no_where():
    report = stablenum_jax.replay(lambda x: jnp.clip(jnp.exp(x), max=10.0).sum(), jnp.array([1.0, 100.0]))
    assert report.verdict.cause is Cause.OVERFLOW
    assert report.verdict.remedy.startswith("clip the argument")


# ---------------------------------------------------------------------------------- derivatives


def test_a_derivative_that_overflows_is_not_at_a_divisor_of_zero():
    def quotient(x):
        return (torch.tensor([0.0, 1.0]) / x).sum()

    report = stablenum_torch.replay(quotient, leaf(1.0, 1e-20))
    assert report.verdict.cause is Cause.OVERFLOW
    assert "at 1e-20, which is not 0" in str(report)
    report = stablenum_jax.replay(lambda x: (jnp.array([0.0, 1.0]) / x).sum(), jnp.array([1.0, 1e-20]))
    assert report.verdict.cause is Cause.OVERFLOW
    assert "at 1e-20, which is not 0" in str(report)


def test_a_derivative_at_a_divisor_of_zero_stays_one():
    weights = torch.tensor([0.0, 1.0])
    report = stablenum_torch.replay(lambda x: torch.where(x > 0, weights / x, x).sum(), leaf(0.0, 2.0))
    assert report.verdict.cause in (Cause.WHERE_TRAP, Cause.DOMAIN)


def test_the_inputs_of_a_derivative_are_the_users():
    """The derivative of sqrt reads a gradient and the result; the user knows x."""
    x = leaf(0.0, 4.0, 9.0)
    (finding, *_) = stablenum_torch.replay(lambda x: torch.sqrt(x).sum(), x).findings
    assert finding.derivative
    assert [(s.name, s.max) for s in finding.inputs] == [("x", 9.0)]
    (finding, *_) = stablenum_jax.replay(lambda x: jnp.sqrt(x).sum(), jnp.array([0.0, 4.0, 9.0])).findings
    assert finding.derivative
    assert [(s.name, s.max) for s in finding.inputs] == [("args[0]", 9.0)]


def test_an_argument_that_is_overwritten_before_the_derivative_is_not_shown():
    def loss(w):
        x = w * 1.0
        y = torch.sqrt(x).sum()
        x.fill_(7.0)
        return y

    (finding, *_) = stablenum_torch.replay(loss, leaf(0.0, 4.0)).findings
    assert finding.derivative
    assert all(s.max != 7.0 for s in finding.inputs)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_large_negative_number_is_shown_with_its_sign(framework):
    if framework == "torch":
        report = stablenum_torch.replay(lambda x: torch.cosh(x).sum(), leaf(3.0, -1522.0))
    else:
        report = stablenum_jax.replay(lambda x: jnp.cosh(x).sum(), jnp.array([3.0, -1522.0]))
    assert "cosh of finite numbers down to -1522 is inf" in str(report)


# ---------------------------------------------------------------------------------- closures


def lbfgs_error() -> TypeError:
    w = leaf(1.0)
    optimizer = torch.optim.LBFGS([w])

    def closure():
        optimizer.zero_grad()
        (w * w).sum().backward()

    with pytest.raises(TypeError) as raised:
        optimizer.step(closure)
    return raised.value


def test_an_optimizer_that_fails_because_its_closure_returns_nothing_is_recognised():
    assert is_about_a_closure(lbfgs_error())
    assert not is_about_a_closure(TypeError("float() argument must be a number, not 'NoneType'"))


@pytest.mark.parametrize("known_bad", [True, False])
def test_a_closure_without_a_loss_is_named_and_not_called_transient(known_bad):
    w = leaf(0.0)

    def closure():
        torch.log(w).sum()

    report = stablenum_torch.replay(closure, known_bad=known_bad)
    assert "returned None and ran no backward pass" in str(report)
    assert report.verdict.cause is Cause.UNKNOWN
    assert "return loss" in report.verdict.remedy


# ---------------------------------------------------------------------------------- remedies


def by_hand_in_torch() -> dict[str, Any]:
    x = leaf(1.0, 200.0)
    return {
        "softplus": lambda: torch.log(1 + torch.exp(x)).sum(),
        "log_sigmoid": lambda: torch.log(torch.sigmoid(-x)).sum(),
        "softmax": lambda: (torch.exp(x) / torch.exp(x).sum())[0],
        "log_softmax": lambda: torch.log(torch.softmax(x, -1)).sum(),
        "logsumexp": lambda: torch.exp(x).sum().log(),
    }


def by_hand_in_jax() -> dict[str, Any]:
    x = jnp.array([1.0, 200.0])
    functions = {
        "softplus": lambda x: jnp.log1p(jnp.exp(x)).sum(),
        "log_sigmoid": lambda x: jnp.log(1 - jax.nn.sigmoid(x)).sum(),
        "softmax": lambda x: (jnp.exp(x) / jnp.exp(x).sum(keepdims=True))[0],
        "log_softmax": lambda x: jnp.log(jax.nn.softmax(x)).sum(),
        "logsumexp": lambda x: jnp.log(jnp.sum(jnp.exp(x))),
    }
    return {name: (function, x) for name, function in functions.items()}


@pytest.mark.parametrize("name", ["softplus", "log_sigmoid", "softmax", "log_softmax", "logsumexp"])
def test_a_function_written_by_hand_has_a_name(name):
    report = stablenum_torch.replay(by_hand_in_torch()[name])
    assert report.verdict.safe_function == f"stablenum_torch.numerics.{name}", str(report)
    report = stablenum_jax.replay(*by_hand_in_jax()[name])
    assert report.verdict.safe_function == f"stablenum_jax.numerics.{name}", str(report)


def test_a_sigmoid_written_by_hand_is_the_frameworks_own():
    x = leaf(1.0, 100.0)
    report = stablenum_torch.replay(lambda: (1 / (1 + torch.exp(x))).sum())
    assert (report.verdict.code, report.verdict.safe_function) == ("torch.sigmoid(x)", "")


def test_an_exponential_of_its_own_is_no_function_written_by_hand():
    x = leaf(1.0, 100.0)
    report = stablenum_torch.replay(lambda: (2 + torch.exp(x)).log().sum())
    assert (report.verdict.cause, report.verdict.code) == (Cause.OVERFLOW, "")


def test_power_is_not_named_for_an_exponent_that_it_does_not_take():
    x, y = leaf(0.0, 4.0), torch.tensor([0.5, 2.0])
    report = stablenum_torch.replay(lambda: (x**y).sum())
    assert "numerics.power" not in report.verdict.code
    loss = eval(report.verdict.code, {"torch": torch, "stablenum_torch": stablenum_torch, "x": x, "y": y})
    (slope,) = torch.autograd.grad(loss.sum(), x)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(slope).all()
    report = stablenum_jax.replay(lambda x, y: (x**y).sum(), jnp.array([0.0, 4.0]), jnp.array([0.5, 2.0]))
    assert "numerics.power" not in report.verdict.code
    report = stablenum_torch.replay(lambda: (x**0.5).sum())
    assert report.verdict.safe_function == "stablenum_torch.numerics.power"


def test_inside_a_library_the_remedy_is_at_the_users_call():
    scale = leaf(0.0, 1.0)

    def loss():
        normal = torch.distributions.Normal(torch.zeros(2), scale, validate_args=False)
        return -normal.log_prob(torch.ones(2)).sum()

    report = stablenum_torch.replay(loss)
    assert report.verdict.code == ""
    assert "torch.distributions.Normal.log_prob" in report.verdict.remedy
    assert f"{__file__}:" in report.verdict.remedy
    assert "a scale or a rate at 1e-6 or more" in report.verdict.remedy
    report = stablenum_jax.replay(
        lambda s: jax.scipy.stats.norm.logpdf(jnp.ones(2), scale=s).sum(), jnp.array([0.0, 1.0])
    )
    assert (report.verdict.code, "inside jax." in report.verdict.remedy) == ("", True)


# ---------------------------------------------------------------------------------- remedies that are tried


@pytest.mark.parametrize(
    ("in_torch", "in_jax"),
    [
        (lambda x: torch.log(x).sum(), lambda x: jnp.log(x).sum()),
        (lambda x: torch.sqrt(x).sum(), lambda x: jnp.sqrt(x).sum()),
        (lambda x: (torch.ones(2) / x).sum(), lambda x: (jnp.ones(2) / x).sum()),
        (lambda x: torch.log(1 + torch.exp(x * 100 + 50)).sum(), lambda x: jnp.log1p(jnp.exp(x * 200)).sum()),
        (lambda x: (x**0.5).sum(), lambda x: jnp.arctan2(x * 0, x).sum()),
    ],
)
def test_a_remedy_is_tried_on_what_the_operation_read(in_torch, in_jax):
    for report in (
        stablenum_torch.replay(in_torch, leaf(0.0, 4.0)),
        stablenum_jax.replay(in_jax, jnp.array([0.0, 4.0])),
    ):
        assert report.verdict.tried == "finite", str(report)
        assert "    tried: finite" in str(report)
        assert Report.from_dict(report.to_dict()).verdict.tried == "finite"


def test_a_remedy_that_cannot_be_tried_is_said_not_to_be_and_why():
    """The softmax reads an infinite mask, which no derivative is to be finite for."""
    mask = torch.tensor([-math.inf, -math.inf])
    report = stablenum_torch.replay(lambda x: (x + mask).softmax(-1).sum(), leaf(1.0, 2.0))
    assert report.verdict.safe_function == "stablenum_torch.numerics.softmax"
    assert report.verdict.tried == ""
    assert "    not tried: what the operation read is already non-finite" in str(report)


def test_a_part_of_a_function_is_not_tried_in_place_of_the_function():
    """The last step of JAX's norm is a square root of one number, not of the vector."""
    report = stablenum_jax.replay(lambda x: jnp.linalg.norm(x - x), jnp.array([0.0, 4.0]))
    assert report.verdict.safe_function == "stablenum_jax.numerics.norm"
    assert report.verdict.tried == "finite"  # of the vector, which JAX's function was given
    report = stablenum_jax.replay(lambda x: optax.tree.norm(x - x), jnp.array([0.0, 4.0]))
    assert (report.verdict.safe_function, report.verdict.tried) == ("stablenum_jax.numerics.norm", "")


@pytest.mark.parametrize("broken", ["raises", "not finite"])
def test_a_function_that_fails_on_these_arguments_is_not_named(broken, monkeypatch):
    def log(x):
        if broken == "raises":
            raise TypeError("x must be something else")
        return x / 0

    monkeypatch.setattr(stablenum_torch.numerics, "log", log)
    report = stablenum_torch.replay(lambda x: torch.log(x).sum(), leaf(0.0, 4.0))
    assert report.evidence.tried == broken
    assert (report.verdict.safe_function, report.verdict.code, report.verdict.tried) == ("", "", "")
    assert "clamp" in report.verdict.remedy


def test_a_subnormal_argument_is_at_the_edge():
    report = stablenum_torch.replay(lambda x: torch.log(x).sum(), leaf(1e-42, 4.0))
    assert report.verdict.cause is Cause.BOUNDARY_DERIVATIVE
    assert "here 1.001e-42" in report.verdict.evidence[0]
    assert report.verdict.tried == "finite"


def test_a_remedy_is_tried_without_touching_the_random_numbers():
    x = leaf(0.0, 4.0)
    state = torch.random.get_rng_state()
    stablenum_torch.replay(lambda: torch.log(x).sum())
    assert torch.equal(state, torch.random.get_rng_state())
    assert x.grad is None


# ---------------------------------------------------------------------------------- unseen programs


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_learning_rate_that_is_nan_is_named(name):
    w = leaf(1.0, 2.0)
    opt = getattr(torch.optim, name)([w], lr=0.1)
    opt.param_groups[0]["lr"] = math.nan  # a schedule divided 0 by 0

    def step() -> None:
        opt.zero_grad()
        w.square().sum().backward()
        opt.step()

    report = stablenum_torch.replay(step, optimizer=opt)
    assert report.verdict.cause is Cause.OPTIMIZER_STATE
    assert f"lr is NaN in parameter group 0 of {name}" in report.verdict.evidence
    assert "mend the schedule" in report.verdict.remedy


@pytest.mark.parametrize(
    "function", [torch.acosh, torch.digamma, lambda x: torch.polygamma(1, x), lambda x: x % (x - 2.0)]
)
def test_an_argument_outside_a_functions_domain_is_named_in_torch(function):
    w = leaf(0.0, 2.0)
    assert stablenum_torch.replay(lambda: function(w).sum()).verdict.cause is Cause.DOMAIN


@pytest.mark.parametrize(
    "function",
    [
        jnp.arccosh,
        jax.scipy.special.digamma,
        lambda x: jax.scipy.special.logsumexp(jnp.log(x) - jnp.inf),
        lambda x: jax.lax.cumlogsumexp(x - jnp.inf).sum(),
    ],
    ids=["arccosh", "digamma", "logsumexp", "logcumsumexp"],
)
def test_an_argument_outside_a_functions_domain_is_named_in_jax(function):
    report = stablenum_jax.replay(lambda w: function(w).sum(), jnp.asarray([0.5, -1.0]).clip(0.0))
    assert report.verdict.cause in (Cause.DOMAIN, Cause.MASK), str(report)


def test_a_state_that_cannot_be_reached_yet_is_named_in_a_scan():
    """The forward algorithm of a hidden Markov model: logsumexp of terms that are all -inf."""
    transitions = jnp.asarray([[0.0, 0.0, -jnp.inf], [-jnp.inf, 0.0, 0.0], [-jnp.inf, -jnp.inf, 0.0]])

    def loss(w: jax.Array) -> jax.Array:
        def forward(alpha: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jax.scipy.special.logsumexp(alpha[:, None] + transitions + w, axis=0) + x, None

        start = jnp.asarray([0.0, -jnp.inf, -jnp.inf])
        alpha, _ = jax.lax.scan(forward, start, jnp.ones((3, 3)))
        return jax.scipy.special.logsumexp(alpha)

    report = stablenum_jax.replay(loss, jnp.asarray([0.1, 0.2, 0.3]))
    assert report.verdict.cause in (Cause.MASK, Cause.BOUNDARY_DERIVATIVE, Cause.DOMAIN), str(report)
    assert report.verdict.safe_function == "stablenum_jax.numerics.logsumexp"


def test_a_clip_far_behind_a_nan_is_no_part_of_the_cause():
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((2, 2), 300.0, dtype=torch.float16))

        def forward(self) -> torch.Tensor:
            scores = self.w @ self.w.T
            return torch.relu((torch.softmax(scores, -1) @ self.w).float()).sum()

    report = stablenum_torch.replay(Attention())
    assert report.verdict.cause is Cause.LOW_PRECISION_OVERFLOW
    assert "clip" not in " ".join(report.verdict.evidence)
    assert report.verdict.remedy.startswith("compute this operation in float32")
