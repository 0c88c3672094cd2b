"""The log-density of a proportion that is exactly 0."""

from corpus.case import Case, program

Y = [0.3, 0.0, 0.7]


def in_torch():
    import torch

    y = torch.tensor(Y)

    def loss(a):
        beta = torch.distributions.Beta(a, torch.ones(()), validate_args=False)
        return -beta.log_prob(y).mean()  # BAD

    return program(loss, torch.tensor(2.0, requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    y = jnp.array(Y)

    def loss(a):
        return -jax.scipy.stats.beta.logpdf(y, a, 1.0).mean()  # BAD

    return program(loss, jnp.array(2.0))


CASE = Case(cause="domain", operation="xlogy", primitive={"jax": "log"})
