"""Four layers of one block, scanned; the third divides by its own mean, which is 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.tensor([1.0, 1.0, 0.0, 1.0], requires_grad=True)

    def block(x, scale):
        y = x * scale
        return torch.tanh(y / y.mean())  # BAD

    def loss(x):
        for scale in w:
            x = block(x, scale)
        return x.sum()

    return program(loss, torch.tensor([0.5, 1.5]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def block(x, scale):
        y = x * scale
        return jnp.tanh(y / y.mean()), None  # BAD

    def loss(w, x):
        return jax.lax.scan(jax.checkpoint(block), x, w)[0].sum()

    return program(loss, jnp.array([1.0, 1.0, 0.0, 1.0]), jnp.array([0.5, 1.5]))


CASE = Case(cause="domain", operation="div", where="iteration 2 of scan")
