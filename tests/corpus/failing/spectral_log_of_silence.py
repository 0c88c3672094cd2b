"""The log-magnitude of a spectrum, of a signal that is silent."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(x):
        magnitude = torch.fft.rfft(x).abs()
        return torch.log(magnitude).mean()  # BAD

    return program(loss, torch.zeros(8, requires_grad=True))


def in_jax():
    def loss(x):
        magnitude = jnp.abs(jnp.fft.rfft(x))
        return jnp.log(magnitude).mean()  # BAD

    return program(loss, jnp.zeros(8))


CASE = Case(cause="domain", operation="log")
