"""The last layer of a residual block begins at zero, under weight normalization."""

from corpus.case import Case, program


def in_torch():
    import torch

    layer = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(layer.weight)
    layer = torch.nn.utils.parametrizations.weight_norm(layer)

    def loss(x):
        return (x[:, :1] + layer(x)).square().mean()  # BAD

    return program(loss, torch.ones(3, 2), model=layer)


def in_jax():
    import jax.numpy as jnp

    def loss(p, x):
        w = p["g"] * p["v"] / jnp.linalg.norm(p["v"])  # BAD
        return jnp.mean((x[:, 0] + x @ w) ** 2)

    return program(loss, {"g": jnp.ones(()), "v": jnp.zeros(2)}, jnp.ones((3, 2)))


CASE = Case(cause="domain", operation={"torch": "weight_norm", "jax": "div"})
