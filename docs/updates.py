"""The tables on the page "Precision": small updates of bfloat16 weights, measured when the page is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import stablenum_jax
import stablenum_torch
from tests.torch.digits import accuracy, digits, train

__all__ = ["WAYS", "digits_rows", "thousand_rows", "write_updates"]

_UPDATES, _SIZE, _WEIGHTS = 1000, 1e-4, 10_000
# Each remedy: its label on the pages, and its class or function in each framework.
WAYS: dict[str, tuple[str, Any, Any]] = {
    "plain": ("plain bfloat16", None, None),
    "kahan": ("`KahanUpdate`, `kahan`", stablenum_torch.KahanUpdate, stablenum_jax.kahan),
    "stochastic": (
        "`StochasticRounding`, `stochastic_rounding`",
        stablenum_torch.StochasticRounding,
        stablenum_jax.stochastic_rounding,
    ),
    "master": (
        "`MasterWeights`, `master_weights`",
        stablenum_torch.MasterWeights,
        stablenum_jax.master_weights,
    ),
}


def write_updates(directory: Path) -> None:
    """Write ``updates.md`` and ``updates-digits.md``."""
    for name, head, rows in (
        ("updates", ["", "PyTorch", "JAX"], thousand_rows()),
        ("updates-digits", ["", "accuracy on 500 held-out digits"], digits_rows(steps=1200)),
    ):
        lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
        (directory / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def thousand_rows() -> list[list[str]]:
    """How far 1,000 updates of -1e-4 move weights of 1.0, as the mean over 10,000 weights."""
    rows = []
    for key, (label, of_torch, of_jax) in WAYS.items():
        rows.append([label, *(f"{1 - mean:.4f}" for mean in (_in_torch(of_torch), _in_jax(key, of_jax)))])
    return [*rows, ["exactly", *[f"{_UPDATES * _SIZE:.4f}"] * 2]]


def digits_rows(steps: int) -> list[list[str]]:
    """The same run of AdamW, its rate falling from 3e-4 to 0, in float32 and with each remedy in bfloat16."""

    def adamw(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-4)

    data, rows = digits(), []
    for key in ("float32", *WAYS):
        label, wrapper, _ = WAYS.get(key, ("float32", None, None))
        policy = "f32" if key == "float32" else "bf16"
        model, _ = train(data, policy=policy, make=_made(wrapper, adamw), steps=steps, decay=True)
        rows.append([label, f"{accuracy(model, data):.1%}"])
    return rows


def _made(wrapper: Any, make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], Any]:
    return make if wrapper is None else lambda params: wrapper(params, make)


def _in_torch(wrapper: Any) -> float:
    weights = torch.nn.Parameter(torch.ones(_WEIGHTS, dtype=torch.bfloat16))
    optimizer = _made(wrapper, lambda params: torch.optim.SGD(params, lr=_SIZE))([weights])
    for _ in range(_UPDATES):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    return float(weights.detach().double().mean())


def _in_jax(key: str, make: Any) -> float:
    if key == "master":
        tx = make(optax.sgd(_SIZE))
    else:
        tx = optax.chain(optax.sgd(_SIZE), *([] if make is None else [make()]))
    weights = jnp.ones(_WEIGHTS, jnp.bfloat16)

    @jax.jit
    def step(carry: Any, _: Any) -> Any:
        weights, state = carry
        updates, state = tx.update(jnp.ones_like(weights), state, weights)
        return (optax.apply_updates(weights, updates), state), None

    (weights, _), _ = jax.lax.scan(step, (weights, tx.init(weights)), length=_UPDATES)
    return float(np.asarray(weights, np.float64).mean())
