"""The forward algorithm of a hidden Markov model: forbidden transitions are -inf."""

from corpus.case import program


def in_torch():
    import torch

    transition = torch.tensor([[0.0, float("-inf")], [0.5, -0.5]])

    def loss(emissions):
        alpha = torch.tensor([0.0, float("-inf")])
        for emission in emissions:
            alpha = torch.logsumexp(alpha[:, None] + transition.T, dim=0) + emission
        return -torch.logsumexp(alpha, dim=0)

    return program(loss, torch.ones(4, 2, requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    transition = jnp.array([[0.0, -jnp.inf], [0.5, -0.5]])

    def loss(emissions):
        def forward(alpha, emission):
            return jax.nn.logsumexp(alpha[:, None] + transition.T, axis=0) + emission, None

        alpha, _ = jax.lax.scan(forward, jnp.array([0.0, -jnp.inf]), emissions)
        return -jax.nn.logsumexp(alpha, axis=0)

    return program(loss, jnp.ones((4, 2)))
