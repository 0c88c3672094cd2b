"""The worst error of a function over its regular grid, in ulp of the format: value and gradient."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.numerics.oracle import Binary, Function, RowFunction, mpf, weights_for
from tests.numerics.running import Results, call, ours

Worst = tuple[float, float]


@functools.cache
def exact(function: Function, form: Binary) -> tuple[list[Any], list[list[Any]]]:
    """Values and slopes at the regular arguments."""
    points = [tuple(map(mpf, p)) for p in function.arguments(form)]
    return [function.value(*p) for p in points], [[slope(*p) for p in points] for slope in function.slopes]


@functools.cache
def exact_row(function: RowFunction, row: tuple[float, ...]) -> tuple[list[Any], list[Any], Any, Any]:
    """Values, gradient, and the scales of both."""
    wide = [mpf(v) for v in row]
    values = function.value(wide)
    weights = [mpf(w) for w in weights_for(len(values))]
    slopes, scale = function.pulled(wide, weights), function.slope_scale(wide, weights)
    return values, slopes, function.value_scale(wide), scale


@functools.cache
def measured(function: Function, form: Binary, backend: str) -> Results:
    """Our values and slopes at the regular arguments and, after them, at the edges, compiled once."""
    points = function.arguments(form) + [edge[0] for edge in function.edges(form)]
    columns = [np.asarray(column) for column in zip(*points, strict=True)]
    run = ours(backend, function.name)
    return call(backend, lambda *a: run(*a, *function.positional), columns, form.name)


def worst(function: Function, form: Binary, backend: str, run: Callable[..., Any] | None = None) -> Worst:
    """The worst error of value and slopes of ``run`` (or ours) in ulp, beyond the stated allowance."""
    arguments = function.arguments(form)
    if run is None:
        values, slopes = measured(function, form, backend)
        values, slopes = values[: len(arguments)], [s[: len(arguments)] for s in slopes]
    else:
        theirs = run
        columns = [np.asarray(column) for column in zip(*arguments, strict=True)]
        values, slopes = call(backend, lambda *a: theirs(*a, *function.positional), columns, form.name)
    expected, expected_slopes = exact(function, form)
    fits = [form.regular(e) for e in expected]
    value = max(
        form.error(v, e, function.scale(*a))
        for v, e, a, fit in zip(values, expected, arguments, fits, strict=True)
        if fit
    )
    slope = 0.0
    for got, wanted in zip(slopes, expected_slopes, strict=True):
        for g, e, a, fit in zip(got, wanted, arguments, fits, strict=True):
            if fit and form.regular(e):
                slope = max(slope, form.error(g, e) - function.slope_allowance(*a))
    return value, slope


def worst_rows(function: RowFunction, form: Binary, backend: str, run: Callable[..., Any]) -> Worst:
    """The same for a function of rows. Rows of one length run together."""
    by_length = defaultdict(list)
    for row in function.rows(form):
        by_length[len(row)].append(row)
    value = slope = 0.0
    for rows in by_length.values():
        expected = [exact_row(function, tuple(row)) for row in rows]
        weights = np.asarray([weights_for(len(e[0])) for e in expected])
        weights = weights if _many(function) else weights[:, 0]
        got, (slopes,) = call(backend, run, [np.asarray(rows)], form.name, weights)
        got = got if _many(function) else got[:, None]
        for row, e, values, gradient in zip(rows, expected, got, slopes, strict=True):
            value_scale, slope_scale = e[2], e[3]
            for g, want in zip(values, e[0], strict=True):
                if form.regular(want):
                    allowed = max(row) - min(row) if function.name == "softmax" else 0.0
                    value = max(value, form.error(g, want, value_scale) - allowed)
            for i, (g, want) in enumerate(zip(gradient, e[1], strict=True)):
                if form.regular(want) and form.regular(slope_scale):
                    allowed = max(row) - row[i] if function.exponential else 0.0
                    slope = max(slope, form.error(g, want, slope_scale) - allowed)
    return value, slope


def _many(function: RowFunction) -> bool:
    """Whether the function gives one number for each element of the row."""
    return function.name not in ("logsumexp", "norm", "variance", "std")
