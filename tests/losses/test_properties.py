"""Properties for any input: on NumPy, where a case costs little, with gradients through torch."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat.numpy as xp
import hypothesis.extra.numpy as hnp
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stablenum_torch.losses as tl
from stablenum import losses

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MODERATE = st.floats(-50, 50, width=32)
_N, _C = 4, 3
ROWS = hnp.arrays(np.float32, (_N, _C), elements=FINITE | MODERATE)
MASKED_ROWS = hnp.arrays(np.float32, (_N, _C), elements=FINITE | MODERATE | st.just(-math.inf))
MODERATE_ROWS = hnp.arrays(np.float32, (_N, _C), elements=MODERATE)
ITEMS = hnp.arrays(np.float32, _N, elements=FINITE | MODERATE)
LABELS = hnp.arrays(np.int64, _N, elements=st.integers(0, _C - 1) | st.just(-100))
YES_NO = hnp.arrays(np.float32, _N, elements=st.sampled_from([0.0, 1.0]))
MASKS = hnp.arrays(bool, _N)
common = settings(max_examples=60, deadline=None, derandomize=True)


def _checked(function: Any, x: np.ndarray, *rest: Any, **options: Any) -> None:
    """Neither value nor gradient is NaN."""
    leaf = torch.tensor(x, requires_grad=True)
    others = [torch.tensor(r) if isinstance(r, np.ndarray) else r for r in rest]
    options = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    value = function(leaf, *others, **options)
    assert not value.isnan().any()
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    assert not grad.isnan().any()


@common
@given(z=ITEMS, y=YES_NO, mask=MASKS, gamma=st.sampled_from([0.0, 0.3, 1.0, 2.0]))
def test_finite_items_never_give_nan(z: np.ndarray, y: np.ndarray, mask: np.ndarray, gamma: float) -> None:
    for reduction in ("mean", "none"):
        options = {"mask": mask, "reduction": reduction}
        _checked(tl.binary_cross_entropy, z, y, **options)
        _checked(tl.binary_cross_entropy, z, y, reduction=reduction)
        _checked(tl.binary_focal, z, y, gamma=gamma, **options)
        _checked(tl.huber, z, y, **options)
        _checked(tl.log_cosh, z, y, **options)
        _checked(tl.hinge, z, 2 * y - 1, **options)
        _checked(tl.gaussian_nll, z, y, np.abs(z[::-1]).copy(), **options)
        _checked(tl.poisson_nll, z, y, **options)


@common
@given(x=MASKED_ROWS, t=LABELS, there=hnp.arrays(bool, _C), gamma=st.sampled_from([0.0, 0.3, 2.0]))
def test_finite_or_masked_rows_never_give_nan(
    x: np.ndarray, t: np.ndarray, there: np.ndarray, gamma: float
) -> None:
    for smoothing in (0.0, 0.1):
        _checked(tl.cross_entropy, x, t, label_smoothing=smoothing, z_loss=1e-4)
        _checked(tl.cross_entropy, x, t, label_smoothing=smoothing, class_mask=there)
    _checked(tl.focal, x, t, gamma=gamma)
    soft = np.eye(_C, dtype=np.float32)[np.maximum(t, 0)]
    _checked(tl.cross_entropy, x, soft)
    _checked(tl.kl_divergence, x, soft)
    _checked(tl.js_divergence, x, x[::-1].copy())


@common
@given(x=ROWS, y=ROWS)
def test_finite_vectors_never_give_nan(x: np.ndarray, y: np.ndarray) -> None:
    _checked(tl.cosine_similarity, x, y)
    _checked(tl.cosine_embedding, x, y)
    _checked(tl.info_nce, x, y, symmetric=True)
    cosine = losses.cosine_similarity(x, y, xp=xp)
    assert (np.abs(cosine) <= 1 + 1e-6).all()
    np.testing.assert_array_equal(cosine, losses.cosine_similarity(y, x, xp=xp))


@common
@given(x=MODERATE_ROWS, t=LABELS, seed=st.integers(0, 99))
def test_order_does_not_matter(x: np.ndarray, t: np.ndarray, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(_N)
    classes = np.random.default_rng(seed).permutation(_C)
    renamed = np.where(t < 0, t, np.argsort(classes)[np.maximum(t, 0)])
    plain = losses.cross_entropy(x, t, reduction="none", label_smoothing=0.1, xp=xp)
    np.testing.assert_array_equal(
        losses.cross_entropy(x[order], t[order], reduction="none", label_smoothing=0.1, xp=xp), plain[order]
    )
    other = losses.cross_entropy(x[:, classes], renamed, reduction="none", label_smoothing=0.1, xp=xp)
    np.testing.assert_allclose(other, plain, rtol=1e-5, atol=1e-5)


@common
@given(x=MODERATE_ROWS, t=LABELS, mask=MASKS)
def test_masked_equals_removed_and_ignored(x: np.ndarray, t: np.ndarray, mask: np.ndarray) -> None:
    masked = losses.cross_entropy(x, t, mask=mask, xp=xp)
    removed = losses.cross_entropy(x[mask], t[mask], xp=xp)
    ignored = losses.cross_entropy(x, np.where(mask, t, -100), xp=xp)
    np.testing.assert_allclose(masked, removed, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(masked, ignored)


@common
@given(x=MODERATE_ROWS, t=LABELS, s=st.floats(0, 0.9))
def test_smoothed_soft_and_hard_targets_agree(x: np.ndarray, t: np.ndarray, s: float) -> None:
    t = np.maximum(t, 0)
    one_hot = np.eye(_C, dtype=np.float32)[t]
    hard = losses.cross_entropy(x, t, label_smoothing=s, xp=xp)
    soft = losses.cross_entropy(x, one_hot, label_smoothing=s, xp=xp)
    moved = losses.cross_entropy(x, (1 - s) * one_hot + s / _C, xp=xp)
    np.testing.assert_allclose(soft, hard, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(moved, hard, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        losses.cross_entropy(x, t, label_smoothing=0.0, xp=xp), losses.cross_entropy(x, t, xp=xp)
    )
    np.testing.assert_allclose(
        losses.focal(x, t, gamma=0.0, xp=xp), losses.cross_entropy(x, t, xp=xp), rtol=1e-5, atol=2e-5
    )


@common
@given(z=hnp.arrays(np.float32, _N, elements=MODERATE), y=YES_NO)
def test_two_classes_are_the_binary_loss(z: np.ndarray, y: np.ndarray) -> None:
    both = np.stack([np.zeros_like(z), z], axis=1)
    t = y.astype(np.int64)
    for one, other in (
        (losses.cross_entropy(both, t, xp=xp), losses.binary_cross_entropy(z, y, xp=xp)),
        (losses.focal(both, t, xp=xp), losses.binary_focal(z, y, xp=xp)),
        (losses.binary_cross_entropy(-z, 1 - y, xp=xp), losses.binary_cross_entropy(z, y, xp=xp)),
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@common
@given(x=MODERATE_ROWS, y=MODERATE_ROWS, shift=MODERATE)
def test_divergences(x: np.ndarray, y: np.ndarray, shift: float) -> None:
    js = losses.js_divergence(x, y, reduction="none", xp=xp)
    assert (js >= 0).all()
    assert (js <= math.log(2) + 1e-6).all()
    np.testing.assert_allclose(losses.js_divergence(y, x, reduction="none", xp=xp), js, atol=1e-6)
    np.testing.assert_allclose(
        losses.js_divergence(x + np.float32(shift), y, reduction="none", xp=xp), js, atol=2e-5
    )
    assert (np.abs(losses.js_divergence(x, x, reduction="none", xp=xp)) < 1e-6).all()
    assert (losses.kl_divergence(x, x, log_targets=True, reduction="none", xp=xp) == 0).all()
    kl = losses.kl_divergence(x, y, log_targets=True, reduction="none", xp=xp)
    assert (kl >= 0).all()


@common
@given(z=hnp.arrays(np.float64, _N, elements=st.floats(-20, 20)), y=st.integers(0, 40))
def test_the_negative_binomial_approaches_poisson(z: np.ndarray, y: int) -> None:
    counts, many = np.full(_N, float(y)), np.full(_N, 1e15)
    one = losses.negative_binomial_nll(z, counts, many, full=True, reduction="none", xp=xp)
    other = losses.poisson_nll(z, counts, full=True, reduction="none", xp=xp)
    # The terms that cancel: the two rates, and y times the logarithm of the count, 35.
    size = np.exp(z) + 40.0 * (y + 1) ** 2
    assert (np.abs(one - other) <= 1e-13 * size + 1e-15 * (np.exp(z) + y) ** 2).all()


@common
@given(z=hnp.arrays(np.float32, _N, elements=MODERATE), y=YES_NO, mask=MASKS)
def test_reductions_agree_with_one_another(z: np.ndarray, y: np.ndarray, mask: np.ndarray) -> None:
    for name in ("binary_cross_entropy", "binary_focal", "huber", "log_cosh", "hinge"):
        function = getattr(losses, name)
        items = function(z, y, mask=mask, reduction="none", xp=xp)
        total = function(z, y, mask=mask, reduction="sum", xp=xp)
        mean = function(z, y, mask=mask, xp=xp)
        np.testing.assert_allclose(total, items.sum(), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(mean, items.sum() / max(mask.sum(), 1), rtol=1e-6, atol=1e-7)
        assert (items[~mask] == 0).all()
