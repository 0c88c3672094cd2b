"""(1 - mask) * -inf instead of where: 0 * -inf wherever the mask keeps something."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(scores, mask):
        bias = (1.0 - mask) * float("-inf")  # BAD
        return torch.softmax(scores + bias, dim=-1)[0]

    return program(loss, torch.tensor([0.1, 0.2, 0.3], requires_grad=True), torch.tensor([1.0, 1.0, 0.0]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scores, mask):
        bias = (1.0 - mask) * -jnp.inf  # BAD
        return jax.nn.softmax(scores + bias, axis=-1)[0]

    return program(loss, jnp.array([0.1, 0.2, 0.3]), jnp.array([1.0, 1.0, 0.0]))


CASE = Case(cause="mask", operation="mul")
