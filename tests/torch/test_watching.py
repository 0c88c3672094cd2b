"""What ``stablenum explain`` watches in a PyTorch script, and what it passes by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, vmap

from stablenum.diagnosis import Cause, Report
from stablenum_torch._diagnosis.watch.by_hand import graph_of
from tests.torch.watched import Watching, assert_healthy, ended, found


def assert_on_the_bad_line(report: Report, operation: str) -> None:
    first = report.findings[0]
    assert first.place is not None
    assert (first.operation, first.place.code.endswith("# BAD")) == (operation, True), str(report)


def root(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(x).sum()  # BAD


def at_zero() -> torch.Tensor:
    return torch.tensor([0.0, 1.0], requires_grad=True)


# ---------------------------------------------------------------------------------- torch.func


def per_sample() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 3)

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        value = functional_call(model, parameters, (x,)).square().sum()
        assert not torch.isnan(torch.zeros(())).item()
        return value

    parameters = {k: v.detach() for k, v in model.named_parameters()}
    grads = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for name, p in model.named_parameters():
        p.grad = grads[name].mean(0)
    optimizer.step()


def curvature() -> None:
    x = torch.ones(3)
    hessian(lambda x: x.pow(4).sum())(x)
    vmap(jacrev(torch.sin))(torch.ones(2, 3))
    vmap(vmap(grad(torch.square)))(torch.ones(2, 3))
    torch.autograd.functional.hessian(lambda x: x.pow(4).sum(), x)


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("run", [per_sample, curvature])
def test_transformed_functions_are_not_disturbed(
    watching: Watching, run: Callable[[], Any], record: bool
) -> None:
    assert_healthy(watching(record=record), run)


def test_gradients_called_with_keywords_are_not_disturbed(watching: Watching) -> None:
    def penalty() -> None:
        x = torch.ones(3, requires_grad=True)
        (g,) = torch.autograd.grad(outputs=x.square().sum(), inputs=x, create_graph=True)
        torch.isfinite(input=g)
        torch.autograd.backward(tensors=g.square().sum())

    assert_healthy(watching(), penalty)


# ---------------------------------------------------------------------------------- by hand


def derivatives_of_samples() -> None:
    str(vmap(grad(root))(torch.tensor([[0.0, 1.0], [1.0, 2.0]])))


def printed() -> None:
    x = at_zero()
    root(x).backward()
    str(x.grad)


def asked_for() -> None:
    x = at_zero()
    assert not torch.isnan(torch.autograd.grad(root(x), x)[0]).any()


def asserted() -> None:
    x = at_zero()
    root(x).backward()
    if not torch.isfinite(x.grad).all():
        raise ArithmeticError("a bad gradient")


def never_stepped() -> None:
    model = torch.nn.Linear(2, 2)
    torch.optim.SGD(model.parameters(), lr=0.1)
    root(model(torch.ones(1, 2)) * 0).backward()


def applied_by_hand() -> None:
    w = at_zero()
    root(w).backward()
    with torch.no_grad():
        w -= 0.1 * w.grad


UNSEEN = (derivatives_of_samples, printed, asked_for, asserted, never_stepped, applied_by_hand)


@pytest.mark.parametrize("run", UNSEEN, ids=lambda run: run.__name__)
def test_a_gradient_that_no_optimizer_uses_is_explained(watching: Watching, run: Callable[[], Any]) -> None:
    first = ended(watching(), run).outcome
    assert first.failure is not None
    assert (first.failure.what, first.failure.step, first.report) == ("by hand", 0, None)
    assert "no optimizer uses" in str(first.failure)


@pytest.mark.parametrize("run", UNSEEN, ids=lambda run: run.__name__)
def test_the_place_of_such_a_gradient_is_found_in_the_second_run(
    watching: Watching, run: Callable[[], Any]
) -> None:
    assert_on_the_bad_line(found(watching(record=True), run), "sqrt")


def repaired(repair: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        w = at_zero()
        root(w).backward()
        assert w.grad is not None
        w.data = w.data - 0.1 * repair(w.grad)

    return run


def emptied(g: torch.Tensor) -> torch.Tensor:
    g[torch.isinf(g)] = 0.0
    return g


@pytest.mark.parametrize(
    "repair",
    [
        lambda g: torch.nan_to_num(g, posinf=0.0),
        lambda g: g.nan_to_num_(posinf=0.0),
        lambda g: torch.where(torch.isfinite(g), g, torch.zeros(2)),
        lambda g: g.masked_fill(g.isinf(), 0.0),
        emptied,
    ],
)
def test_a_gradient_that_the_script_repairs_is_no_failure(
    watching: Watching, repair: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert_healthy(watching(), repaired(repair))


def test_a_parameter_that_survives_its_gradient_is_no_failure(watching: Watching) -> None:
    def run() -> None:
        w = at_zero()
        root(w).backward()
        assert w.grad is not None
        w.data -= 0.1 * w.grad.clamp(max=1.0)

    assert_healthy(watching(), run)


def test_a_gradient_that_the_script_tests_and_leaves_out_is_no_failure(watching: Watching) -> None:
    def run() -> None:
        w = torch.ones(2)
        for factor in (1.0, 0.0, 1.0):
            w = w.detach().requires_grad_()
            (g,) = torch.autograd.grad(root(w * factor), w)
            if torch.isfinite(g).all():
                w = w - 0.1 * g

    assert_healthy(watching(), run)


def test_a_step_that_the_script_leaves_out_is_no_failure(watching: Watching) -> None:
    def run() -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for factor in (0.0, 1.0):
            optimizer.zero_grad()
            root(model(torch.ones(1, 2)).square() * factor).backward()
            if all(p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()

    assert_healthy(watching(), run)


def test_gradients_that_a_scaler_is_to_skip_are_no_failure(watching: Watching) -> None:
    def run() -> None:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for _ in range(2):
            loss = 100 * model(torch.ones(1, 2)).square().sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(1.0)

    assert_healthy(watching(), run)


# ---------------------------------------------------------------------------------- metrics


def train(*, stop: bool = False, steps: int = 3) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    y = torch.zeros(4, dtype=torch.long)
    for step in range(steps):
        logits = model(torch.ones(4, 3))
        scale = torch.tensor(0.0 if stop and step == steps - 1 else 1.0)
        loss = torch.nn.functional.cross_entropy(logits, y) / scale  # BAD
        if not torch.isfinite(loss):
            raise SystemError("stopped")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for c in range(2):
            logits[y == c, c].mean().item()


def test_a_metric_that_is_nan_for_an_empty_class_is_no_failure(watching: Watching) -> None:
    assert_healthy(watching(), train)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_loss_that_the_script_itself_gives_up_on_is_a_failure(watching: Watching, steps: int) -> None:
    failure = ended(watching(), lambda: train(stop=True, steps=steps)).outcome.failure
    assert failure is not None
    assert (failure.what, failure.step) == ("loss", steps - 1)


def test_what_a_function_computes_that_the_user_names_is_not_judged(watching: Watching) -> None:
    assert_healthy(watching(ignore=("printed",)), printed)


# ---------------------------------------------------------------------------------- errors of libraries


def test_a_distribution_that_refuses_nan_is_explained_where_the_nan_began(watching: Watching) -> None:
    def run() -> None:
        x = torch.ones(40, 1)
        x[20] = 0.0
        p = torch.softmax(torch.ones(40, 2000) + x.log() * x, -1)  # BAD
        torch.log(torch.zeros(3))  # a later infinity that has nothing to do with it
        torch.distributions.Categorical(
            p, validate_args=True
        )  # its message shows the corners of p, without NaN

    assert_on_the_bad_line(found(watching(record=True), run), "log")


@pytest.mark.parametrize(
    ("refused", "operation"),
    [
        (lambda x: torch.linalg.cholesky(x - x), "cholesky"),  # BAD
        (lambda x: torch.linalg.solve(x - x, torch.ones(2)), "solve"),  # BAD
        (lambda x: torch.multinomial(x - x, 1), "multinomial"),  # BAD
    ],
)
def test_finite_numbers_that_an_operation_refuses_are_explained(
    watching: Watching, refused: Callable[[torch.Tensor], object], operation: str
) -> None:
    report = found(watching(record=True), lambda: refused(torch.eye(2)))
    first = report.findings[0]
    assert first.place is not None
    assert (first.operation, first.place.code.endswith("# BAD")) == (operation, True), str(report)
    assert report.verdict.cause is Cause.DOMAIN


def test_a_refusal_that_the_script_copes_with_is_no_failure(watching: Watching) -> None:
    def run() -> None:
        with contextlib.suppress(torch.linalg.LinAlgError):
            torch.linalg.cholesky(torch.zeros(2, 2))

    assert_healthy(watching(), run)


def test_a_check_of_the_users_own_is_explained_by_what_it_read(watching: Watching) -> None:
    def checked(value: torch.Tensor) -> None:
        if not torch.isfinite(value).all():
            raise ValueError("not finite")

    def run() -> None:
        value = torch.zeros(3).log().exp() / torch.zeros(3)  # BAD
        torch.log(torch.zeros(3))
        checked(value)

    assert_on_the_bad_line(found(watching(record=True), run), "div")


def test_a_distribution_that_refuses_finite_numbers_is_left_to_the_script(watching: Watching) -> None:
    session = ended(
        watching(), lambda: torch.distributions.Normal(torch.ones(1), -torch.ones(1), validate_args=True)
    )
    assert (session.outcome.failure, session.outcome.exit_code) == (None, 1)


def test_what_a_backward_pass_reaches_on_every_branch() -> None:
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    reached = graph_of([(a * b).sum() + (c.exp() * a).sum(), c.detach()])
    assert {id(leaf) for leaf in reached.leaves} == {id(a), id(b), id(c)}
    assert len(reached.leaves) == 3
