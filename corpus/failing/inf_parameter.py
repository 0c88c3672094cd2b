"""A bias is inf before the step."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(2, 2)
    linear.bias.data[1] = float("inf")

    def loss(x, y):
        error = linear(x) - y  # BAD
        return error.square().mean()

    return program(loss, torch.ones(1, 2), torch.zeros(1, 2), model=linear)


def in_jax():
    import jax.numpy as jnp

    def loss(params, x, y):
        error = x @ params["w"] + params["b"] - y  # BAD
        return (error**2).mean()

    params = {"w": jnp.ones((2, 2)), "b": jnp.array([0.0, jnp.inf])}
    return program(loss, params, jnp.ones((1, 2)), jnp.zeros((1, 2)))


CASE = Case(cause="parameters", operation="parameter")
