"""Cross-entropy with padding among the labels."""

from corpus.case import program


def in_torch():
    import torch
    from torch.nn import functional

    linear = torch.nn.Linear(2, 3)

    def loss(x, y):
        return functional.cross_entropy(linear(x), y, ignore_index=-100)

    return program(loss, torch.ones(3, 2), torch.tensor([1, -100, 2]), model=linear)


def in_jax():
    import jax.numpy as jnp
    import optax

    def loss(w, x, y):
        valid = y >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, jnp.where(valid, y, 0))
        return (losses * valid).sum() / jnp.maximum(valid.sum(), 1)

    return program(loss, jnp.ones((2, 3)), jnp.ones((3, 2)), jnp.array([1, -100, 2]))
