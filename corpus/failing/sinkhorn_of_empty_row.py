"""A Sinkhorn step in the log domain: one row of costs is entirely inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x, reachable):
        scores = torch.where(reachable, -x, -torch.inf)
        for _ in range(2):
            scores = scores - torch.logsumexp(scores, dim=1, keepdim=True)  # BAD
            scores = scores - torch.logsumexp(scores, dim=0, keepdim=True)
        return scores.exp().diagonal().sum()

    return program(loss, torch.ones(2, 2, requires_grad=True), torch.tensor([[True, True], [False, False]]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x, reachable):
        scores = jnp.where(reachable, -x, -jnp.inf)
        for _ in range(2):
            scores = scores - jax.nn.logsumexp(scores, axis=1, keepdims=True)  # BAD
            scores = scores - jax.nn.logsumexp(scores, axis=0, keepdims=True)
        return jnp.diag(jnp.exp(scores)).sum()

    return program(loss, jnp.ones((2, 2)), jnp.array([[True, True], [False, False]]))


CASE = Case(cause="mask", operation="sub")
