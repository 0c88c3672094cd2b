"""replay: functions with an edge that is easily overlooked end in a cause and a remedy of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import stablenum_torch as st
from stablenum.diagnosis import Cause


def leaf(*values: float, shape: tuple[int, ...] = (-1,)) -> Tensor:
    return torch.tensor(values).reshape(shape).requires_grad_()


def swap() -> Tensor:
    """A matrix with determinant -1."""
    return leaf(0.0, 1.0, 1.0, 0.0, shape=(2, 2))


def singular() -> Tensor:
    return leaf(1.0, 1.0, 0.0, 0.0, shape=(2, 2))


ORIGIN, SINGULAR = leaf(0.0), singular()
NOTHING = torch.tensor([False, False])
EDGES: dict[str, tuple[Callable[[], Tensor], str, str]] = {
    "logdet": (lambda: torch.logdet(swap()), "determinant", "slogdet(A).logabsdet"),
    "logdet of one in a batch": (
        lambda: torch.stack([torch.eye(2), swap()]).logdet().sum(),
        "determinant",
        "slogdet(A).logabsdet",
    ),
    "log of a determinant": (lambda: torch.det(swap()).log(), "below", "logdet written by hand"),
    "log of a determinant's magnitude": (
        lambda: torch.det(SINGULAR).abs().log(), "argument of 0", "logdet written by hand"
    ),
    "cholesky_solve": (
        lambda: torch.cholesky_solve(torch.ones(2, 1), singular().T).sum(), "diagonal", "diagonal"
    ),
    "entr": (lambda: torch.special.entr(leaf(-1.0, 0.5)).sum(), "below", "clamp"),
    "hypot": (lambda: torch.hypot(ORIGIN, ORIGIN).sum(), "both arguments 0", "inside the root"),
    "mean": (lambda: leaf(1.0, 2.0)[NOTHING].nanmean(), "no elements", "max(count, 1)"),
    "median": (lambda: leaf(1.0, 2.0)[NOTHING].median(), "no elements", "nothing is selected"),
    "mse_loss": (
        lambda: functional.mse_loss(leaf(1.0, 2.0)[NOTHING], torch.ones(0)), "no elements", "max(count, 1)"
    ),
    "binary_cross_entropy": (
        lambda: functional.binary_cross_entropy_with_logits(leaf(1.0, 2.0)[NOTHING], torch.ones(0)),
        "no elements",
        "max(count, 1)",
    ),
    "ndtri": (lambda: torch.special.ndtri(leaf(1.0, 0.5)).sum(), "0 or 1", "clamp"),
    "poisson_nll": (
        lambda: functional.poisson_nll_loss(leaf(0.0), torch.ones(1), log_input=False, eps=0.0),
        "a rate of 0",
        "safe form",
    ),
    "qr": (lambda: torch.linalg.qr(SINGULAR)[0].sum(), "not independent", "full rank"),
    "solve_triangular": (
        lambda: torch.linalg.solve_triangular(singular(), torch.ones(2, 1), upper=True).sum(),
        "diagonal",
        "diagonal",
    ),
    "xlog1py": (lambda: torch.special.xlog1py(leaf(1.0), leaf(-1.0)).sum(), "a y of -1", "clamp"),
    "modified_bessel_k0": (
        lambda: leaf(1.0).sum() * torch.special.modified_bessel_k0(torch.zeros(2)).sum(),
        "not defined",
        "edge",
    ),
    "div": (lambda: functional.gumbel_softmax(leaf(1.0, 2.0), tau=0.0).sum(), "divisor of 0", "temperature"),
}  # fmt: skip


@pytest.mark.parametrize("case", EDGES)
def test_a_function_beyond_its_edge_is_named_with_what_to_do(case: str) -> None:
    function, fact, remedy = EDGES[case]
    report = st.replay(function)
    operation = case.partition(" ")[0]
    assert report.verdict.cause in (Cause.DOMAIN, Cause.BOUNDARY_DERIVATIVE), str(report)
    assert (report.findings[0].operation, fact in report.verdict.evidence[0]) == (operation, True), str(
        report
    )
    assert remedy in report.verdict.remedy


def test_a_rate_that_overflows_is_no_rate_of_zero() -> None:
    report = st.replay(lambda: functional.poisson_nll_loss(leaf(100.0, 1.0), torch.zeros(2)))
    assert report.verdict.cause is Cause.OVERFLOW


def test_a_count_of_zero_in_integers_is_a_divisor_of_zero() -> None:
    counts = torch.bincount(torch.tensor([1, 1]), minlength=3)
    report = st.replay(lambda: (leaf(1.0, 2.0, 3.0) / counts).sum())
    assert report.verdict.cause is Cause.DOMAIN
    assert report.findings[0].inputs[1].zero == 2


def test_targets_of_classes_without_weight_are_reported() -> None:
    weight = torch.tensor([0.0, 1.0])
    logits = leaf(1.0, 2.0, shape=(1, 2))
    report = st.replay(lambda: functional.cross_entropy(logits, torch.tensor([0]), weight=weight))
    assert report.verdict.cause is Cause.LABELS
    assert "weight 0" in report.verdict.evidence[0]


@pytest.mark.parametrize("shape", [(2, 3), (1, 3)])
@pytest.mark.parametrize(
    "parametrize", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_a_weight_of_zeros_under_a_parametrization_is_to_be_initialised(
    parametrize: Callable[..., nn.Module], shape: tuple[int, int]
) -> None:
    layer = nn.Linear(shape[1], shape[0])
    nn.init.zeros_(layer.weight)
    layer = parametrize(layer)
    report = st.replay(lambda: layer(torch.ones(1, 3)).square().sum(), model=layer)
    assert report.verdict.cause is Cause.DOMAIN, str(report)
    assert ("initialise the weight" in report.verdict.remedy, report.verdict.code) == (True, ""), str(report)


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (lambda x: torch.acosh(x), lambda x: torch.acos(x)),
        (lambda x: torch.sqrt(x - 1), lambda x: torch.sqrt(1 - x)),
        (lambda x: torch.log(x - 1).sqrt(), lambda x: x),
    ],
)
def test_a_branch_that_is_undefined_where_it_is_discarded_is_a_where_trap(
    inside: Callable[[Tensor], Tensor], outside: Callable[[Tensor], Tensor]
) -> None:
    x = leaf(0.5, 2.0)
    report = st.replay(lambda: torch.where(x > 1, inside(x), outside(x)).sum())
    assert report.verdict.cause is Cause.WHERE_TRAP, str(report)
    assert "before the function as well as after it" in report.verdict.remedy


@pytest.mark.parametrize(
    "product",
    [lambda q: q @ q.T, lambda q: torch.einsum("ik,jk->ij", q, q), lambda q: torch.bmm(q[None], q.T[None])],
)
def test_a_product_beyond_float16_is_to_be_scaled_before_it(product: Callable[[Tensor], Tensor]) -> None:
    q = torch.full((2, 64), 100.0, dtype=torch.float16, requires_grad=True)
    report = st.replay(lambda: (product(q) * 0.125).softmax(-1).sum())
    assert report.verdict.cause is Cause.LOW_PRECISION_OVERFLOW
    assert "scale one of its inputs before it" in report.verdict.remedy
