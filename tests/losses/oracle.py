"""The losses in mpmath with 50 digits, from their definitions; no code is shared with the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mpmath
from mpmath import mpf

mpmath.mp.dps = 50
Number = Any
INF = mpmath.inf


def derivative(f: Callable[..., Number], at: Sequence[float], i: int) -> float:
    """The partial derivative of f at a point in its i-th argument: a central difference with 120 digits."""
    point = [mpf(a) for a in at]
    step = mpf(10) ** -30 * abs(point[i]) if abs(point[i]) > 1 else mpf(10) ** -40
    with mpmath.workdps(120):
        high, low = list(point), list(point)
        high[i], low[i] = point[i] + step, point[i] - step
        return float((f(*high) - f(*low)) / (2 * step))


def softplus(z: Number) -> Number:
    return z + mpmath.log1p(mpmath.exp(-z)) if z > 0 else mpmath.log1p(mpmath.exp(z))


def sigmoid(z: Number) -> Number:
    return 1 / (1 + mpmath.exp(-z)) if z > 0 else mpmath.exp(z) / (1 + mpmath.exp(z))


def binary_cross_entropy(z: Number, y: Number, pos_weight: Number = 1) -> Number:
    return (1 - y) * softplus(z) + pos_weight * y * softplus(-z)


def binary_focal(z: Number, y: Number, gamma: float, alpha: float | None = None) -> Number:
    missed = (1 - y) * sigmoid(z) + y * sigmoid(-z)
    share = 1 if alpha is None else mpf(alpha) * y + (1 - mpf(alpha)) * (1 - y)
    return share * missed ** mpf(gamma) * binary_cross_entropy(z, y)


def huber(a: Number, b: Number, delta: float = 1.0) -> Number:
    d, delta = abs(a - b), mpf(delta)
    return d * d / 2 if d <= delta else delta * (d - delta / 2)


def log_cosh(a: Number, b: Number) -> Number:
    d = abs(a - b)
    return d + mpmath.log1p(mpmath.exp(-2 * d)) - mpmath.log(2)


def hinge(s: Number, y: Number, margin: float = 1.0, squared: bool = False) -> Number:
    short = max(mpf(0), mpf(margin) - y * s)
    return short**2 if squared else short


def gaussian_nll(mean: Number, y: Number, var: Number, eps: float = 1e-6, full: bool = False) -> Number:
    v = max(var, mpf(eps))
    return (mpmath.log(v) + (y - mean) ** 2 / v + (mpmath.log(2 * mpmath.pi) if full else 0)) / 2


def poisson_nll(z: Number, y: Number, cap: float, full: bool = False) -> Number:
    cap = mpf(cap)
    rate = mpmath.exp(z) if z <= cap else mpmath.exp(cap) * (1 + z - cap)
    return rate - y * z + (mpmath.loggamma(y + 1) if full else 0)


def negative_binomial_nll(z: Number, y: Number, r: Number, full: bool = False) -> Number:
    odds = z - mpmath.log(r)
    with mpmath.workdps(160):
        rising = mpmath.loggamma(r + y) - mpmath.loggamma(r)
    factorial = mpmath.loggamma(y + 1) if full else 0
    return r * softplus(odds) + y * softplus(-odds) - rising + factorial


def logsumexp(x: Sequence[Number]) -> Number:
    top = max(x)
    return top + mpmath.log(sum(mpmath.exp(v - top) for v in x if v != -INF))


def cross_entropy(
    x: Sequence[Number],
    target: int | Sequence[Number],
    *,
    weight: Sequence[float] | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Number:
    """One row, without its masked classes."""
    here = [c for c, v in enumerate(x) if v != -INF]
    lse, s = logsumexp(x), mpf(smoothing)
    w = [mpf(1)] * len(x) if weight is None else [mpf(v) for v in weight]
    hard = isinstance(target, int)
    t = [mpf(c == target) for c in range(len(x))] if hard else [mpf(v) for v in target]
    t = [(1 - s) * v + (s / len(here) if c in here else 0) for c, v in enumerate(t)]
    if any(t[c] for c in range(len(x)) if c not in here):
        return INF
    return sum(t[c] * w[c] * (lse - x[c]) for c in here) + mpf(z_loss) * lse**2


def focal(x: Sequence[Number], target: int, gamma: float) -> Number:
    others = logsumexp([v for c, v in enumerate(x) if c != target])
    z = x[target] - others
    return sigmoid(-z) ** mpf(gamma) * softplus(-z)


def kl(t: Sequence[Number], log_q: Sequence[Number]) -> Number:
    """t are probabilities, log_q logits."""
    lse = logsumexp(log_q)
    return sum(p * (mpmath.log(p) - (q - lse)) for p, q in zip(t, log_q, strict=True) if p > 0)


def probabilities(x: Sequence[Number]) -> list[Number]:
    lse = logsumexp(x)
    return [mpmath.exp(v - lse) for v in x]


def js(x: Sequence[Number], y: Sequence[Number]) -> Number:
    p, q = probabilities(x), probabilities(y)
    total = mpf(0)
    for a, b in zip(p, q, strict=True):
        m = (a + b) / 2
        total += sum(v * mpmath.log(v / m) / 2 for v in (a, b) if v > 0)
    return total


def cosine(x: Sequence[Number], y: Sequence[Number]) -> Number:
    norms = [mpmath.sqrt(sum(v * v for v in u)) for u in (x, y)]
    return sum(a * b for a, b in zip(x, y, strict=True)) / (norms[0] * norms[1])
