"""float16 with a loss scale that fits."""

from corpus.case import program


def in_torch():
    import torch

    linear = torch.nn.Linear(4, 2)

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            y = linear(x)
        return y.float().square().mean()

    return program(loss, torch.ones(3, 4), model=linear, loss_scale=2.0**10)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        y = x.astype(jnp.float16) @ w.astype(jnp.float16)
        return (y.astype(jnp.float32) ** 2).mean()

    return program(loss, 0.1 * jnp.ones((4, 2)), jnp.ones((3, 4)), loss_scale=2.0**10)
