"""A penalty on the sample variance of a group that has one member."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        spread = torch.var(x, dim=0)  # BAD
        return torch.relu(1.0 - spread).sum()

    return program(loss, torch.tensor([[1.0, 2.0]], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x):
        spread = jnp.var(x, axis=0, ddof=1)  # BAD
        return jax.nn.relu(1.0 - spread).sum()

    return program(loss, jnp.array([[1.0, 2.0]]))


CASE = Case(cause="domain", operation="var", primitive={"jax": "div"})
