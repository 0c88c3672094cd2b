"""A hand-written normal log-density with a softplus scale that underflowed to 0."""

from corpus.case import Case, program


def in_torch():
    import torch
    from torch.nn import functional

    raw = torch.tensor(-200.0, requires_grad=True)

    def loss(y):
        scale = functional.softplus(raw)
        z = y / scale  # BAD
        return (0.5 * z * z + scale.log()).mean()

    return program(loss, torch.tensor([0.1, -0.2]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(raw, y):
        scale = jax.nn.softplus(raw)
        z = y / scale  # BAD
        return (0.5 * z * z + jnp.log(scale)).mean()

    return program(loss, jnp.array(-200.0), jnp.array([0.1, -0.2]))


CASE = Case(cause="domain", operation="div")
