"""Max pooling pads with -inf."""

from corpus.case import program


def in_torch():
    import torch
    from torch.nn import functional

    def loss(x):
        padded = functional.pad(x, (1, 1), value=float("-inf"))
        return functional.max_pool1d(padded, 3, stride=1).square().mean()

    return program(loss, torch.tensor([[[1.0, 3.0, 2.0, 0.5]]], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x):
        return (jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3,), (1,), "SAME") ** 2).mean()

    return program(loss, jnp.array([1.0, 3.0, 2.0, 0.5]))
