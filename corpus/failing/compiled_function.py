"""A compiled function; it is replayed as it was written."""

from corpus.case import Case, program


def in_torch():
    import torch

    @torch.compile(backend="eager")
    def block(x):
        y = torch.relu(x)
        return torch.log(y)  # BAD

    def loss(x):
        return block(x).sum()

    return program(loss, torch.tensor([4.0, -1.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    @jax.jit
    def block(x):
        y = jax.nn.relu(x)
        return jnp.log(y)  # BAD

    @jax.jit
    def loss(x):
        return block(x).sum()

    return program(loss, jnp.array([4.0, -1.0]))


CASE = Case(cause="domain", operation="log")
