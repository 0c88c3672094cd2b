"""The worst error of a loss over regular arguments, in ulp of the format: value and gradient.

Against the definitions in ``oracle.py``, differentiated there with 200 digits. As for the functions of
``numerics``: where numbers that are not 0 cancel, in ulp of the largest of them; and without what the
rounding of a difference of two logits does to its exponential.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import mpmath
import numpy as np
import torch
from mpmath import mpf

import stablenum_jax.losses
import stablenum_torch.losses
from tests.losses import oracle
from tests.numerics.oracle import FORMATS, Binary, beside, signed, spread
from tests.numerics.oracle import mpf as clean
from tests.numerics.running import call

Item = Sequence[Any]
Worst = tuple[float, float]
KEYS = FORMATS["bfloat16"].round(np.random.default_rng(60).normal(size=(6, 5)))  # numbers of every format


def nothing(*_: Any) -> Any:
    """No cancellation and no allowance."""
    return 0


@dataclass(frozen=True)
class Loss:
    """A loss, its regular arguments and its oracle.

    Attributes:
        label: its row in the table; the first word is the function.
        exact: the loss of one item, from its arguments: numbers, or lists of them for rows.
        columns: the arguments in a format, one item a row; whole numbers are unchanged.
        options: of our function, in the core's spelling.
        wrt: the arguments with respect to which to differentiate.
        value_scale: of what cancels in an item's value.
        slope_scale: item, position of the argument, class -> of what cancels in the gradient.
        allowance: item, class -> ulp that the rounding of differences of logits costs.
    """

    label: str
    exact: Callable[..., Any]
    columns: Callable[[Binary], list[np.ndarray]]
    options: dict[str, Any] = field(default_factory=dict)
    wrt: tuple[int, ...] = (0,)
    value_scale: Callable[..., Any] = nothing
    slope_scale: Callable[[Item, int, int], Any] = nothing
    value_allowance: Callable[[Item], float] = nothing
    allowance: Callable[[Item, int], float] = nothing

    @property
    def name(self) -> str:
        return self.label.partition(" ")[0]


def rounded(form: Binary, columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Floating-point columns, rounded to the format."""
    return [form.round(c) if np.asarray(c).dtype.kind == "f" else np.asarray(c) for c in columns]


@functools.cache
def expected(loss_label: str, form: Binary) -> list[tuple[Item, Any, dict[int, list[Any]]]]:
    """The arguments, value and gradient of every item."""
    loss = LOSSES[loss_label]
    found = []
    for row in zip(*rounded(form, loss.columns(form)), strict=True):
        item = [_exactly(v) for v in row]
        value = clean(loss.exact(*item))
        found.append((item, value, {i: _gradient(loss.exact, item, i) for i in loss.wrt}))
    return found


def _exactly(value: Any) -> Any:
    value = np.asarray(value)
    if value.dtype.kind != "f":
        return int(value)
    return [mpf(v) for v in value.tolist()] if value.ndim else mpf(float(value))


def _gradient(f: Callable[..., Any], item: Item, i: int) -> list[Any]:
    """Central differences: with 200 digits and steps of 1e-45 their error is far below any ulp."""
    row = isinstance(item[i], list)
    point = item[i] if row else [item[i]]
    slopes = []
    with mpmath.workdps(200):
        step = mpf(10) ** -45 * ((row and max(map(abs, point))) or 1)
        for k, v in enumerate(point):
            ends = []
            for moved in (v + step, v - step):
                there = [*point[:k], moved, *point[k + 1 :]]
                ends.append(f(*item[:i], there if row else moved, *item[i + 1 :]))
            slopes.append(clean((ends[0] - ends[1]) / (2 * step)))
    return slopes


def ours(backend: str, loss: Loss) -> Callable[..., Any]:
    """Our function, item by item."""
    module = stablenum_jax.losses if backend.startswith("jax") else stablenum_torch.losses
    options = dict(loss.options)
    if loss.name != "cosine_similarity":
        options["reduction"] = "none"
    if not backend.startswith("jax") and "axis" in options:
        options["dim"] = options.pop("axis")
    return functools.partial(getattr(module, loss.name), **options)


def worst_loss(loss: Loss, form: Binary, backend: str, run: Callable[..., Any] | None = None) -> Worst:
    """The worst error of value and gradient of ``run`` (or ours)."""
    run = ours(backend, loss) if run is None else run
    columns = rounded(form, loss.columns(form))

    def called(*given: Any) -> Any:
        free = iter(given)
        fixed = {i: _fixed(c, form, backend) for i, c in enumerate(columns) if i not in loss.wrt}
        return run(*(fixed[i] if i in fixed else next(free) for i in range(len(columns))))

    values, slopes = call(backend, called, [columns[i] for i in loss.wrt], form.name)
    value = slope = 0.0
    for k, (item, exact, gradients) in enumerate(expected(loss.label, form)):
        if not form.regular(exact):
            continue
        error = form.error(values[k], exact, clean(loss.value_scale(*item)))
        value = max(value, error - loss.value_allowance(item))
        for i, got in zip(loss.wrt, slopes, strict=True):
            for c, (g, e) in enumerate(zip(np.atleast_1d(got[k]), gradients[i], strict=True)):
                scale = clean(loss.slope_scale(item, i, c))
                if form.regular(e) and form.regular(max(abs(e), scale)):
                    slope = max(slope, form.error(g, e, scale) - loss.allowance(item, c))
    return value, slope


def _fixed(column: np.ndarray, form: Binary, backend: str) -> Any:
    jax = backend.startswith("jax")
    if column.dtype.kind == "f":
        if jax:
            return jnp.asarray(column.astype(jnp.dtype(form.name)))
        return torch.tensor(column, dtype=getattr(torch, form.name))
    return jnp.asarray(column.astype(np.int32)) if jax else torch.tensor(column)


# --- arguments -------------------------------------------------------------------------------------------


def _line(form: Binary) -> list[float]:
    overflow = math.log(2) * (form.most + 1)
    return [
        *signed(spread(form, -30, 10, 3)),
        *signed(spread(form, -1100, -20, 4, 20)),
        *signed(beside(overflow, 20.0, math.log(2), 16.64)(form)),
        0.0,
    ]


def _with(values: Sequence[float], second: Sequence[float]) -> list[np.ndarray]:
    grid = list(itertools.product(values, second))
    return [np.asarray(column, np.float64) for column in zip(*grid, strict=True)]


def _grid(*columns: Sequence[float]) -> list[np.ndarray]:
    return [np.asarray(c, np.float64) for c in zip(*itertools.product(*columns), strict=True)]


def _differences(form: Binary) -> list[np.ndarray]:
    a = [*signed(spread(form, -60, 12, 41)), *beside(1.0, 0.5, 3.0)(form), 100.0, 1000.0]
    return [np.asarray([*a, *a]), np.asarray([*[0.0] * len(a), *a[7:], *a[:7]])]


def _logits(form: Binary) -> np.ndarray:
    rng = np.random.default_rng(43)
    rows = [rng.normal(size=(6, 7)) * size for size in (1e-3, 0.1, 1.0, 10.0)]
    rows += [rng.normal(size=(3, 7)) + offset for offset in (-100.0, -0.5, 100.0)]
    rows += [np.asarray([[value, *(-30.0 - np.arange(6))]]) for value in (-1e-3, 0.7, 3.7)]
    return np.concatenate([*rows, np.zeros((1, 7))])


def _labels(form: Binary) -> np.ndarray:
    return np.arange(len(_logits(form))) * 5 % 7


def _shares(form: Binary) -> np.ndarray:
    """Probabilities that are exact in every format, some of them 0."""
    row = np.asarray([0.25, 0.0, 0.125, 0.5, 0.0, 0.0625, 0.0625])
    return np.stack([np.roll(row, i) for i in range(len(_logits(form)))])


def _vectors(form: Binary, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    reach = min(form.most, 127) // 3
    exponents = np.repeat([-reach, -3, 0, 3, reach], 6)[:, None]
    return np.ldexp(rng.normal(size=(30, 5)), exponents)


# --- cancellation ------------------------------------------------------------------------------------------


def _one(*_: Any) -> Any:
    """Logarithms of sums of numbers from 1 up."""
    return mpf(1)


def _top(row: Sequence[Any]) -> Any:
    return max(*map(abs, row), mpf(1))


def _below_top(item: Item, c: int) -> float:
    return float(max(item[0]) - item[0][c])


def _share_or_target(item: Item, _: int, c: int) -> Any:
    target = item[1]
    t = mpf(c == target) if isinstance(target, int) else target[c]
    return max(oracle.probabilities(item[0])[c], t)


def _smoothed(s: float) -> Callable[[Item, int, int], Any]:
    return lambda item, i, c: max(_share_or_target(item, i, c), mpf(s) / 7)


def _margin(row: Sequence[Any], target: int) -> Any:
    return row[target] - oracle.logsumexp([v for c, v in enumerate(row) if c != target])


def _focal_slope(gamma: float, order: int) -> Callable[..., Any]:
    """The margin of two logits is rounded as they are: the effect on a function of it."""

    def steepness(row: Sequence[Any], target: int) -> Any:
        z = _margin(row, target)
        f = mpmath.diff(lambda z: oracle.sigmoid(-z) ** mpf(gamma) * mpmath.log1p(mpmath.exp(-z)), z, order)
        return abs(f) * _top(row)

    return steepness


def _focal_scale(gamma: float) -> Callable[[Item, int, int], Any]:
    second = _focal_slope(gamma, 2)

    def scale(item: Item, _: int, c: int) -> Any:
        row, target = item
        others = [v for k, v in enumerate(row) if k != target]
        share = mpf(1) if c == target else mpmath.exp(row[c] - oracle.logsumexp(others))
        return second(row, target) * share

    return scale


def _kl_scale(row: Sequence[Any], t: Sequence[Any]) -> Any:
    """The largest term of the sum, its logarithms being of 1 at least."""
    lse = oracle.logsumexp(row)
    return max(p * max(abs(mpmath.log(p)), abs(v - lse), 1) for p, v in zip(t, row, strict=True) if p)


def _js_scale(x: Sequence[Any], y: Sequence[Any]) -> Any:
    return max(p * max(1, abs(mpmath.log(p))) for r in (x, y) for p in oracle.probabilities(r)) / 2


def _js_slope_scale(item: Item, _: int, c: int) -> Any:
    p, q = oracle.probabilities(item[0])[c], oracle.probabilities(item[1])[c]
    return p * max(1, abs(mpmath.log(p)), abs(mpmath.log((p + q) / 2))) / 2


def _gaussian_terms(m: Any, y: Any, v: Any) -> Any:
    return max(abs(mpmath.log(v)), (y - m) ** 2 / v) / 2


def _gaussian_slopes(item: Item, i: int, _: int) -> Any:
    m, y, v = item
    return max(1 / v, ((y - m) / v) ** 2) / 2 if i == 2 else 0


def _counted(z: Any, y: Any) -> Any:
    return max(mpmath.exp(z), abs(y * z))


def _rising_terms(z: Any, y: Any, r: Any) -> Any:
    """The logarithms of Gamma are computed for arguments larger by 10 and shifted back."""
    odds = z - mpmath.log(r)
    a = r + (10 if r < 10 else 0)
    return max(
        r * oracle.softplus(odds),
        y * oracle.softplus(-odds),
        y * abs(mpmath.log(a + y)),
        10 * mpmath.log1p(y / min(r, 1)),
    )


def _rising_slopes(item: Item, i: int, _: int) -> Any:
    z, y, r = item
    if i == 0:
        odds = z - mpmath.log(r)
        return max(r * oracle.sigmoid(odds), y * oracle.sigmoid(-odds))
    return max(mpf(1), abs(z) + abs(mpmath.log(r)) + mpmath.log(10 + y), y / r)


def _unit_over(item: Item, i: int, _: int) -> Any:
    return 1 / mpmath.sqrt(sum(v * v for v in item[i]))


def _contrast(row: Sequence[Any], key: Sequence[Any]) -> Any:
    s = [oracle.cosine(row, [mpf(v) for v in k]) * 2 for k in KEYS.tolist()]
    return oracle.logsumexp(s) - 2 * oracle.cosine(row, key)


_HARD = (0.0, 1.0)
LOSSES = {
    loss.label: loss
    for loss in (
        Loss("binary_cross_entropy", oracle.binary_cross_entropy, lambda f: _with(_line(f), _HARD)),
        Loss(
            "binary_cross_entropy y=0.25",
            oracle.binary_cross_entropy,
            lambda f: _with(_line(f), [0.25]),
            slope_scale=lambda item, i, c: mpf(0.25),
        ),
        *(
            Loss(
                f"binary_focal gamma={gamma:g}",
                lambda z, y, gamma=gamma: oracle.binary_focal(z, y, gamma, 0.25),
                lambda f: _with(_line(f), _HARD),
                {"gamma": gamma, "alpha": 0.25},
                # Rounding gamma z; nothing for a power of two.
                value_allowance=lambda item, gamma=gamma: _exponent(gamma, item),
                allowance=lambda item, c, gamma=gamma: _exponent(gamma, item),
            )
            for gamma in (0.5, 2.0, 3.0)
        ),
        Loss(
            "cross_entropy",
            oracle.cross_entropy,
            lambda f: [_logits(f), _labels(f)],
            value_scale=_one,
            slope_scale=_share_or_target,
            allowance=_below_top,
        ),
        Loss(
            "cross_entropy smoothing=0.125",
            lambda row, t: oracle.cross_entropy(row, t, smoothing=0.125),
            lambda f: [_logits(f), _labels(f)],
            {"label_smoothing": 0.125},
            value_scale=_one,
            slope_scale=_smoothed(0.125),
            allowance=_below_top,
        ),
        Loss(
            "cross_entropy probabilities",
            oracle.cross_entropy,
            lambda f: [_logits(f), _shares(f)],
            {"axis": 1},
            value_scale=_one,
            slope_scale=_share_or_target,
            allowance=_below_top,
        ),
        Loss(
            "focal gamma=2",
            lambda row, t: oracle.focal(row, t, 2.0),
            lambda f: [_logits(f), _labels(f)],
            {"gamma": 2.0},
            value_scale=_focal_slope(2.0, 1),
            slope_scale=_focal_scale(2.0),
            allowance=_below_top,
        ),
        Loss(
            "kl_divergence",
            lambda row, t: oracle.kl(t, row),
            lambda f: [_logits(f), _shares(f)],
            value_scale=_kl_scale,
            slope_scale=_share_or_target,
            allowance=_below_top,
        ),
        Loss(
            "js_divergence",
            oracle.js,
            lambda f: [_logits(f), _logits(f)[::-1]],
            value_scale=_js_scale,
            slope_scale=_js_slope_scale,
            allowance=_below_top,
        ),
        Loss(
            "gaussian_nll",
            oracle.gaussian_nll,
            lambda f: _grid([1e-3, 0.7, -3.0, 90.0], [0.0, 1.0], [0.01, 0.5, 1.0, 7.0, 100.0]),
            wrt=(0, 2),
            value_scale=_gaussian_terms,
            slope_scale=_gaussian_slopes,
        ),
        Loss(
            "poisson_nll",
            lambda z, y: mpmath.exp(z) - y * z,
            lambda f: _grid([*signed(spread(f, -12, 2, 50, 12)), 0.0, 9.0], [0.0, 1.0, 3.0, 50.0]),
            value_scale=_counted,
            slope_scale=lambda item, i, c: max(mpmath.exp(item[0]), item[1]),
        ),
        Loss(
            "negative_binomial_nll",
            oracle.negative_binomial_nll,
            lambda f: _grid(
                [0.0, 1.0, -4.0, 6.0, -30.0], [0.0, 1.0, 7.0, 300.0], [0.01, 0.5, 3.0, 20.0, 6e4]
            ),
            wrt=(0, 2),
            value_scale=_rising_terms,
            slope_scale=_rising_slopes,
        ),
        Loss("huber", oracle.huber, _differences),
        Loss("log_cosh", oracle.log_cosh, _differences),
        Loss(
            "hinge",
            oracle.hinge,
            lambda f: _with([v for v in _line(f) if abs(v) != 1] + beside(1.0)(f)[::4], [-1.0, 1.0]),
        ),
        Loss(
            "cosine_similarity",
            oracle.cosine,
            lambda f: [_vectors(f, 51), _vectors(f, 52)],
            value_scale=lambda x, y: mpf(1),
            slope_scale=_unit_over,
        ),
        Loss(
            "cosine_embedding",
            lambda x, y: 1 - oracle.cosine(x, y),
            lambda f: [_vectors(f, 51), _vectors(f, 52)],
            value_scale=lambda x, y: mpf(1),
            slope_scale=_unit_over,
        ),
        Loss(
            "info_nce",
            _contrast,
            lambda f: [np.random.default_rng(61).normal(size=(6, 5)), KEYS],
            {"temperature": 0.5},
            value_scale=lambda row, key: mpf(2),
            slope_scale=lambda item, i, c: 2 * _unit_over(item, i, c),
        ),
    )
}


def _exponent(gamma: float, item: Item) -> float:
    """What rounding gamma z costs, in ulp of its exponential."""
    return 0.0 if math.log2(gamma).is_integer() else float(abs(gamma * item[0]))
