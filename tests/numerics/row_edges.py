"""What the functions of rows give at their edges: rows, results, and the gradient of their weighted sum.

The weights of the results are those of :func:`weights_for`: 1, -1/2, 1/4, 2, their sum 2.75.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tests.numerics.oracle import INF, NAN, Binary, mp, mpf, weights_for

Row = tuple[float, ...]
ANY = None  # nothing is promised


@dataclass(frozen=True)
class Edge:
    """A row, its results and the gradient with respect to it; with the mask of the row, if it has one."""

    row: Row
    value: Row
    slope: Row | None
    mask: tuple[bool, ...] | None = None
    scale: float = 0.0  # of what cancels in the gradient


def _all(value: float, n: int = 4) -> Row:
    return (value,) * n


NOTHING = _all(0.0)
GONE = _all(-INF)
NO_NUMBER = _all(NAN)
W = tuple(weights_for(4))


def _spread_evenly(scale: Any = 1) -> Row:
    """The gradient of a softmax at equal elements."""
    return tuple((w - 2.75 / 4) / 4 * scale for w in W)


def _log_sum(form: Binary) -> list[Edge]:
    log4 = math.log(4.0)
    big, tiny = form.max, form.tiny
    junk = (NAN, INF, 2.0, big)
    return [
        Edge(GONE, (-INF,), NOTHING),
        Edge((-INF, 3.0, -INF, -INF), (3.0,), (0, 1, 0, 0)),
        Edge((-INF, 3.0, 3.0, -INF), (3.0 + math.log(2.0),), (0, 0.5, 0.5, 0)),
        Edge((INF, 1.0, -INF, 2.0), (INF,), NOTHING),
        Edge((INF, INF, 0.0, -INF), (INF,), NOTHING),
        Edge(NOTHING, (log4,), _all(0.25)),
        Edge(_all(-0.0), (log4,), _all(0.25)),
        Edge(_all(big), (big,), _all(0.25)),
        Edge(_all(-big), (-big,), _all(0.25)),
        Edge((-big, big, 0.0, 1.0), (big,), (0, 1, 0, 0)),
        Edge((-big, -big, 0.0, -big), (0.0,), (0, 0, 1, 0)),
        Edge((tiny, form.subnormal, 0.0, -tiny), (log4,), _all(0.25)),
        Edge((NAN, 1.0, 2.0, 3.0), (NAN,), ANY),
        Edge(junk, (2.0,), (0, 0, 1, 0), (False, False, True, False)),
        Edge((NAN, 0.0, INF, 0.0), (math.log(2.0),), (0, 0.5, 0, 0.5), (False, True, False, True)),
        Edge(junk, (-INF,), NOTHING, (False,) * 4),
        Edge((-INF, 1.0, 2.0, NAN), (-INF,), NOTHING, (True, False, False, False)),
        Edge((5.0,), (5.0,), (1,)),
        Edge((-INF,), (-INF,), (0,)),
        Edge((INF,), (INF,), (0,)),
        Edge((big,), (big,), (1,)),
    ]


def _softmax(form: Binary) -> list[Edge]:
    big, tiny = form.max, form.tiny
    junk = (NAN, INF, 2.0, big)
    half = (0, (W[1] - W[2]) / 4, (W[2] - W[1]) / 4, 0)
    return [
        Edge(GONE, NOTHING, NOTHING),
        Edge((-INF, 3.0, -INF, -INF), (0, 1, 0, 0), NOTHING),
        Edge((-INF, 3.0, 3.0, -INF), (0, 0.5, 0.5, 0), half),
        Edge((INF, 1.0, -INF, 2.0), (1, 0, 0, 0), NOTHING),
        Edge((INF, INF, 0.0, -INF), (0.5, 0.5, 0, 0), NOTHING),
        Edge(NOTHING, _all(0.25), _spread_evenly()),
        Edge(_all(big), _all(0.25), _spread_evenly()),
        Edge(_all(-big), _all(0.25), _spread_evenly()),
        Edge((-big, big, 0.0, 1.0), (0, 1, 0, 0), NOTHING),
        Edge((tiny, form.subnormal, 0.0, -tiny), _all(0.25), _spread_evenly()),
        Edge((NAN, 1.0, 2.0, 3.0), NO_NUMBER, ANY),
        Edge(junk, (0, 0, 1, 0), NOTHING, (False, False, True, False)),
        Edge((NAN, 7.0, 7.0, INF), (0, 0.5, 0.5, 0), half, (False, True, True, False)),
        Edge(junk, NOTHING, NOTHING, (False,) * 4),
        Edge((-INF, 1.0, 2.0, NAN), NOTHING, NOTHING, (True, False, False, False)),
        Edge((5.0,), (1,), (0,)),
        Edge((-INF,), (0,), (0,)),
        Edge((INF,), (1,), (0,)),
        Edge((-big,), (1,), (0,)),
    ]


def _log_softmax(form: Binary) -> list[Edge]:
    big, tiny = form.max, form.tiny
    log4, log2 = math.log(4.0), math.log(2.0)
    junk = (NAN, INF, 2.0, big)
    even = tuple(w - 2.75 / 4 for w in W)
    # Elements of -inf are left out, and so are their weights.
    half = (0, (W[1] - W[2]) / 2, (W[2] - W[1]) / 2, 0)
    far = -INF if form.most == form.wide.most or form.name == "float16" else -2 * big
    return [
        Edge(GONE, GONE, NOTHING),
        Edge((-INF, 3.0, -INF, -INF), (-INF, 0, -INF, -INF), NOTHING),
        Edge((-INF, 3.0, 3.0, -INF), (-INF, -log2, -log2, -INF), half),
        Edge((INF, 1.0, -INF, 2.0), (0, -INF, -INF, -INF), NOTHING),
        Edge((INF, INF, 0.0, -INF), (-log2, -log2, -INF, -INF), NOTHING),
        Edge(NOTHING, _all(-log4), even),
        Edge(_all(big), _all(-log4), even),
        Edge(_all(-big), _all(-log4), even),
        Edge((-big, big, big / 2, 0.0), (far, 0, -big / 2, -big), (1, -2.75 + W[1], W[2], W[3])),
        Edge((tiny, form.subnormal, 0.0, -tiny), _all(-log4), even),
        Edge((NAN, 1.0, 2.0, 3.0), NO_NUMBER, ANY),
        Edge(junk, (-INF, -INF, 0, -INF), NOTHING, (False, False, True, False)),
        Edge((NAN, 7.0, 7.0, INF), (-INF, -log2, -log2, -INF), half, (False, True, True, False)),
        Edge(junk, GONE, NOTHING, (False,) * 4),
        Edge((5.0,), (0,), (0,)),
        Edge((-INF,), (-INF,), (0,)),
        Edge((INF,), (0,), (0,)),
        Edge((-big,), (0,), (0,)),
    ]


def _cumulative(form: Binary) -> list[Edge]:
    big = form.max
    logs = tuple(math.log(n) for n in (1, 2, 3, 4))
    even = tuple(sum(W[k] / (k + 1) for k in range(i, 4)) for i in range(4))
    return [
        Edge(GONE, GONE, NOTHING),
        Edge((-INF, 3.0, -INF, -INF), (-INF, 3, 3, 3), (0, 1.75, 0, 0)),
        Edge((-INF, -INF, -INF, 3.0), (-INF, -INF, -INF, 3), (0, 0, 0, 2)),
        Edge((1.0, INF, -INF, 2.0), (1, INF, INF, INF), (1, 1.75, 0, 0)),
        Edge(NOTHING, logs, even),
        Edge(_all(-big), _all(-big), ANY),  # beyond 1 / eps
        Edge((-big, 0.0, big, big), (-big, 0, big, big), (1, -0.5, 1.25, 1)),
        Edge((1.0, NAN, 2.0, 3.0), (1, NAN, NAN, NAN), ANY),
        Edge((5.0,), (5,), (1,)),
        Edge((-INF,), (-INF,), (0,)),
        Edge((INF,), (INF,), (1,)),
    ]


def _norm(form: Binary) -> list[Edge]:
    big, tiny = form.max, form.tiny
    below = () if form.least > form.wide.least else (_zero_norm(form),)
    return [
        Edge(NOTHING, (0,), NOTHING),
        Edge(_all(-0.0), (0,), NOTHING),
        *below,
        Edge(_all(tiny), (2 * tiny,), _all(0.5)),
        Edge((0.0, -tiny, 0.0, 0.0), (tiny,), (0, -1, 0, 0)),
        Edge((0.0, -big, 0.0, 0.0), (big,), (0, -1, 0, 0)),
        Edge((tiny, -big, 0.0, tiny), (big,), (0, -1, 0, 0)),
        Edge(_all(big / 2), (big,), _all(0.5)),
        Edge(_all(-big), (INF,), _all(-0.5)),
        Edge(_all(3.0), (6.0,), _all(0.5)),
        Edge((INF, 1.0, 0.0, 2.0), (INF,), NOTHING),
        Edge((-INF, INF, 0.0, 2.0), (INF,), NOTHING),
        Edge((NAN, 1.0, 2.0, INF), (NAN,), ANY),
        Edge((-5.0,), (5,), (-1,)),
        Edge((0.0,), (0,), (0,)),
        Edge((-INF,), (INF,), (0,)),
    ]


def _zero_norm(form: Binary) -> Edge:
    return Edge((form.subnormal, 0.0, -form.subnormal, 0.0), (0,), NOTHING)


def _across(length: Any) -> Row:
    """The gradient of ``x / |x|`` at four equal elements, whose norm is ``length``."""
    along = 2.75 / 2
    return tuple(float((mpf(w) - mpf(along) / 2) / mpf(length)) for w in W)


def _normalize(form: Binary) -> list[Edge]:
    big, tiny = form.max, form.tiny
    below = [] if form.least > form.wide.least else [Edge(_zero_norm(form).row, NOTHING, NOTHING)]
    return [
        Edge(NOTHING, NOTHING, NOTHING),
        *below,
        Edge(_all(tiny), _all(0.5), _across(2 * tiny)),
        Edge(_all(big / 4), _all(0.5), _across(big / 2)),
        Edge(_all(big), _all(0.5), _across(2 * mpf(big))),
        Edge((0.0, -4.0, 0.0, 0.0), (0, -1, 0, 0), (0.25, 0, 0.0625, 0.5)),
        Edge((INF, 1.0, 0.0, 2.0), (NAN, 0, 0, 0), NOTHING),
        Edge((-INF, INF, 0.0, 2.0), (NAN, NAN, 0, 0), NOTHING),
        Edge((NAN, 1.0, 2.0, 3.0), NO_NUMBER, ANY),
        Edge((-5.0,), (-1,), (0,), scale=0.2),
        Edge((0.0,), (0,), (0,)),
        Edge((INF,), (NAN,), (0,)),
    ]


def _variance(form: Binary) -> list[Edge]:
    big, tiny = form.max, form.tiny
    return [
        Edge(NOTHING, (0,), NOTHING),
        *(Edge(_all(v), (0,), NOTHING) for v in (0.1, big, -big, tiny, form.subnormal)),
        Edge((1.0, -1.0, 1.0, -1.0), (1,), (0.5, -0.5, 0.5, -0.5)),
        Edge(
            (big, -big, big, -big),
            (INF,),
            NOTHING if form.most == form.wide.most else tuple(v / 2 for v in (big, -big, big, -big)),
        ),
        Edge((INF, 1.0, 0.0, 2.0), (NAN,), ANY),
        Edge(_all(INF), (NAN,), ANY),
        Edge((NAN, 1.0, 2.0, 3.0), (NAN,), ANY),
        Edge((5.0,), (0,), (0,)),
        Edge((-big,), (0,), (0,)),
    ]


def _std(form: Binary) -> list[Edge]:
    big, tiny = form.max, form.tiny
    quarters = (0.25, -0.25, 0.25, -0.25)
    return [
        Edge(NOTHING, (0,), NOTHING),
        *(Edge(_all(v), (0,), NOTHING) for v in (0.1, big, -big, tiny, form.subnormal)),
        Edge((1.0, -1.0, 1.0, -1.0), (1,), quarters),
        Edge((big, -big, big, -big), (big,), quarters),
        Edge((tiny, -tiny, tiny, -tiny), (tiny,), quarters),
        Edge((INF, 1.0, 0.0, 2.0), (NAN,), ANY),
        Edge(_all(INF), (NAN,), ANY),
        Edge((NAN, 1.0, 2.0, 3.0), (NAN,), ANY),
        Edge((5.0,), (0,), (0,)),
        Edge((-big,), (0,), (0,)),
    ]


def _rms_norm(form: Binary) -> list[Edge]:
    big, tiny = form.max, form.tiny
    still = tuple(float(mpf(w) / mp.sqrt(mpf(1e-6))) for w in W)
    away = tuple(w - 2.75 / 4 for w in W)
    return [
        Edge(NOTHING, NOTHING, still),
        *([Edge(_all(tiny), _all(1e3 * tiny), still)] if form.name == "float32" else []),
        Edge(_all(big), _all(1), tuple(v / big for v in away)),
        Edge((0.0, -big, 0.0, 0.0), (0, -2, 0, 0), tuple(2 * w / big for w in (1, 0, 0.25, 2))),
        Edge((INF, 1.0, 0.0, 2.0), (NAN, 0, 0, 0), ANY),
        Edge((NAN, 1.0, 2.0, 3.0), NO_NUMBER, ANY),
        Edge((0.0,), (0,), (1e3,)),
        Edge((-big,), (-1,), (0,)),
    ]


def _layer_norm(form: Binary) -> list[Edge]:
    big, tiny = form.max, form.tiny
    still = tuple(float((mpf(w) - mpf(2.75) / 4) / mp.sqrt(mpf(1e-5))) for w in W)
    return [
        Edge(NOTHING, NOTHING, still),
        *(Edge(_all(v), NOTHING, still) for v in (0.1, -7.0, tiny)),
        *(Edge(_all(v), NOTHING, ANY) for v in (big, -big)),
        Edge((big, -big, big, -big), (1, -1, 1, -1), ANY),
        Edge((INF, 1.0, 0.0, 2.0), NO_NUMBER, ANY),
        Edge((NAN, 1.0, 2.0, 3.0), NO_NUMBER, ANY),
        Edge((5.0,), (0,), (0,)),
        Edge((-big,), (0,), (0,)),
    ]


ROW_EDGES = {
    "logsumexp": _log_sum,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "cumulative_logsumexp": _cumulative,
    "norm": _norm,
    "normalize": _normalize,
    "variance": _variance,
    "std": _std,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
}
