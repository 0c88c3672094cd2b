"""Too high a loss scale under autocast: the gradient of a weight is summed over the batch in float16."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(2, 1, bias=False)

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            y = linear(x)  # BAD
        return y.float().sum()

    return program(loss, torch.full((8, 2), 3.0), model=linear, loss_scale=2.0**14)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        y = x.astype(jnp.float16) @ w.astype(jnp.float16)  # BAD
        return y.astype(jnp.float32).sum()

    return program(loss, jnp.ones((2, 1)), jnp.full((8, 2), 3.0), loss_scale=2.0**14)


CASE = Case(cause="loss_scale", operation=("matmul", "linear"))
