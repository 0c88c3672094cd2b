"""A Dirichlet likelihood with a concentration of 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(alpha, p):
        norm = torch.lgamma(alpha)  # BAD
        return norm.sum() - torch.lgamma(alpha.sum()) - ((alpha - 1.0) * p.log()).sum()

    return program(loss, torch.tensor([1.0, 0.0], requires_grad=True), torch.tensor([0.5, 0.5]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(alpha, p):
        norm = jax.scipy.special.gammaln(alpha)  # BAD
        return norm.sum() - jax.scipy.special.gammaln(alpha.sum()) - ((alpha - 1.0) * jnp.log(p)).sum()

    return program(loss, jnp.array([1.0, 0.0]), jnp.array([0.5, 0.5]))


CASE = Case(cause="domain", operation="lgamma")
