"""Losses of rows (classes, distributions, vectors) against mpmath, like the losses of items."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from mpmath import mpf

from stablenum.formats import FORMATS
from tests.losses import oracle
from tests.losses.running import EVERY_RUN, ROUTES_AT_EDGES, RUNS, close, rounded, run
from tests.selection import slow_unless

INF = math.inf
ROWS = np.asarray(
    [
        [0.0, 0.0, 0.0, 0.0],
        [1.0, -2.0, 0.5, 3.0],
        [100.0, 0.0, -100.0, 99.0],
        [1000.0, 1000.0, -1000.0, 999.0],
        [-30000.0, -30001.0, -30000.5, -30010.0],
        [1e-3, -1e-3, 2e-3, 0.0],
        [5.0, -INF, 4.0, -INF],
        [-INF, -INF, 2.0, -INF],
    ]
)
HARD = np.asarray([0, 3, 0, 1, 2, 1, 2, 2])
SOFT = np.asarray(
    [
        [0.25, 0.25, 0.25, 0.25],
        [0.5, 0.5, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [0.5, 0.0, 0.25, 0.25],
        [0.0, 0.0, 1.0, 0.0],
        [0.125, 0.375, 0.5, 0.0],
        [0.75, 0.0, 0.25, 0.0],
        [0.0, 0.0, 1.0, 0.0],
    ]
)
WEIGHT = np.asarray([0.5, 2.0, 1.0, 4.0])


def _slopes(f: Callable[[list[Any]], Any], row: Sequence[float]) -> list[float]:
    """The gradient of a row; 0 for elements of -inf."""

    def of(i: int) -> float:
        def moved(v: Any) -> Any:
            return f([v if c == i else mpf(x) for c, x in enumerate(row)])

        return 0.0 if row[i] == -INF else oracle.derivative(moved, [row[i]], 0)

    return [of(i) for i in range(len(row))]


def _check(
    got: Any, exact: Callable[[int, list[Any]], Any], rows: np.ndarray, form: str, ulps: float = 8.0
) -> None:
    """Values within ulps of the row's largest logit (what cancels), gradients of that times their size."""
    value, grad = got
    finite = np.where(np.isfinite(rows), np.abs(rows), 0.0)
    # Computed in float32 at least: its error comes before the rounding to a narrow format.
    inner = "float64" if form == "float64" else "float32"
    lost = finite.max(axis=-1) * FORMATS[inner].eps / FORMATS[form].eps
    values = [float(exact(i, [mpf(v) for v in row])) for i, row in enumerate(rows.tolist())]
    close(value, values, form, ulps=ulps, scale=lost, what="value")
    slopes = [_slopes(lambda x, i=i: exact(i, x), row) for i, row in enumerate(rows.tolist())]
    scale = np.maximum(lost, 1.0)[:, None] if form in ("float32", "float64") else lost[:, None]
    close(
        grad,
        slopes,
        form,
        ulps=ulps,
        scale=scale * np.maximum(np.max(np.abs(slopes), axis=1, keepdims=True), float(form in inner)),
        what="gradient",
    )


# The routes that take longest, each with or without smoothing.
@pytest.mark.parametrize(
    ("route", "form", "smoothing"),
    slow_unless(
        lambda route, form, smoothing: (
            route == "torch" or (form == "float32" and (route == "jax jit") == (smoothing > 0))
        ),
        [(*way, smoothing) for smoothing in (0.0, 0.1) for way in [*EVERY_RUN, ("jax", "float32")]],
    ),
)
def test_cross_entropy_of_indices(route: str, form: str, smoothing: float) -> None:
    rows = rounded(ROWS, form)
    weight = WEIGHT if smoothing else None
    options: dict[str, Any] = {
        "label_smoothing": smoothing,
        "weight": weight,
        "z_loss": 0.0 if smoothing else 1e-4,
    }
    value, (grad,) = run(route, "cross_entropy", [rows, HARD], form, **options)

    def exact(i: int, x: list[Any]) -> Any:
        return oracle.cross_entropy(
            x, int(HARD[i]), weight=weight, smoothing=smoothing, z_loss=options["z_loss"]
        )

    _check((value, grad), exact, rows, form)


@pytest.mark.parametrize(("route", "form"), RUNS)
def test_cross_entropy_of_probabilities(route: str, form: str) -> None:
    rows = rounded(ROWS, form)
    value, (grad,) = run(route, "cross_entropy", [rows, SOFT], form, axis=1, weight=WEIGHT)
    _check((value, grad), lambda i, x: oracle.cross_entropy(x, SOFT[i].tolist(), weight=WEIGHT), rows, form)
    if route == "torch":
        value, (grad,) = run(route, "cross_entropy", [rows, SOFT], form, label_smoothing=0.125, axis=1)
        _check(
            (value, grad), lambda i, x: oracle.cross_entropy(x, SOFT[i].tolist(), smoothing=0.125), rows, form
        )


@pytest.mark.parametrize(("route", "form"), RUNS)
def test_focal(route: str, form: str) -> None:
    rows = rounded(np.where(np.isinf(ROWS), -50.0, ROWS)[:7], form)
    target = HARD[:7]
    value, (grad,) = run(route, "focal", [rows, target], form, gamma=0.5)
    # Half of the logits' cancellation, magnified by the steep slope of the power near 0.
    _check((value, grad), lambda i, x: oracle.focal(x, int(target[i]), 0.5), rows, form, ulps=24.0)


@pytest.mark.parametrize(("route", "form"), RUNS)
def test_kl_divergence(route: str, form: str) -> None:
    rows = rounded(ROWS, form)
    value, (grad,) = run(route, "kl_divergence", [rows, SOFT], form)
    _check((value, grad), lambda i, x: oracle.kl([mpf(v) for v in SOFT[i]], x), rows, form)
    with_logs = np.where(SOFT > 0, np.log(np.where(SOFT > 0, SOFT, 1.0)), -INF)
    logs, (same, _) = run(route, "kl_divergence", [rows, with_logs], form, wrt=(0, 1), log_targets=True)
    np.testing.assert_allclose(logs, value, rtol=32 * FORMATS[form].eps, atol=32 * FORMATS[form].eps)
    np.testing.assert_allclose(same, grad, atol=16 * FORMATS[form].eps)


@pytest.mark.parametrize(("route", "form"), RUNS)
def test_js_divergence(route: str, form: str) -> None:
    rows = rounded(ROWS, form)
    other = rounded(ROWS[::-1].copy(), form)
    value, (grad, _) = run(route, "js_divergence", [rows, other], form, wrt=(0, 1))
    _check((value, grad), lambda i, x: oracle.js(x, [mpf(v) for v in other[i].tolist()]), rows, form)
    assert (value >= 0).all()
    assert (value <= math.log(2) * (1 + FORMATS[form].eps)).all()


VECTORS = np.asarray([[3.0, 4.0], [1e-3, 1.0], [-1.0, 1.0], [2.0, -1.0], [60.0, 1e-2]])


@pytest.mark.parametrize(("route", "form"), RUNS)
@pytest.mark.parametrize("size", [1.0, 1e-4, "large"])
def test_cosine_similarity(route: str, form: str, size: float | str) -> None:
    scale = size if isinstance(size, float) else 2.0 ** math.floor(math.log2(FORMATS[form].max) - 7)
    x, y = rounded(VECTORS * scale, form), rounded(VECTORS[::-1].copy() * scale, form)
    value, (grad,) = run(route, "cosine_similarity", [x, y], form)
    exact = [[[mpf(v) for v in row] for row in z.tolist()] for z in (x, y)]
    close(value, [float(oracle.cosine(a, b)) for a, b in zip(*exact, strict=True)], form, ulps=4, scale=1.0)
    slopes = [
        _slopes(lambda a, b=b: oracle.cosine(a, b), row) for row, b in zip(x.tolist(), exact[1], strict=True)
    ]
    sizes = 1.0 / np.abs(x).max(axis=1, keepdims=True)
    close(grad, slopes, form, ulps=8, scale=sizes, what="gradient")


@pytest.mark.parametrize(("route", "form"), RUNS)
def test_info_nce(route: str, form: str) -> None:
    q, k = rounded(VECTORS[:4], form), rounded(VECTORS[1:5], form)
    positives = np.asarray([[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=bool)
    mask = np.ones((4, 4), dtype=bool)
    mask[0, 2] = mask[1, 1] = False
    value, (grad,) = run(route, "info_nce", [q, k], form, positives=positives, mask=mask, temperature=0.5)

    def exact(i: int, x: list[Any]) -> Any:
        here = [c for c in range(4) if mask[i, c]]
        s = [oracle.cosine(x, [mpf(v) for v in k[c].tolist()]) / mpf(0.5) for c in here]
        found = [v for c, v in zip(here, s, strict=True) if positives[i, c]]
        return oracle.logsumexp(s) - sum(found) / len(found) if found else mpf(0)

    close(
        value,
        [float(exact(i, [mpf(v) for v in row])) for i, row in enumerate(q.tolist())],
        form,
        ulps=8,
        scale=1.0,
    )
    slopes = [_slopes(lambda x, i=i: exact(i, x), row) for i, row in enumerate(q.tolist())]
    close(grad, slopes, form, ulps=16, scale=1.0 / np.abs(q).max(axis=1, keepdims=True), what="gradient")


@pytest.mark.parametrize("route", ROUTES_AT_EDGES)
def test_edges_of_rows_are_as_documented(route: str) -> None:
    nan = math.nan
    rows = np.asarray(
        [
            [0.0, -INF, 0.0],  # the target has probability 0
            [-INF, -INF, -INF],  # every class has probability 0
            [nan, INF, 0.0],  # ignored
            [0.0, 1.0, nan],  # masked
            [0.0, INF, 0.0],  # an overflow
            [0.0, nan, 0.0],
            [0.0, 1.0, 0.0],
        ]
    )
    target = np.asarray([1, 0, -100, 0, 0, 0, 0])
    mask = np.asarray([True, True, True, False, True, True, True])
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.0}):
        value, (grad,) = run(route, "cross_entropy", [rows, target], mask=mask, **options)
        assert value[:4].tolist() == [INF, 0, 0, 0]
        assert np.isnan(value[4:6]).all()
        assert np.isfinite(value[6])
        if not options:
            assert (grad[0] == 0).all()
        assert (grad[1:4] == 0).all()
        assert np.isnan(grad[4:6]).any(axis=1).all()
        assert np.isfinite(grad[6]).all()
    value, (grad,) = run(route, "focal", [rows, target], mask=mask)
    assert value[:4].tolist() == [INF, 0, 0, 0]
    assert np.isnan(value[4:6]).all()
    assert (grad[:4] == 0).all()
    value, (grad,) = run(route, "kl_divergence", [rows, np.full((7, 3), 1 / 3)], mask=mask)
    assert value[0] == INF
    assert np.isnan(value[[2, 4, 5]]).all()
    assert value[[1, 3]].tolist() == [0, 0]
    assert (grad[[0, 1, 3]] == 0).all()
    zero = np.zeros((1, 2))
    value, (a, b) = run(route, "cosine_similarity", [zero, np.ones((1, 2))], wrt=(0, 1))
    assert (value.tolist(), a.tolist(), b.tolist()) == ([0.0], [[0, 0]], [[0, 0]])
    value, (a,) = run(route, "info_nce", [np.zeros((2, 2)), np.eye(2)])
    assert (a == 0).all()
    assert value.tolist() == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize("route", ["torch", "jax jit"])
@pytest.mark.parametrize("apart", [0.0, 1e-4, 1e-3])
def test_a_divergence_of_nearly_equal_rows_is_not_negative_and_keeps_its_gradient(
    route: str, apart: float
) -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(200, 9)).astype(np.float32).astype(np.float64) * 4
    y = (x + apart * rng.normal(size=x.shape)).astype(np.float32).astype(np.float64)
    for name, options in (("kl_divergence", {"log_targets": True}), ("js_divergence", {})):
        value, (grad,) = run(route, name, [x, y], **options)
        _, (wide,) = run("torch", name, [x, y], "float64", **options)
        assert (value >= 0).all()
        np.testing.assert_allclose(grad, wide, atol=4e-7)


def test_equal_distributions_have_a_divergence_below_0_if_the_targets_do_not_add_up_to_1() -> None:
    value, _ = run("torch", "kl_divergence", [np.log([[0.5, 0.5]]), np.asarray([[0.25, 0.25]])])
    assert value.tolist() == pytest.approx([-0.5 * math.log(2)])


@pytest.mark.sampled
@pytest.mark.parametrize("route", ROUTES_AT_EDGES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_z_loss_keeps_the_logsumexp_when_the_target_logit_is_far_below(route: str, smoothing: float) -> None:
    rows, index = np.asarray([[-1e6, 0.0, 0.0], [0.0, 1.0, -1e6]]), np.asarray([0, 2])

    def items(z_loss: float) -> Any:
        return run(route, "cross_entropy", (rows, index), "float32", label_smoothing=smoothing, z_loss=z_loss)

    (_, (plain,)), (_, (both,)) = items(0.0), items(1.0)
    lse = np.asarray([math.log(2.0), math.log(1.0 + math.e)])
    p = np.exp(rows - lse[:, None])
    np.testing.assert_allclose(both - plain, 2.0 * lse[:, None] * p, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("route", ROUTES_AT_EDGES)
@pytest.mark.parametrize("soft", [False, True])
def test_a_target_of_probability_0_has_no_gradient_with_smoothing_and_z_loss(route: str, soft: bool) -> None:
    rows = np.asarray([[-math.inf, 0.0, 1.0], [0.0, 1.0, 2.0]])
    index = np.asarray([0, 1])
    targets = np.eye(3)[index] if soft else index
    value, (grad,) = run(route, "cross_entropy", (rows, targets), "float32", label_smoothing=0.1, z_loss=0.1)
    assert value[0] == math.inf
    assert math.isfinite(value[1])
    assert grad[0].tolist() == [0.0, 0.0, 0.0]
    assert (grad[1] != 0).all()


@pytest.mark.parametrize("route", ["torch", "jax jit"])
def test_a_class_of_weight_0_adds_nothing_to_smoothing(route: str) -> None:
    rows, weight = np.asarray([[3e38, -3e38, 0.0]]), np.asarray([1.0, 0.0, 0.0])
    value, _ = run(route, "cross_entropy", (rows, np.asarray([0])), label_smoothing=0.1, weight=weight)
    assert value.tolist() == [0.0]
