"""Functions of rows at their edges: value and gradient as the docstring states, in both frameworks."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest

from tests.numerics.oracle import FORMATS, weights_for
from tests.numerics.row_edges import ROW_EDGES
from tests.numerics.running import call, ours
from tests.selection import slow_unless

# JAX compiles slowly, and what is narrower than float32 is computed in float32 in JAX too: each function
# always runs in one of the wide formats there, by turns.
IN_JAX = set(zip(ROW_EDGES, itertools.cycle(["float32", "float64"])))
CASES = slow_unless(
    lambda name, backend, form: backend == "torch" or (backend == "jax-jit" and (name, form) in IN_JAX),
    itertools.product(ROW_EDGES, ("torch", "jax-jit", "torch-compiled"), FORMATS),
)


@pytest.mark.parametrize(("name", "backend", "form"), CASES)
def test_the_edges_of_rows(name, backend, form):
    fmt = FORMATS[form]
    groups = defaultdict(list)
    for edge in ROW_EDGES[name](fmt):
        groups[len(edge.row), edge.mask is not None].append(edge)
    for (_, masked), edges in groups.items():
        options = {"axis": -1}
        if masked:
            options["mask"] = np.asarray([e.mask for e in edges])
        weights = np.asarray([weights_for(len(e.value)) for e in edges])
        many = name not in ("logsumexp", "norm", "variance", "std")
        rows = [np.asarray([e.row for e in edges])]
        values, (slopes,) = call(
            backend, ours(backend, name, **options), rows, form, weights if many else weights[:, 0]
        )
        for edge, value, slope in zip(edges, values, slopes, strict=True):
            _compare(np.atleast_1d(value), edge.value, fmt, (edge, "value", value))
            if edge.slope is not None:
                _compare(slope, edge.slope, fmt, (edge, "slope", slope), edge.scale)


def _compare(got, want, fmt, shown, scale=0.0):
    """Equal, or within 4 ulp; subnormal numbers may be 0."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        if math.isfinite(w) and math.isfinite(g):
            assert abs(g - w) <= max(4 * float(fmt.ulp(max(abs(w), scale))), fmt.wide.tiny), shown
        else:
            assert np.array_equal(g, w, equal_nan=True), shown
