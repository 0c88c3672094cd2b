"""A causal mask that hides the diagonal too: the first query sees nothing."""

from corpus.case import Case, program


def in_torch():
    import torch

    scale = torch.tensor(1.0, requires_grad=True)

    def loss(scores):
        mask = torch.triu(torch.full((3, 3), float("-inf")))
        p = torch.softmax(scale * scores + mask, dim=-1)  # BAD
        return p.square().sum()

    return program(loss, torch.ones(3, 3))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scale, scores):
        mask = jnp.triu(jnp.full((3, 3), -jnp.inf))
        p = jax.nn.softmax(scale * scores + mask, axis=-1)  # BAD
        return (p**2).sum()

    return program(loss, jnp.array(1.0), jnp.ones((3, 3)))


CASE = Case(cause="mask", operation="softmax", primitive={"jax": "sub"})
