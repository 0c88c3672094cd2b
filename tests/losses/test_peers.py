"""The frameworks' own losses and ours at the edges; on ordinary input all agree.

If a later release fixes one of the failures shown here, its test fails: then remove the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn import functional as F  # noqa: N812, the name users know

import stablenum_jax.losses as jl
import stablenum_torch.losses as tl
from tests.losses.examples import COUNTS, INDEX, LABELS, LOGITS, OTHER, POSITIVE, SOFT, C, Z

NAN, INF = math.nan, math.inf


def _grad(f: Callable[[torch.Tensor], torch.Tensor], *values: Any) -> tuple[float, list[Any]]:
    x = torch.tensor(list(values), requires_grad=True)
    value = f(x)
    value.backward()
    return value.item(), x.grad.tolist()


def _jax_grad(f: Callable[[jax.Array], jax.Array], *values: Any) -> tuple[float, list[Any]]:
    value, grad = jax.value_and_grad(f)(jnp.asarray(list(values)))
    return float(value), grad.tolist()


def test_naive_bce_of_a_saturated_sigmoid_is_nan() -> None:
    def naive(z: Any, y: float, log: Any, sigmoid: Any) -> Any:
        return -(y * log(sigmoid(z)) + (1 - y) * log(1 - sigmoid(z))).sum()

    assert math.isnan(_grad(lambda z: naive(z, 1.0, torch.log, torch.sigmoid), 200.0)[0])
    assert math.isnan(_jax_grad(lambda z: naive(z, 1.0, jnp.log, jax.nn.sigmoid), 200.0)[0])
    value, (grad,) = _grad(lambda z: naive(z, 0.0, torch.log, torch.sigmoid), 200.0)
    assert value == INF
    assert math.isnan(grad)
    assert _grad(lambda z: tl.binary_cross_entropy(z, torch.ones(1)), 200.0) == (0.0, [0.0])
    assert _grad(lambda z: tl.binary_cross_entropy(z, torch.zeros(1)), 200.0) == (200.0, [1.0])
    assert _jax_grad(lambda z: jl.binary_cross_entropy(z, jnp.zeros(1)), 200.0) == (200.0, [1.0])


def test_bce_on_probabilities_clamps_to_100_and_stops_learning() -> None:
    assert _grad(lambda z: F.binary_cross_entropy(torch.sigmoid(z), torch.zeros(1)), 200.0) == (100.0, [0.0])
    assert _grad(lambda z: tl.binary_cross_entropy(z, torch.zeros(1)), 200.0) == (200.0, [1.0])


def test_bce_with_logits_loses_the_gradient_of_a_label_that_is_all_but_learnt() -> None:
    assert _grad(lambda z: F.binary_cross_entropy_with_logits(z, torch.ones(1)), 20.0)[1] == [0.0]
    assert _grad(lambda z: tl.binary_cross_entropy(z, torch.ones(1)), 20.0)[1] == pytest.approx(
        [-2.0611537e-9]
    )


def test_all_items_ignored_is_nan_in_torch() -> None:
    target = torch.tensor([-100, -100])
    x = torch.zeros(2, 3, requires_grad=True)
    assert F.cross_entropy(x, target).isnan()
    ours = tl.cross_entropy(x, target)
    assert ours == 0
    assert (torch.autograd.grad(ours, x)[0] == 0).all()


def test_an_ignored_row_of_nan_poisons_the_gradient_in_torch() -> None:
    x = torch.tensor([[NAN, 0.0], [0.0, 0.0]], requires_grad=True)
    target = torch.tensor([-100, 0])
    assert torch.autograd.grad(F.cross_entropy(x, target), x)[0][0].isnan().any()
    assert torch.autograd.grad(tl.cross_entropy(x, target), x)[0].tolist() == [[0, 0], [-0.5, 0.5]]


def test_a_masked_class_with_smoothing_is_inf() -> None:
    x = torch.tensor([[0.0, 0.0, -INF]], requires_grad=True)
    target = torch.tensor([0])
    assert F.cross_entropy(x, target, label_smoothing=0.1) == INF
    ours = tl.cross_entropy(x, target, label_smoothing=0.1)
    assert ours.item() == pytest.approx(math.log(2))
    assert torch.autograd.grad(ours, x)[0][0].tolist() == pytest.approx([-0.45, 0.45, 0.0])


def test_a_masked_class_with_soft_target_0_is_nan() -> None:
    x, t = torch.tensor([[0.0, 0.0, -INF]]), torch.tensor([[0.5, 0.5, 0.0]])
    assert F.cross_entropy(x, t).isnan()
    assert tl.cross_entropy(x, t).item() == pytest.approx(math.log(2))
    a, b = jnp.asarray(x.numpy()), jnp.asarray(t.numpy())
    assert np.isnan(-(b * jax.nn.log_softmax(a)).sum())
    assert np.isfinite(jax.grad(lambda x: jl.cross_entropy(x, b))(a)).all()


def test_a_row_without_classes_is_nan() -> None:
    x, t = torch.full((1, 3), -INF, requires_grad=True), torch.tensor([0])
    assert F.cross_entropy(x, t).isnan()
    assert torch.autograd.grad(tl.cross_entropy(x, t), x)[0].tolist() == [[0, 0, 0]]
    theirs = optax.softmax_cross_entropy_with_integer_labels(jnp.full((1, 3), -INF), jnp.zeros(1, jnp.int32))
    assert np.isnan(theirs).all()
    assert jl.cross_entropy(jnp.full((1, 3), -INF), jnp.zeros(1, jnp.int32)) == 0


def test_kl_where_both_are_0_is_nan() -> None:
    log_q, t = torch.tensor([[0.0, -INF]]), torch.tensor([[1.0, 0.0]])
    assert F.kl_div(log_q, t, reduction="batchmean").isnan()
    assert tl.kl_divergence(log_q, t) == 0
    assert np.isnan(optax.kl_divergence(jnp.asarray(log_q.numpy()), jnp.asarray(t.numpy()))).all()
    assert jl.kl_divergence(jnp.asarray(log_q.numpy()), jnp.asarray(t.numpy())) == 0


def test_focal_with_gamma_below_1_is_nan_in_torch() -> None:
    def naive(z: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(z)
        return ((1 - p) ** 0.5 * F.binary_cross_entropy_with_logits(z, torch.ones(1), reduction="none")).sum()

    assert math.isnan(_grad(naive, 40.0)[1][0])
    (ours,) = _grad(lambda z: tl.binary_focal(z, torch.ones(1), gamma=0.5), 40.0)[1]
    assert ours == pytest.approx(-1.5 * math.exp(-60.0), rel=1e-4)
    (jaxs,) = _jax_grad(lambda z: jl.binary_focal(z, jnp.ones(1), gamma=0.5), 40.0)[1]
    assert jaxs == pytest.approx(ours, rel=1e-4)


def test_poisson_of_a_large_log_rate_is_inf() -> None:
    assert F.poisson_nll_loss(torch.tensor([100.0]), torch.zeros(1)) == INF
    value, (grad,) = _grad(lambda z: tl.poisson_nll(z, torch.zeros(1)), 100.0)
    assert math.isfinite(value)
    assert math.isfinite(grad)


def test_log_cosh_by_cosh_is_inf() -> None:
    assert torch.cosh(torch.tensor(100.0)).log() == INF
    value, grad = _grad(lambda x: tl.log_cosh(x, torch.zeros(1)), 100.0)
    assert (value, grad) == (pytest.approx(100 - math.log(2)), [1.0])


def test_log_cosh_of_a_small_difference_is_0_in_optax() -> None:
    assert float(optax.log_cosh(jnp.asarray(1e-4))) != pytest.approx(5e-9, rel=0.01)
    assert float(jl.log_cosh(jnp.asarray([1e-4]), jnp.zeros(1))) == pytest.approx(5e-9, rel=1e-5)


def test_the_cosine_of_a_zero_vector_has_a_gradient_of_1e8_in_torch() -> None:
    x, y = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2)
    assert torch.autograd.grad(F.cosine_similarity(x, y).sum(), x)[0].abs().max() > 1e7
    assert (torch.autograd.grad(tl.cosine_similarity(x, y).sum(), x)[0] == 0).all()
    assert (jax.grad(lambda x: jl.cosine_similarity(x, jnp.ones((1, 2))).sum())(jnp.zeros((1, 2))) == 0).all()


def test_gaussian_nll_below_the_floor_can_come_back() -> None:
    var = torch.zeros(1, requires_grad=True)
    ours = torch.autograd.grad(tl.gaussian_nll(torch.zeros(1), torch.ones(1), var), var)[0]
    peer = torch.autograd.grad(F.gaussian_nll_loss(torch.zeros(1), torch.ones(1), var), var)[0]
    torch.testing.assert_close(ours, peer)
    clamped = torch.zeros(1, requires_grad=True)
    loss = (clamped.clamp(min=1e-6).log() + 1 / clamped.clamp(min=1e-6)).sum()
    # The naive clamp: a variance below the floor has no gradient.
    below = torch.full((1,), -1.0, requires_grad=True)
    assert torch.autograd.grad((below.clamp(min=1e-6).log() + 1 / below.clamp(min=1e-6)).sum(), below)[0] == 0
    assert torch.isfinite(loss)


def _t(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(a, dtype=torch.float32 if a.dtype.kind == "f" else None) for a in arrays]


W = np.linspace(0.5, 2.0, C)
_LOG_SOFT = np.log(SOFT)
TORCH_PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]] = {
    "cross_entropy": (tl.cross_entropy, F.cross_entropy, [LOGITS, INDEX]),
    "cross_entropy weighted": (
        lambda x, t, w, **o: tl.cross_entropy(x, t, weight=w, label_smoothing=0.1, ignore_index=2, **o),
        lambda x, t, w, **o: F.cross_entropy(x, t, weight=w, label_smoothing=0.1, ignore_index=2, **o),
        [LOGITS, INDEX, W],
    ),
    "cross_entropy soft": (
        lambda x, t, w, **o: tl.cross_entropy(x, t, weight=w, label_smoothing=0.1, **o),
        lambda x, t, w, **o: F.cross_entropy(x, t, weight=w, label_smoothing=0.1, **o),
        [LOGITS, SOFT, W],
    ),
    "binary_cross_entropy": (
        lambda z, y, w, **o: tl.binary_cross_entropy(z, y, weight=w, pos_weight=2 * w, **o),
        lambda z, y, w, **o: F.binary_cross_entropy_with_logits(z, y, weight=w, pos_weight=2 * w, **o),
        [Z, LABELS, POSITIVE],
    ),
    "gaussian_nll": (
        lambda m, y, v, **o: tl.gaussian_nll(m, y, v, full=True, **o),
        lambda m, y, v, **o: F.gaussian_nll_loss(m, y, v, full=True, **o),
        [Z, LABELS, POSITIVE],
    ),
    "poisson_nll": (tl.poisson_nll, F.poisson_nll_loss, [Z, COUNTS]),
    "huber": (
        lambda a, b, **o: tl.huber(a, b, delta=0.7, **o),
        lambda a, b, **o: F.huber_loss(a, b, delta=0.7, **o),
        [Z, LABELS],
    ),
    "cosine_embedding": (
        lambda a, b, y, **o: tl.cosine_embedding(a, b, y, margin=0.1, **o),
        lambda a, b, y, **o: F.cosine_embedding_loss(a, b, y, margin=0.1, **o),
        [LOGITS, OTHER, 2 * LABELS - 1],
    ),
}


@pytest.mark.parametrize("name", TORCH_PAIRS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_equal_to_torch_on_ordinary_input(name: str, reduction: str) -> None:
    ours, theirs, arrays = TORCH_PAIRS[name]
    x, *rest = _t(*arrays)
    x.requires_grad_()
    values = [f(x, *rest, reduction=reduction) for f in (ours, theirs)]
    torch.testing.assert_close(*values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), x)[0] for v in values), rtol=2e-6, atol=1e-6)


def test_equal_to_torch_kl_batchmean() -> None:
    x, t, log_t = _t(LOGITS, SOFT, _LOG_SOFT)
    log_q = F.log_softmax(x, -1)
    for target, logs in ((t, False), (log_t, True)):
        theirs = F.kl_div(log_q, target, log_target=logs, reduction="batchmean")
        torch.testing.assert_close(
            tl.kl_divergence(x, target, log_targets=logs), theirs, rtol=1e-6, atol=1e-6
        )


def test_equal_to_optax_on_ordinary_input() -> None:
    x, t, soft, z, y = (jnp.asarray(a) for a in (LOGITS, INDEX, SOFT, Z, LABELS))
    pairs = [
        (jl.cross_entropy(x, t, reduction="none"), optax.softmax_cross_entropy_with_integer_labels(x, t)),
        (jl.cross_entropy(x, soft, reduction="none"), optax.softmax_cross_entropy(x, soft)),
        (jl.binary_cross_entropy(z, y, reduction="none"), optax.sigmoid_binary_cross_entropy(z, y)),
        (jl.binary_focal(z, y, alpha=0.25, reduction="none"), optax.sigmoid_focal_loss(z, y, alpha=0.25)),
        (jl.huber(z, y, delta=0.5, reduction="none"), optax.huber_loss(z, y, delta=0.5)),
        (jl.log_cosh(z, y, reduction="none"), optax.log_cosh(z, y)),
        (jl.hinge(z, 2 * y - 1, reduction="none"), optax.hinge_loss(z, 2 * y - 1)),
        (jl.kl_divergence(x, soft, reduction="none"), optax.kl_divergence(jax.nn.log_softmax(x), soft)),
        (jl.cosine_similarity(x, soft), optax.cosine_similarity(x, soft)),
    ]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6)
