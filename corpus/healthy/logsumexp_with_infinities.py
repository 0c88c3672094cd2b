"""logsumexp over entries some of which are -inf."""

from corpus.case import program


def in_torch():
    import torch

    def loss(x, keep):
        return torch.logsumexp(x.masked_fill(~keep, float("-inf")), dim=-1).sum()

    keep = torch.tensor([[True, False, True], [True, True, False]])
    return program(loss, torch.ones(2, 3, requires_grad=True), keep)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x, keep):
        return jax.nn.logsumexp(jnp.where(keep, x, -jnp.inf), axis=-1).sum()

    return program(loss, jnp.ones((2, 3)), jnp.array([[True, False, True], [True, True, False]]))
