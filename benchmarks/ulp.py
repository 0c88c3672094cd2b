"""``python -m benchmarks.ulp``: the worst error of value and gradient of each function and loss, in ulp.

The errors are measured on the regular grids of ``tests/numerics/oracle.py`` and ``tests/losses/accuracy.py``,
relative to values of 50 digits, for this library and for the functions of the same name in PyTorch, JAX and
optax. They are written to ``benchmarks/results/ulp.json``: function -> format -> library -> [value,
gradient].
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
import optax
import torch
import torch.nn.functional as F  # noqa: N812

from tests.losses.accuracy import KEYS, LOSSES, worst_loss
from tests.numerics.measuring import worst, worst_rows
from tests.numerics.oracle import FORMATS, FUNCTIONS, ROWS
from tests.numerics.running import ours

__all__ = ["LOSS_PEERS", "OPTAX", "PEERS", "run", "run_losses"]

RESULTS = Path(__file__).parent / "results" / "ulp.json"

# The function a user would choose in PyTorch and in JAX; None where the library has none.
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

# optax.safe_root_mean_squares is left out: it is another function, with a floor where rms_norm adds eps.
OPTAX: dict[str, Callable[..., Any]] = {
    "norm": lambda x: optax.safe_norm(x, 0.0, axis=-1),
    "normalize": lambda x: x / optax.safe_norm(x, 0.0, axis=-1, keepdims=True),
}


def _unit(x: jax.Array) -> jax.Array:
    return x / optax.safe_norm(x, 0.0, axis=-1, keepdims=True)


# Keyed by the labels of tests.losses.accuracy.
LOSS_PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "binary_cross_entropy": {
        "torch": lambda z, y: F.binary_cross_entropy_with_logits(z, y, reduction="none"),
        "optax": optax.losses.sigmoid_binary_cross_entropy,
    },
    "binary_focal gamma=0.5": {
        "optax": lambda z, y: optax.losses.sigmoid_focal_loss(z, y, alpha=0.25, gamma=0.5)
    },
    "binary_focal gamma=2": {
        "optax": lambda z, y: optax.losses.sigmoid_focal_loss(z, y, alpha=0.25, gamma=2.0)
    },
    "binary_focal gamma=3": {
        "optax": lambda z, y: optax.losses.sigmoid_focal_loss(z, y, alpha=0.25, gamma=3.0)
    },
    "cross_entropy": {
        "torch": lambda x, t: F.cross_entropy(x, t, reduction="none"),
        "optax": optax.losses.softmax_cross_entropy_with_integer_labels,
    },
    "cross_entropy smoothing=0.125": {
        "torch": lambda x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.125),
        "optax": lambda x, t: optax.losses.softmax_cross_entropy(
            x, optax.losses.smooth_labels(jax.nn.one_hot(t, x.shape[-1], dtype=x.dtype), 0.125)
        ),
    },
    "cross_entropy probabilities": {
        "torch": lambda x, t: F.cross_entropy(x, t, reduction="none"),
        "optax": optax.losses.safe_softmax_cross_entropy,
    },
    "kl_divergence": {
        "torch": lambda x, t: F.kl_div(torch.log_softmax(x, -1), t, reduction="none").sum(-1),
        "optax": lambda x, t: optax.losses.kl_divergence(jax.nn.log_softmax(x), t),
    },
    "gaussian_nll": {"torch": lambda m, y, v: F.gaussian_nll_loss(m, y, v, reduction="none")},
    "poisson_nll": {"torch": lambda z, y: F.poisson_nll_loss(z, y, reduction="none")},
    "huber": {
        "torch": lambda a, b: F.huber_loss(a, b, reduction="none"),
        "optax": optax.losses.huber_loss,
    },
    "log_cosh": {
        "torch": lambda a, b: torch.log(torch.cosh(a - b)),
        "optax": optax.losses.log_cosh,
    },
    "hinge": {
        "torch": lambda s, y: torch.relu(1 - y * s),
        "optax": optax.losses.hinge_loss,
    },
    "cosine_similarity": {
        "torch": lambda x, y: F.cosine_similarity(x, y, dim=-1),
        "optax": optax.losses.cosine_similarity,
    },
    "cosine_embedding": {
        "torch": lambda x, y: F.cosine_embedding_loss(
            x, y, torch.ones(len(x), dtype=x.dtype), reduction="none"
        ),
        "optax": optax.losses.cosine_distance,
    },
    "info_nce": {
        "torch": lambda q, k: F.cross_entropy(
            F.normalize(q) @ F.normalize(k).T / 0.5, torch.arange(len(KEYS)), reduction="none"
        ),
        "optax": lambda q, k: optax.losses.softmax_cross_entropy_with_integer_labels(
            _unit(q) @ _unit(k).T / 0.5, jnp.arange(len(KEYS))
        ),
    },
}
LOSS_PEERS["binary_cross_entropy y=0.25"] = LOSS_PEERS["binary_cross_entropy"]


Row = dict[str, list[float | None]]


def run() -> dict[str, dict[str, Row]]:
    """For each function, format and library, the worst error of value and gradient; None if not finite."""
    return {f.label: {n: _function(f, form) for n, form in FORMATS.items()} for f in [*FUNCTIONS, *ROWS]}


def run_losses() -> dict[str, dict[str, Row]]:
    """The same for each loss."""
    return {loss: {n: _loss(loss, form) for n, form in FORMATS.items()} for loss in LOSSES}


def _function(function: Any, form: Any) -> Row:
    options = {"axis": -1} if function.name == "norm" else {}
    measure: Any = worst_rows if function in ROWS else worst
    in_torch, in_jax = PEERS[function.name]
    runs = {
        "stablenum_torch": ours("torch", function.name, **options),
        "torch": in_torch,
        "stablenum_jax": ours("jax-jit", function.name, **options),
        "jax": in_jax,
        "optax": OPTAX.get(function.name),
    }
    return {
        library: _shown(measure(function, form, _backend(library), peer))
        for library, peer in runs.items()
        if peer is not None
    }


def _loss(label: str, form: Any) -> Row:
    runs = {"stablenum_torch": None, "stablenum_jax": None} | LOSS_PEERS.get(label, {})
    return {
        library: _shown(worst_loss(LOSSES[label], form, _backend(library), peer))
        for library, peer in runs.items()
    }


def _backend(library: str) -> str:
    return "torch" if library in ("torch", "stablenum_torch") else "jax-jit"


def _shown(errors: tuple[float, float]) -> list[float | None]:
    return [round(max(e, 0.0), 2) if math.isfinite(e) else None for e in errors]


def main() -> None:
    """Measure, print and save the errors."""
    report = run() | run_losses()
    for label, formats in report.items():
        for name, row in formats.items():
            print(f"{label:30} {name:9}", *(f"{k}: {v[0]}, {v[1]};" for k, v in row.items()))
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    sys.exit(main())
