"""A loop that squares: it overflows float32 in the sixth iteration."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        for _ in range(8):
            x = x * x  # BAD
        return x.sum()

    return program(loss, torch.tensor([1.0, 4.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x):
        def body(_, x):
            return x * x  # BAD

        return jax.lax.fori_loop(0, 8, body, x).sum()

    return program(loss, jnp.array([1.0, 4.0]))


CASE = Case(cause="overflow", operation="mul", where="iteration 5")
