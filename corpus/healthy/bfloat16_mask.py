"""bfloat16, masked with the lowest number of the format rather than -inf."""

from corpus.case import program


def in_torch():
    import torch

    def loss(scores, keep):
        low = torch.finfo(torch.bfloat16).min
        scores = scores.bfloat16().masked_fill(~keep, low)
        return torch.softmax(scores, dim=-1).float()[:, 0].square().sum()

    return program(
        loss, torch.ones(2, 3, requires_grad=True), torch.tensor([[True, True, False], [False] * 3])
    )


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scores, keep):
        low = jnp.finfo(jnp.bfloat16).min
        scores = jnp.where(keep, scores.astype(jnp.bfloat16), low)
        return (jax.nn.softmax(scores, axis=-1).astype(jnp.float32)[:, 0] ** 2).sum()

    return program(loss, jnp.ones((2, 3)), jnp.array([[True, True, False], [False] * 3]))
