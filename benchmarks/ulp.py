"""``python -m benchmarks.ulp``: the worst error of value and gradient of each safe function, in ulp.

Over the regular grid of ``tests/numerics/oracle.py``, against 50 digits, beside what PyTorch and JAX have of
the same name. Writes ``benchmarks/results/ulp.json``: function -> format -> library -> [value, gradient].
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F  # noqa: N812

from tests.numerics.measuring import worst, worst_rows
from tests.numerics.oracle import FORMATS, FUNCTIONS, ROWS
from tests.numerics.running import ours

__all__ = ["PEERS", "run"]

RESULTS = Path(__file__).parent / "results" / "ulp.json"

# What a user would reach for; None where the library has no such function.
PEERS: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "log": (torch.log, jnp.log),
    "log1mexp": (lambda a: torch.log1p(-torch.exp(-a)), lambda a: jnp.log1p(-jnp.exp(-a))),
    "softplus": (F.softplus, jax.nn.softplus),
    "log1pexp": (lambda x: torch.log1p(torch.exp(x)), lambda x: jnp.log1p(jnp.exp(x))),
    "log_sigmoid": (F.logsigmoid, jax.nn.log_sigmoid),
    "logaddexp": (torch.logaddexp, jnp.logaddexp),
    "logsubexp": (None, None),
    "xlogy": (torch.xlogy, jax.scipy.special.xlogy),
    "divide": (torch.divide, jnp.divide),
    "reciprocal": (torch.reciprocal, jnp.reciprocal),
    "sqrt": (torch.sqrt, jnp.sqrt),
    "rsqrt": (torch.rsqrt, jax.lax.rsqrt),
    "power": (torch.pow, jnp.power),
    "arccos": (torch.arccos, jnp.arccos),
    "arctanh": (torch.arctanh, jnp.arctanh),
    "arctan2": (torch.arctan2, jnp.arctan2),
    "soft_cap": (lambda x, cap: cap * torch.tanh(x / cap), lambda x, cap: cap * jnp.tanh(x / cap)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), lambda x: jax.nn.logsumexp(x, -1)),
    "softmax": (lambda x: torch.softmax(x, -1), jax.nn.softmax),
    "log_softmax": (lambda x: torch.log_softmax(x, -1), jax.nn.log_softmax),
    "cumulative_logsumexp": (lambda x: torch.logcumsumexp(x, -1), None),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), lambda x: jnp.linalg.norm(x, axis=-1)),
    "normalize": (F.normalize, None),
    "variance": (lambda x: torch.var(x, -1, correction=0), lambda x: jnp.var(x, -1)),
    "std": (lambda x: torch.std(x, -1, correction=0), lambda x: jnp.std(x, -1)),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6), None),
    "layer_norm": (
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: jax.nn.standardize(x, axis=-1, epsilon=1e-5),
    ),
}


def run() -> dict[str, dict[str, dict[str, list[float | None]]]]:
    """Function -> format -> library -> the worst ulp of value and gradient; None: not finite somewhere."""
    report: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for function in [*FUNCTIONS, *ROWS]:
        options = {"axis": -1} if function.name == "norm" else {}
        measure: Any = worst_rows if function in ROWS else worst
        report[function.label] = {}
        for name, form in FORMATS.items():
            row: dict[str, list[float | None]] = {}
            for library, backend, peer in zip(
                ("torch", "jax"), ("torch", "jax-jit"), PEERS[function.name], strict=True
            ):
                row[f"stablenum_{library}"] = _shown(
                    measure(function, form, backend, ours(backend, function.name, **options))
                )
                if peer is not None:
                    row[library] = _shown(measure(function, form, backend, peer))
            report[function.label][name] = row
    return report


def _shown(errors: tuple[float, float]) -> list[float | None]:
    return [round(max(e, 0.0), 2) if math.isfinite(e) else None for e in errors]


def main() -> None:
    """Measure, show, save."""
    report = run()
    for function, formats in report.items():
        for name, row in formats.items():
            print(f"{function:22} {name:9}", *(f"{k}: {v[0]}, {v[1]};" for k, v in row.items()))
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    sys.exit(main())
