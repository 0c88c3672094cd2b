"""The file that ``stablenum diff --init`` writes: a pair of programs to begin with."""

from __future__ import annotations

from pathlib import Path

import typer

__all__ = ["write_pair"]

_PAIR = '''"""Two programs to compare: run `stablenum diff {name}`."""

import jax.numpy as jnp
import numpy as np
import torch

import stablenum_jax
import stablenum_torch


def batch():
    """The same small batch for both sides: a few rows are enough."""
    random = np.random.default_rng(0)
    return random.normal(size=(4, 3)).astype(np.float32), random.normal(size=(4, 2)).astype(np.float32)


def left():
    """The original, with its model, loss and optimizer."""
    x, y = map(torch.tensor, batch())
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)

    def loss(x, y):
        return torch.nn.functional.mse_loss(model(x), y)

    # optimizer=torch.optim.SGD(model.parameters(), lr=0.1) compares the updates, too.
    return stablenum_torch.program(loss, x, y, model=model)


def right():
    """The port. Its parameters are replaced by the left ones; which corresponds to which is found out."""
    x, y = map(jnp.asarray, batch())
    params = {{"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}}

    def loss(params, x, y):
        return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)

    # optimizer=optax.sgd(0.1) compares the updates, too.
    return stablenum_jax.program(loss, params, x, y)
'''


def write_pair(path: Path) -> None:
    """Write the file, which must not be there yet.

    Raises:
        typer.BadParameter: it is there, has another suffix, or cannot be written.
    """
    if path.suffix != ".py":
        raise typer.BadParameter(f"{path} must end in .py", param_hint="PAIR.py")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(_PAIR.format(name=path.name))
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}", param_hint="PAIR.py") from error
