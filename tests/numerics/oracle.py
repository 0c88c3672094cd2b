"""What the safe functions should give, to 50 digits, and how far an answer is from it in ulp.

Shares no code with the library. Functions of one or two numbers have their value and partial derivatives here
in closed form; functions of a row have their value, and the derivative of a weighted sum of the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import mpmath
import numpy as np

mp = mpmath.mp.clone()
mp.dps = 50
mpf = mp.mpf
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Binary:
    """A binary floating-point format, from its two widths."""

    name: str
    digits: int
    least: int  # exponent of the smallest normal number
    most: int  # exponent of the largest number

    @property
    def max(self) -> float:
        return (2 - 2.0 ** (1 - self.digits)) * 2.0**self.most

    @property
    def tiny(self) -> float:
        return 2.0**self.least

    @property
    def subnormal(self) -> float:
        return 2.0 ** (self.least - self.digits + 1)

    @property
    def eps(self) -> float:
        return 2.0 ** (1 - self.digits)

    @property
    def wide(self) -> Binary:
        """The format in which the library computes."""
        return self if self.digits >= 24 else FORMATS["float32"]

    def round(self, values: Sequence[float]) -> np.ndarray:
        """The nearest numbers of the format, as float64."""
        dtype = ml_dtypes.bfloat16 if self.name == "bfloat16" else np.dtype(self.name)
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(values, np.float64).astype(dtype).astype(np.float64)

    def ulp(self, exact: Any) -> Any:
        """The distance between numbers of the format near ``exact``."""
        exponent = self.least if exact == 0 else max(int(mp.floor(mp.log(abs(exact), 2))), self.least)
        return mp.ldexp(mpf(1), exponent - self.digits + 1)

    def regular(self, exact: Any) -> bool:
        """Whether the number is 0 or normal, in range, and 4 times off the limits of the computing format."""
        return exact == 0 or self.wide.tiny * 4 <= abs(exact) <= min(self.max, self.wide.max / 4)

    def error(self, got: float, exact: Any, scale: Any = 0) -> float:
        """``|got - exact|`` in ulp of the larger of ``exact`` and ``scale``."""
        if not math.isfinite(got):
            return INF
        return float(abs(mpf(got) - exact) / self.ulp(max(abs(exact), abs(scale))))


FORMATS = {
    f.name: f
    for f in (
        Binary("float64", 53, -1022, 1023),
        Binary("float32", 24, -126, 127),
        Binary("bfloat16", 8, -126, 127),
        Binary("float16", 11, -14, 15),
    )
}


def spread(form: Binary, low: int, high: int, seed: int, n: int = 48) -> list[float]:
    """Positive random numbers with exponents from ``low`` to ``high``, within the format."""
    rng = np.random.default_rng(seed)
    low = max(low, form.least)
    high = max(low, min(high, form.most))
    return list(np.ldexp(rng.uniform(1, 2, n), rng.integers(low, high + 1, n)))


def beside(*points: float) -> Callable[[Binary], list[float]]:
    """The points and their neighbours in the format."""

    def near(form: Binary) -> list[float]:
        found = []
        for point in points:
            center = float(form.round([point])[0])
            step = float(form.ulp(mpf(center)))
            found += [center - step, center - step / 2, center, center + step / 2, center + step]
        return found

    return near


def signed(values: Sequence[float]) -> list[float]:
    """The values and their negatives."""
    return [*values, *(-v for v in values)]


@dataclass(frozen=True)
class Function:
    """A function of one or two numbers.

    Attributes:
        value, slopes: in mpmath; one slope an argument.
        points: the regular arguments in a format.
        edges: what the docstring states: arguments, value, slopes (None: not stated).
        scale: what the value's ulp is taken of if it is larger than the value: where the function crosses 0
            between numbers that are not, no more than the arguments' own digits can be had.
        slope_allowance: further ulp for the slopes, as a function of the arguments: what rounding the
            difference or quotient of two of them does to its exponential.
        positional: further arguments, plain numbers.
    """

    name: str
    value: Callable[..., Any]
    slopes: tuple[Callable[..., Any], ...]
    points: Callable[[Binary], list[tuple[float, ...]]]
    edges: Callable[[Binary], list[tuple[tuple[float, ...], float, tuple[float, ...]]]]
    scale: Callable[..., Any] = lambda *_: 0
    slope_allowance: Callable[..., float] = lambda *_: 0.0
    positional: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        return self.name + "".join(f" {p:g}" for p in self.positional)

    def arguments(self, form: Binary) -> list[tuple[float, ...]]:
        """The regular arguments, rounded to the format, without repetition."""
        rounded = {tuple(float(v) for v in form.round(point)) for point in self.points(form)}
        return sorted(point for point in rounded if all(map(math.isfinite, point)))


def ones(*lists: Sequence[float]) -> list[tuple[float, ...]]:
    return [(v,) for values in lists for v in values]


def pairs(*lists: Sequence[float]) -> list[tuple[float, ...]]:
    """Each list shifted against itself by a fixed number of places."""
    return [(values[i], values[i - 7]) for values in lists for i in range(len(values))]


def _positive(form: Binary) -> list[tuple[float, ...]]:
    return ones(
        spread(form, -1100, 1100, 1), beside(1.0)(form), spread(form, -2, 1, 2), [form.tiny, form.max]
    )


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def _softplus(x: Any) -> Any:
    return mp.log1p(mp.exp(x)) if x < 0 else x + mp.log1p(mp.exp(-x))


def _line(form: Binary) -> list[tuple[float, ...]]:
    """Numbers over the range of exponents in which an exponential changes."""
    overflow = math.log(2) * (form.most + 1)
    return ones(
        signed(spread(form, -30, 10, 3)),
        signed(spread(form, -1100, -20, 4, 30)),
        signed(beside(overflow, 20.0, math.log(2), 16.64)(form)),
        [0.0],
    )


def _log_floor(form: Binary) -> float:
    return form.wide.least * math.log(2)


def _power(exponent: float, whole: bool) -> Function:
    odd = exponent % 2 == 1

    def points(form: Binary) -> list[tuple[float, ...]]:
        reach = int(form.most / max(abs(exponent), 1))
        values = [*spread(form, -reach, reach, 5), *beside(1.0)(form)]
        return ones(signed(values) if whole else values)

    def value(x: Any) -> Any:
        return mp.power(x, int(exponent) if whole else mpf(exponent))

    def slope(x: Any) -> Any:
        e = int(exponent) - 1 if whole else mpf(exponent) - 1
        return mpf(exponent) * mp.power(x, e)

    edges = [((0.0,), 0.0, (0.0,)), ((-0.0,), 0.0, (0.0,)), ((NAN,), NAN, (NAN,))]
    edges += [((INF,), INF if exponent > 0 else 0.0, (INF if exponent > 1 else 0.0,))]
    if not whole:
        edges += [((-1.0,), 0.0, (0.0,)), ((-INF,), 0.0, (0.0,))]
    else:
        size = INF if exponent > 0 else 0.0
        edges += [((-INF,), -size if odd else size, (NAN,))]
    return Function("power", value, (slope,), points, lambda form: edges, positional=(exponent,))


def _power_of_two_arrays() -> Function:
    """The power whose exponent is an array, and has a slope too."""

    def points(form: Binary) -> list[tuple[float, ...]]:
        exponents = [0.0, 1.0, 2.0, -1.0, *spread(form, -6, 1, 27, 20), *signed(spread(form, -3, 1, 28, 20))]
        reach = int(form.most / 2)
        rows = zip(spread(form, -reach, reach, 29, len(exponents)), exponents, strict=True)
        return [row for row in rows if form.regular(value(*map(mpf, row)))]

    def value(x: Any, p: Any) -> Any:
        return mp.power(x, p)

    edges: list[Any] = [
        ((0.0, 0.5), 0.0, (0.0, 0.0)),
        ((0.0, 0.0), 1.0, (0.0, 0.0)),
        ((-0.0, 1.0), 0.0, (1.0, 0.0)),
        ((0.0, -1.0), 0.0, (0.0, 0.0)),
        ((-2.0, 3.0), -8.0, (12.0, -8 * math.log(2))),
        ((-2.0, 2.0), 4.0, (-4.0, 4 * math.log(2))),
        ((-2.0, 0.5), 0.0, (0.0, 0.0)),
        ((NAN, 2.0), NAN, (NAN, NAN)),
        ((2.0, NAN), NAN, (NAN, NAN)),
    ]
    slopes = (lambda x, p: p * mp.power(x, p - 1), lambda x, p: mp.power(x, p) * mp.log(x))
    return Function("power", value, slopes, points, lambda form: edges)


FUNCTIONS = [
    _power_of_two_arrays(),
    Function(
        "log",
        mp.log,
        (lambda x: 1 / x,),
        _positive,
        lambda f: [
            ((0.0,), _log_floor(f), (0.0,)),
            ((-0.0,), _log_floor(f), (0.0,)),
            ((-1.0,), _log_floor(f), (0.0,)),
            ((-INF,), _log_floor(f), (0.0,)),
            ((INF,), INF, (0.0,)),
            ((NAN,), NAN, (NAN,)),
            *([((f.subnormal,), _log_floor(f), (0.0,))] if f.least == f.wide.least else []),
            *([((f.tiny,), _log_floor(f), (1 / f.tiny,))] if f.least == f.wide.least else []),
        ],
    ),
    Function(
        "log1mexp",
        lambda a: mp.log(-mp.expm1(-a)),
        (lambda a: 1 / mp.expm1(a),),
        lambda f: ones(
            spread(f, -1100, 9, 6), spread(f, -3, 3, 7), beside(math.log(2), 1.0, 0.5)(f), [f.tiny, f.max]
        ),
        lambda f: [
            ((0.0,), -INF, (0.0,)),
            ((-0.0,), -INF, (0.0,)),
            ((-3.0,), -INF, (0.0,)),
            ((-INF,), -INF, (0.0,)),
            ((INF,), 0.0, (0.0,)),
            ((NAN,), NAN, (NAN,)),
        ],
    ),
    *(
        Function(
            name,
            _softplus,
            (_sigmoid,),
            _line,
            lambda f: [
                ((INF,), INF, (1.0,)),
                ((-INF,), 0.0, (0.0,)),
                ((NAN,), NAN, (NAN,)),
                ((-f.max,), 0.0, (0.0,)),
                ((f.max,), f.max, (1.0,)),
            ],
        )
        for name in ("softplus", "log1pexp")
    ),
    Function(
        "log_sigmoid",
        lambda x: -_softplus(-x),
        (lambda x: _sigmoid(-x),),
        _line,
        lambda f: [
            ((INF,), 0.0, (0.0,)),
            ((-INF,), -INF, (1.0,)),
            ((NAN,), NAN, (NAN,)),
            ((-f.max,), -f.max, (1.0,)),
            ((f.max,), 0.0, (0.0,)),
        ],
    ),
    Function(
        "logaddexp",
        lambda a, b: max(a, b) + mp.log1p(mp.exp(-abs(a - b))),
        (lambda a, b: _sigmoid(a - b), lambda a, b: _sigmoid(b - a)),
        lambda f: (
            pairs(signed(spread(f, -20, 5, 8)), spread(f, -4, 2, 9))
            + [(v, v) for v in spread(f, -9, 9, 10, 20)]
        ),
        lambda f: [
            ((-INF, -INF), -INF, (0.0, 0.0)),
            ((INF, INF), INF, (0.5, 0.5)),
            ((INF, -INF), INF, (1.0, 0.0)),
            ((-INF, 3.0), 3.0, (0.0, 1.0)),
            ((3.0, -INF), 3.0, (1.0, 0.0)),
            ((INF, 3.0), INF, (1.0, 0.0)),
            ((f.max, -f.max), f.max, (1.0, 0.0)),
            ((NAN, 1.0), NAN, (NAN, NAN)),
        ],
        scale=lambda a, b: max(abs(a), abs(b)),
        slope_allowance=lambda a, b: abs(a - b),
    ),
    Function(
        "logsubexp",
        lambda a, b: a + mp.log(-mp.expm1(b - a)),
        (lambda a, b: 1 / -mp.expm1(b - a), lambda a, b: -1 / mp.expm1(a - b)),
        lambda f: [(max(p), min(p)) for p in pairs(signed(spread(f, -20, 5, 11))) if max(p) != min(p)],
        lambda f: [
            ((-INF, -INF), -INF, (0.0, 0.0)),
            ((INF, INF), -INF, (0.0, 0.0)),
            ((2.0, 2.0), -INF, (0.0, 0.0)),
            ((1.0, 2.0), -INF, (0.0, 0.0)),
            ((INF, 2.0), INF, (1.0, 0.0)),
            ((3.0, -INF), 3.0, (1.0, 0.0)),
            ((f.max, -f.max), f.max, (1.0, 0.0)),
            ((NAN, 1.0), NAN, (NAN, NAN)),
        ],
        scale=lambda a, b: max(abs(a), abs(b)),
        slope_allowance=lambda a, b: abs(a - b),
    ),
    Function(
        "xlogy",
        lambda x, y: x * mp.log(y),
        (lambda x, y: mp.log(y), lambda x, y: x / y),
        lambda f: pairs(spread(f, -60, 60, 12), spread(f, -1, 0, 13)),
        lambda f: [
            ((0.0, 0.0), 0.0, (0.0, 0.0)),
            ((0.0, -1.0), 0.0, (0.0, 0.0)),
            ((0.0, 2.0), 0.0, (math.log(2), 0.0)),
            ((0.0, INF), 0.0, (0.0, 0.0)),
            ((1.0, 0.0), _log_floor(f), (_log_floor(f), 0.0)),
            ((0.0, NAN), NAN, (NAN, NAN)),
        ],
    ),
    Function(
        "divide",
        lambda x, y: x / y,
        (lambda x, y: 1 / y, lambda x, y: -x / y**2),
        lambda f: (
            pairs(signed(spread(f, -1100, 1100, 14)), spread(f, -9, 9, 15))
            + [(0.0, v) for v in spread(f, -1100, 1100, 16)]
            + [(v, w) for v in (f.tiny, 1.0, f.max) for w in beside(2.0 ** (f.wide.most // 3))(f.wide)]
        ),
        lambda f: [
            ((1.0, 0.0), 0.0, (0.0, 0.0)),
            ((0.0, 0.0), 0.0, (0.0, 0.0)),
            ((INF, 0.0), 0.0, (0.0, 0.0)),
            ((1.0, -0.0), 0.0, (0.0, 0.0)),
            ((1.0, INF), 0.0, (0.0, -0.0)),
            ((NAN, 1.0), NAN, (1.0, NAN)),
            ((NAN, 0.0), NAN, (1.0, 0.0)),
            ((NAN, -0.0), NAN, (1.0, 0.0)),
        ],
    ),
    Function(
        "reciprocal",
        lambda x: 1 / x,
        (lambda x: -1 / x**2,),
        lambda f: ones(signed(spread(f, -1100, 1100, 17))),
        lambda f: [((0.0,), 0.0, (0.0,)), ((INF,), 0.0, (0.0,)), ((NAN,), NAN, (NAN,))],
    ),
    Function(
        "sqrt",
        mp.sqrt,
        (lambda x: 1 / (2 * mp.sqrt(x)),),
        _positive,
        lambda f: [
            ((0.0,), 0.0, (0.0,)),
            ((-0.0,), 0.0, (0.0,)),
            ((-1.0,), 0.0, (0.0,)),
            ((-INF,), 0.0, (0.0,)),
            ((INF,), INF, (0.0,)),
            ((NAN,), NAN, (NAN,)),
        ],
    ),
    Function(
        "rsqrt",
        lambda x: 1 / mp.sqrt(x),
        (lambda x: -1 / (2 * x * mp.sqrt(x)),),
        _positive,
        lambda f: [
            ((0.0,), 0.0, (0.0,)),
            ((-1.0,), 0.0, (0.0,)),
            ((INF,), 0.0, (0.0,)),
            ((NAN,), NAN, (NAN,)),
        ],
    ),
    _power(0.7, False),
    _power(-1.3, False),
    _power(10.3, False),
    _power(2.0, True),
    _power(3.0, True),
    _power(-2.0, True),
    Function(
        "arccos",
        mp.acos,
        (lambda x: -1 / mp.sqrt((1 - x) * (1 + x)),),
        lambda f: [
            p
            for p in ones(
                signed(spread(f, -60, -1, 18)),
                signed([1 - v for v in spread(f, -f.digits, -2, 19)]),
                beside(0.0, 0.5)(f),
            )
            if abs(p[0]) < 1 and abs(f.round([p[0]])[0]) < 1
        ],
        lambda f: [
            ((1.0,), 0.0, (0.0,)),
            ((-1.0,), math.pi, (0.0,)),
            ((2.0,), 0.0, (0.0,)),
            ((-INF,), math.pi, (0.0,)),
            ((NAN,), NAN, (NAN,)),
        ],
    ),
    Function(
        "arctanh",
        mp.atanh,
        (lambda x: 1 / ((1 - x) * (1 + x)),),
        lambda f: [
            p
            for p in ones(
                signed(spread(f, -1100, -1, 20)), signed([1 - v for v in spread(f, -f.digits, -2, 21)]), [0.0]
            )
            if abs(f.round([p[0]])[0]) < 1
        ],
        lambda f: [
            ((1.0,), math.atanh(1 - f.eps / 2), (0.0,)),
            ((-1.0,), -math.atanh(1 - f.eps / 2), (0.0,)),
            ((INF,), math.atanh(1 - f.eps / 2), (0.0,)),
            ((NAN,), NAN, (NAN,)),
        ],
    ),
    Function(
        "arctan2",
        mp.atan2,
        (
            lambda y, x: x / (x * x + y * y) if x or y else 0,
            lambda y, x: -y / (x * x + y * y) if x or y else 0,
        ),
        lambda f: (
            pairs(signed(spread(f, -1100, 1100, 22)), signed(spread(f, -4, 4, 23)))
            + [(v, v) for v in spread(f, -1100, 1100, 24, 30)]
            + [(0.0, v) for v in spread(f, -1100, 1100, 25, 30)]
        ),
        lambda f: [
            ((0.0, 0.0), 0.0, (0.0, 0.0)),
            ((-0.0, -0.0), 0.0, (0.0, 0.0)),
            ((0.0, -1.0), math.pi, (-1.0, 0.0)),
            ((INF, 1.0), math.pi / 2, (0.0, 0.0)),
            ((1.0, INF), 0.0, (0.0, 0.0)),
            ((1.0, -INF), math.pi, (0.0, 0.0)),
            ((INF, INF), math.pi / 4, (0.0, 0.0)),
            ((NAN, 1.0), NAN, (NAN, NAN)),
        ],
    ),
    *(
        Function(
            "soft_cap",
            lambda x, c=cap: c * mp.tanh(x / c),
            (lambda x, c=cap: 1 / mp.cosh(x / c) ** 2,),
            lambda f: ones(signed(spread(f, -40, 12, 26)), beside(15.0, 7.5, 30.0, 25.0)(f), [0.0]),
            lambda f, c=cap: [
                ((INF,), c, (0.0,)),
                ((-INF,), -c, (0.0,)),
                ((f.max,), c, (0.0,)),
                ((NAN,), NAN, (NAN,)),
            ],
            positional=(cap,),
        )
        for cap in (30.0, 50.0)
    ),
]


@dataclass(frozen=True)
class RowFunction:
    """A function along a row.

    Attributes:
        value: in mpmath, a list (or one number in a list) of results.
        pulled: row, weights of the results -> the gradient of their weighted sum.
        value_scale, slope_scale: what the ulp are taken of where that is larger than the result itself: norms
            of the row, where elements of it cancel.
        exponential: it takes exponentials of differences; see ``slope_allowance`` of :class:`Function`.
        offset: it subtracts the mean first.
    """

    name: str
    value: Callable[[list[Any]], list[Any]]
    pulled: Callable[[list[Any], list[Any]], list[Any]]
    value_scale: Callable[[list[Any]], Any] = lambda row: 0
    slope_scale: Callable[[list[Any], list[Any]], Any] = lambda row, weights: 0
    exponential: bool = False
    offset: bool = False

    @property
    def label(self) -> str:
        return self.name

    def rows(self, form: Binary) -> list[list[float]]:
        """Regular rows, within the range of exponentials or of squares, whichever the function takes."""
        rng = np.random.default_rng(40)
        lengths = (1, 7, 33) if form.wide is form else (7,)  # narrow formats are computed as float32 is
        if self.exponential:
            rows = [rng.normal(size=n) * size for n in lengths for size in (1e-3, 0.1, 1.0, 10.0)]
            rows += [rng.normal(size=7) + offset for offset in (-100.0, -0.5, 100.0)]
            rows += [np.array([value, *(-30.0 - np.arange(6))]) for value in (-1e-3, 0.7, 3.7)]
            rows += [np.full(7, 0.3), np.full(7, -20.0)]
        else:
            reach = min(form.most, form.wide.most) - 6
            exponents = (-reach, -reach // 2 - 3, -3, 0, 3, reach // 2 + 3, reach)
            rows = [np.ldexp(rng.normal(size=n), e) for n in lengths if n > 1 for e in exponents]
            rows += [np.ldexp(rng.normal(size=7), rng.integers(-20, 12, 7))]
        if self.offset:
            rows += [rng.normal(size=n) + far for n in lengths if n > 1 for far in (-3.0, 100.0, 1e4)]
        rounded = [[float(v) for v in form.round(row)] for row in rows]
        return [row for row in rounded if not self.offset or len(set(row)) > 1]


def weights_for(n: int) -> list[float]:
    """Weights of results that every format holds."""
    return [(1.0, -0.5, 0.25, 2.0)[i % 4] for i in range(n)]


def _lse(row: list[Any]) -> Any:
    top = max(row)
    return top + mp.log(mp.fsum(mp.exp(v - top) for v in row))


def _shares(row: list[Any]) -> list[Any]:
    total = _lse(row)
    return [mp.exp(v - total) for v in row]


def _length(row: list[Any]) -> Any:
    return mp.sqrt(mp.fsum(v * v for v in row))


def _away(row: list[Any]) -> list[Any]:
    mean = mp.fsum(row) / len(row)
    return [v - mean for v in row]


def _dot(a: list[Any], b: list[Any]) -> Any:
    return mp.fsum(p * q for p, q in zip(a, b, strict=True))


def _over(row: list[Any], divisor: Any) -> list[Any]:
    return [v / divisor for v in row]


def _largest(row: list[Any]) -> Any:
    return max(abs(v) for v in row)


def _softmax_pulled(row: list[Any], w: list[Any]) -> list[Any]:
    p = _shares(row)
    mean = _dot(p, w)
    return [q * (v - mean) for q, v in zip(p, w, strict=True)]


def _log_softmax_pulled(row: list[Any], w: list[Any]) -> list[Any]:
    total = mp.fsum(w)
    return [v - q * total for q, v in zip(_shares(row), w, strict=True)]


def _cumulative_pulled(row: list[Any], w: list[Any]) -> list[Any]:
    found = [mpf(0)] * len(row)
    for k, weight in enumerate(w):
        for i, share in enumerate(_shares(row[: k + 1])):
            found[i] += weight * share
    return found


def _normalized_pulled(unit: list[Any], length: Any, w: list[Any], n: int = 1) -> list[Any]:
    along = _dot(unit, w) / n
    return [(v - u * along) / length for u, v in zip(unit, w, strict=True)]


def _rms(row: list[Any], eps: float) -> Any:
    return mp.sqrt(_dot(row, row) / len(row) + mpf(eps))


def _layer_pulled(row: list[Any], w: list[Any], eps: float) -> list[Any]:
    away = _away(row)
    size = _rms(away, eps)
    return _normalized_pulled(_over(away, size), size, _away(w), len(row))


ROWS = [
    RowFunction(
        "logsumexp",
        lambda r: [_lse(r)],
        lambda r, w: [w[0] * p for p in _shares(r)],
        value_scale=_largest,
        exponential=True,
    ),
    RowFunction(
        "softmax",
        _shares,
        _softmax_pulled,
        slope_scale=lambda r, w: _largest(w) * max(_shares(r)),
        exponential=True,
    ),
    RowFunction(
        "log_softmax",
        lambda r: [v - _lse(r) for v in r],
        _log_softmax_pulled,
        slope_scale=lambda r, w: mp.fsum(abs(v) for v in w) * max(_shares(r)),
        exponential=True,
    ),
    RowFunction(
        "cumulative_logsumexp",
        lambda r: [_lse(r[: i + 1]) for i in range(len(r))],
        _cumulative_pulled,
        value_scale=_largest,
        slope_scale=lambda r, w: _largest(w),
        exponential=True,
    ),
    RowFunction("norm", lambda r: [_length(r)], lambda r, w: _over(r, _length(r) / w[0])),
    RowFunction(
        "normalize",
        lambda r: _over(r, _length(r)),
        lambda r, w: _normalized_pulled(_over(r, _length(r)), _length(r), w),
        slope_scale=lambda r, w: _length(w) / _length(r),
    ),
    RowFunction(
        "variance",
        lambda r: [_dot(_away(r), _away(r)) / len(r)],
        lambda r, w: [2 * w[0] * v / len(r) for v in _away(r)],
        slope_scale=lambda r, w: 2 * _largest(_away(r)) / len(r),
        offset=True,
    ),
    RowFunction(
        "std",
        lambda r: [_length(_away(r)) / mp.sqrt(len(r))],
        lambda r, w: [w[0] * v / _length(_away(r)) / mp.sqrt(len(r)) for v in _away(r)],
        slope_scale=lambda r, w: 1 / mp.sqrt(len(r)),
        offset=True,
    ),
    RowFunction(
        "rms_norm",
        lambda r: _over(r, _rms(r, 1e-6)),
        lambda r, w: _normalized_pulled(_over(r, _rms(r, 1e-6)), _rms(r, 1e-6), w, len(r)),
        slope_scale=lambda r, w: _length(w) / _rms(r, 1e-6),
    ),
    RowFunction(
        "layer_norm",
        lambda r: _over(_away(r), _rms(_away(r), 1e-5)),
        lambda r, w: _layer_pulled(r, w, 1e-5),
        value_scale=lambda r: _largest(_away(r)) / _rms(_away(r), 1e-5),
        slope_scale=lambda r, w: _length(w) / _rms(_away(r), 1e-5),
        offset=True,
    ),
]
