"""The log-density of a value that the distribution cannot have."""

from corpus.case import Case, program


def in_torch():
    import torch

    y = torch.tensor([0.3, 1.2])

    def loss(high):
        uniform = torch.distributions.Uniform(torch.zeros(()), high, validate_args=False)
        return -uniform.log_prob(y).mean()  # BAD

    return program(loss, torch.tensor(1.0, requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    y = jnp.array([0.3, 1.2])

    def loss(high):
        return -jax.scipy.stats.uniform.logpdf(y, 0.0, high).mean()  # BAD

    return program(loss, jnp.array(1.0))


CASE = Case(cause="domain", operation={"torch": "log", "jax": "logpdf"}, primitive={"jax": "cast"})
