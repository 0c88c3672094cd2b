"""A weight is NaN before the step."""

from corpus.case import Case, program


def in_torch():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    model[2].weight.data[0, 1] = float("nan")

    def loss(x):
        return model(x).square().mean()  # BAD

    return program(loss, torch.ones(1, 2), model=model)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(params, x):
        hidden = jax.nn.relu(x @ params["first"])
        return ((hidden @ params["second"]) ** 2).mean()  # BAD

    params = {"first": jnp.ones((2, 3)), "second": jnp.ones((3, 1)).at[1].set(jnp.nan)}
    return program(loss, params, jnp.ones((1, 2)))


CASE = Case(cause="parameters", operation="parameter")
