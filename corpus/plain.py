"""Running one step as a user would: the forward and the backward pass.

``python -m corpus.plain NAME`` is a script that runs the program and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from corpus.case import Program

__all__ = ["differentiated", "run_jax", "run_torch"]


def run_torch(program: Program) -> Any:
    """The loss, after its backward pass unless the step is a whole training step."""
    loss = program.step(*program.args)
    if loss.requires_grad and program.options.get("optimizer") is None:
        (loss * program.options.get("loss_scale", 1.0)).backward()
    return loss


def run_jax(program: Program) -> Any:
    """Loss and gradient, compiled, or the results of a whole training step."""
    import jax

    return jax.block_until_ready(jax.jit(differentiated(program))(*program.args))


def differentiated(program: Program) -> Callable[..., Any]:
    """Value and gradient, or the step itself if it is a whole training step."""
    import jax

    options = program.options
    aux, scale = options.get("has_aux", False), options.get("loss_scale", 1.0)
    shape = jax.eval_shape(program.step, *program.args)
    if not aux and (not hasattr(shape, "shape") or shape.shape != () or options.get("gradients") is False):
        return program.step

    def scaled(*args: Any) -> Any:
        result = program.step(*args)
        return (scale * result[0], result[1]) if aux else scale * result

    return jax.value_and_grad(scaled, has_aux=aux)
