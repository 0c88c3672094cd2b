"""Running a program as a user would, without any diagnosis: does it fail, and how?"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from corpus.case import Program
from corpus.plain import differentiated
from corpus.plain import run_torch as run_step

__all__ = ["plain", "run_jax", "run_torch"]


def plain(framework: str, program: Program) -> tuple[bool, bool, bool]:
    """Whether all results are finite, whether the plain norm of gradients is, whether a parameter moved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_torch(program) if framework == "torch" else run_jax(program)


def run_torch(program: Program) -> tuple[bool, bool, bool]:
    """One step; the results are the loss, every gradient, every parameter and the model's buffers."""
    leaves = list(dict.fromkeys(_tensors(program)))
    before = [leaf.detach().clone() for leaf in leaves]
    loss = run_step(program)
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    finite = all(bool(torch.isfinite(t).all()) for t in [loss.detach(), *grads, *leaves])
    squares = sum((g.float() ** 2).sum() for g in grads)
    moved = any(not torch.equal(a, b.detach()) for a, b in zip(before, leaves))
    return finite, bool(torch.isfinite(torch.as_tensor(squares))), moved


def _tensors(program: Program) -> Iterator[torch.Tensor]:
    """The leaves that require gradients, from everywhere that a step can reach."""
    todo: list[Any] = [program.args, program.options.get("model"), program.options.get("optimizer")]
    todo += [program.step]
    while todo:
        found = todo.pop()
        if isinstance(found, torch.Tensor):
            if found.requires_grad and found.is_leaf:
                yield found
        elif isinstance(found, torch.nn.Module):
            todo += list(found.parameters())
        elif isinstance(found, torch.optim.Optimizer):
            todo += [p for group in found.param_groups for p in group["params"]]
        elif isinstance(found, list | tuple):
            todo += found
        elif isinstance(found, dict):
            todo += found.values()
        elif getattr(found, "__closure__", None):
            todo += [cell.cell_contents for cell in found.__closure__]


def run_jax(program: Program) -> tuple[bool, bool, bool]:
    """One step; the results are the loss and its gradient, or all results of a whole training step."""
    step = differentiated(program)
    whole = step is program.step
    made = jax.jit(step)(*program.args)  # one compilation instead of one for every operation
    result, grads = (made, ()) if whole else made
    leaves = [x for x in jax.tree.leaves((result, grads)) if jnp.issubdtype(x.dtype, jnp.floating)]
    finite = all(bool(jnp.isfinite(x).all()) for x in leaves)
    with np.errstate(over="ignore"):
        squares = sum(float((jnp.asarray(g, jnp.float32) ** 2).sum()) for g in jax.tree.leaves(grads))
    before, after = program.args[:1], result[:1] if whole and isinstance(result, tuple) else ()
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after))
    moved = any(not np.array_equal(a, b) for a, b in pairs)
    return finite, bool(np.isfinite(squares)), moved
