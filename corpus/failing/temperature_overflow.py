"""A learned temperature, stored as its logarithm, that has diverged."""

from corpus.case import Case, program


def in_torch():
    import torch

    log_scale = torch.tensor(89.0, requires_grad=True)

    def loss(similarity):
        scale = log_scale.exp()  # BAD
        return torch.nn.functional.cross_entropy(scale * similarity, torch.arange(2))

    return program(loss, torch.tensor([[0.9, 0.1], [0.2, 0.8]]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(log_scale, similarity):
        scale = jnp.exp(log_scale)  # BAD
        return -jnp.diag(jax.nn.log_softmax(scale * similarity)).mean()

    return program(loss, jnp.array(89.0), jnp.array([[0.9, 0.1], [0.2, 0.8]]))


CASE = Case(cause="overflow", operation="exp")
