"""A hand-written group norm in float16: the sum of squares over a group exceeds 65504."""

from corpus.case import Case, program


def in_torch():
    import torch

    weight = torch.ones(4, dtype=torch.float16, requires_grad=True)

    def loss(x):
        grouped = x.reshape(1, 2, 2)
        energy = (grouped**2).sum(-1, keepdim=True)  # BAD
        return (weight * (grouped / energy.sqrt()).reshape(1, 4)).float().sum() + (0.0 * energy).float().sum()

    return program(loss, torch.full((1, 4), 200.0, dtype=torch.float16))


def in_jax():
    import jax.numpy as jnp

    def loss(weight, x):
        grouped = x.reshape(1, 2, 2)
        energy = (grouped**2).sum(-1, keepdims=True)  # BAD
        normed = weight * (grouped / jnp.sqrt(energy)).reshape(1, 4)
        return normed.astype(jnp.float32).sum() + (0.0 * energy).astype(jnp.float32).sum()

    return program(loss, jnp.ones(4, dtype=jnp.float16), jnp.full((1, 4), 200.0, dtype=jnp.float16))


CASE = Case(cause="low_precision_overflow", operation="sum", primitive={"jax": "cast"})
