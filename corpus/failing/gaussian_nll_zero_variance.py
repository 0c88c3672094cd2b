"""A Gaussian likelihood whose variance, a relu of the network's output, is 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    raw = torch.tensor([0.5, -1.0], requires_grad=True)

    def loss(mean, y):
        var = torch.relu(raw)
        return 0.5 * (torch.log(var) + (y - mean) ** 2 / var).mean()  # BAD

    return program(loss, torch.zeros(2, requires_grad=True), torch.ones(2))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(params, y):
        mean, raw = params
        var = jax.nn.relu(raw)
        return 0.5 * (jnp.log(var) + (y - mean) ** 2 / var).mean()  # BAD

    return program(loss, (jnp.zeros(2), jnp.array([0.5, -1.0])), jnp.ones(2))


CASE = Case(cause="domain", operation=("log", "div"))
