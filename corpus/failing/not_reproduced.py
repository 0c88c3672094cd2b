"""The step went wrong once, and is finite when it is run again: hardware, a race, or unseeded randomness."""

from corpus.case import Case, program


def in_torch():
    import torch

    readings = iter([float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # a sensor, or faulty memory
    w = torch.nn.Parameter(torch.ones(2))

    def loss(x):
        return (w * x * next(readings)).sum()

    if torch.isfinite(loss(torch.ones(2))):
        raise AssertionError("the first run fails")
    return program(loss, torch.ones(2), known_bad=True)


def in_jax():
    import jax.numpy as jnp

    readings = iter([float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # a sensor, or faulty memory

    def loss(w, x):
        return (w * x * next(readings)).sum()

    if jnp.isfinite(loss(jnp.ones(2), jnp.ones(2))):
        raise AssertionError("the first run fails")
    return program(loss, jnp.ones(2), jnp.ones(2), known_bad=True)


CASE = Case(cause="transient", operation="", fails="once")
