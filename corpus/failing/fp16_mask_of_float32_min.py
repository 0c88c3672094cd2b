"""The smallest float32 as a mask, cast to float16, is -inf; a row that is fully masked is NaN."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(scores, keep):
        bias = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
        scores = scores + bias.half()  # BAD
        return torch.softmax(scores, dim=-1)[:, 0].float().sum()

    return program(loss, torch.ones(1, 3, dtype=torch.float16, requires_grad=True), torch.zeros(1, 3) > 0)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scores, keep):
        bias = jnp.where(keep, 0.0, jnp.finfo(jnp.float32).min)
        scores = scores + bias.astype(jnp.float16)  # BAD
        return jax.nn.softmax(scores, axis=-1)[:, 0].astype(jnp.float32).sum()

    return program(loss, jnp.ones((1, 3), dtype=jnp.float16), jnp.zeros((1, 3)) > 0)


CASE = Case(cause=("low_precision_overflow", "mask"), operation=("cast", "to", "convert"))
