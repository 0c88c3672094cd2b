"""The mean loss of the items above a threshold, when there are none."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(error):
        hard = error[error > 10.0]
        return hard.mean()  # BAD

    return program(loss, torch.tensor([0.1, 0.4], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(error):
        return jnp.mean(error, where=error > 10.0)  # BAD

    return program(loss, jnp.array([0.1, 0.4]))


CASE = Case(cause=("domain", "labels"), operation="mean", primitive={"jax": "div"})
