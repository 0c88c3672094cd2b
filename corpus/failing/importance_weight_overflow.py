"""exp(new - old) of log-probabilities that differ by 120, clipped afterwards as PPO does."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(new, old, advantage):
        ratio = torch.exp(new - old)  # BAD
        clipped = torch.clamp(ratio, 0.8, 1.2)
        return -torch.minimum(ratio * advantage, clipped * advantage).mean()

    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    return program(loss, new, torch.tensor([-1.1, -122.0]), torch.tensor([1.0, -1.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(new, old, advantage):
        ratio = jnp.exp(new - old)  # BAD
        clipped = jnp.clip(ratio, 0.8, 1.2)
        return -jnp.minimum(ratio * advantage, clipped * advantage).mean()

    return program(loss, jnp.array([-1.0, -2.0]), jnp.array([-1.1, -122.0]), jnp.array([1.0, -1.0]))


CASE = Case(cause="overflow", operation="exp")
