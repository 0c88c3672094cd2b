"""Newton's method meets a slope of 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def solve(x):
        while abs(float(x)) > 1e-3 and torch.isfinite(x):
            x = x - (x * x - 1.0) / (x - 1.0).clamp(min=0.0)  # BAD
        return x

    return program(solve, torch.tensor(1.0, requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def solve(x):
        def go_on(x):
            return (jnp.abs(x) > 1e-3) & jnp.isfinite(x)

        def body(x):
            return x - (x * x - 1.0) / jnp.maximum(x - 1.0, 0.0)  # BAD

        return jax.lax.while_loop(go_on, body, x)

    return program(solve, jnp.array(1.0), gradients=False)


CASE = Case(cause="domain", operation="div", where="iteration 0 of while")
