"""Limits of -inf and inf in the model's buffers mean that there is no limit."""

from corpus.case import program


def in_torch():
    import torch

    class Bounded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.register_buffer("lower", torch.tensor([0.0, float("-inf")]))
            self.register_buffer("upper", torch.tensor([float("inf"), 5.0]))

        def forward(self, x):
            return torch.clamp(self.linear(x), self.lower, self.upper)

    model = Bounded()
    return program(lambda x: model(x).square().mean(), torch.ones(3, 2), model=model)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x, lower, upper):
        return (jnp.clip(x @ w, lower, upper) ** 2).mean()

    lower, upper = jnp.array([0.0, -jnp.inf]), jnp.array([jnp.inf, 5.0])
    return program(loss, jnp.ones((2, 2)), jnp.ones((3, 2)), lower, upper)
