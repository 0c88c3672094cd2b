"""A loss scale of 32768: a gradient of 10 overflows float16, but is finite without the scale."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.tensor([0.1, 0.2], requires_grad=True)

    def loss(x):
        y = w.half() * x  # BAD
        return y.float().sum()

    x = torch.tensor([10.0, 20.0], dtype=torch.float16)
    return program(loss, x, loss_scale=2.0**15)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        y = w.astype(jnp.float16) * x  # BAD
        return y.astype(jnp.float32).sum()

    x = jnp.array([10.0, 20.0], dtype=jnp.float16)
    return program(loss, jnp.array([0.1, 0.2]), x, loss_scale=2.0**15)


CASE = Case(cause="loss_scale", operation="mul")
