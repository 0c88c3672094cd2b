"""A layer with float16 parameters whose output passes 65504."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(4, 2, bias=False).half()
    torch.nn.init.constant_(linear.weight, 50.0)

    def loss(x):
        y = linear(x)  # BAD
        return y.float().square().mean()

    return program(loss, torch.full((1, 4), 400.0, dtype=torch.float16), model=linear)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        y = x @ w  # BAD
        return (y.astype(jnp.float32) ** 2).mean()

    w = jnp.full((4, 2), 50.0, dtype=jnp.float16)
    return program(loss, w, jnp.full((1, 4), 400.0, dtype=jnp.float16))


CASE = Case(cause="low_precision_overflow", operation=("matmul", "linear"))
