"""log1p of a squared error: 1e20 squared overflows float32."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(prediction, y):
        error = prediction - y
        return torch.log1p(error.square() / 3.0).mean()  # BAD

    return program(loss, torch.tensor([1.0, 1e20], requires_grad=True), torch.zeros(2))


def in_jax():
    import jax.numpy as jnp

    def loss(prediction, y):
        error = prediction - y
        return jnp.log1p(jnp.square(error) / 3.0).mean()  # BAD

    return program(loss, jnp.array([1.0, 1e20]), jnp.zeros(2))


CASE = Case(cause="overflow", operation=("pow", "square", "mul"))
