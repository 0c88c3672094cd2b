"""exp(mean(log(x))) of a 0 is 0 and right; its derivative is 0 / 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        mean_log = torch.log(x).mean()  # BAD
        return torch.exp(mean_log)

    return program(loss, torch.tensor([2.0, 0.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        mean_log = jnp.log(x).mean()  # BAD
        return jnp.exp(mean_log)

    return program(loss, jnp.array([2.0, 0.0]))


CASE = Case(cause=("boundary_derivative", "domain"), operation="log", primitive="div")
