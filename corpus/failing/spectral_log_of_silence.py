"""The log-magnitude of a spectrum, of a signal that is silent."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        magnitude = torch.fft.rfft(x).abs()
        return torch.log(magnitude).mean()  # BAD

    return program(loss, torch.zeros(8, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        magnitude = jnp.abs(jnp.fft.rfft(x))
        return jnp.log(magnitude).mean()  # BAD

    return program(loss, jnp.zeros(8))


CASE = Case(cause="domain", operation="log")
