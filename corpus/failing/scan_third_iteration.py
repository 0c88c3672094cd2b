"""A filter over a signal divides by a gain that is 0 at its third step."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(h, gains):
        total = torch.zeros(())
        for gain in gains:
            total = total + h / gain  # BAD
        return total

    return program(loss, torch.tensor(2.0, requires_grad=True), torch.tensor([1.0, 2.0, 0.0, 4.0]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(h, gains):
        def cell(total, gain):
            return total + h / gain, None  # BAD

        return jax.lax.scan(cell, 0.0, gains)[0]

    return program(loss, jnp.array(2.0), jnp.array([1.0, 2.0, 0.0, 4.0]))


CASE = Case(cause="domain", operation="div", where="iteration 2 of scan")
