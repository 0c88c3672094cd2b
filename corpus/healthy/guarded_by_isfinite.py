"""Non-finite ratios are detected and left out, outside the gradient."""

from corpus.case import program


def in_torch():
    import torch

    def loss(w, x, y):
        ratio = x / y
        good = torch.isfinite(ratio)
        ratio = ratio.masked_fill(~good, 0.0)
        return (w * ratio).sum() / good.sum().clamp(min=1)

    w = torch.ones(3, requires_grad=True)
    return program(loss, w, torch.tensor([1.0, 0.0, 2.0]), torch.tensor([2.0, 0.0, 0.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(w, x, y):
        ratio = x / y
        good = jnp.isfinite(ratio)
        return (w * jnp.where(good, ratio, 0.0)).sum() / jnp.maximum(good.sum(), 1)

    return program(loss, jnp.ones(3), jnp.array([1.0, 0.0, 2.0]), jnp.array([2.0, 0.0, 0.0]))
