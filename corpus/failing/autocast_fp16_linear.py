"""float32 parameters under float16 autocast; in JAX they are cast by hand."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(4, 2)
    torch.nn.init.constant_(linear.weight, 50.0)

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            y = linear(x)  # BAD
        return y.float().square().mean()

    return program(loss, torch.full((1, 4), 400.0), model=linear)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        w, x = w.astype(jnp.float16), x.astype(jnp.float16)
        y = jnp.dot(x, w)  # BAD
        return (y.astype(jnp.float32) ** 2).mean()

    return program(loss, jnp.full((4, 2), 50.0), jnp.full((1, 4), 400.0))


CASE = Case(cause="low_precision_overflow", operation=("matmul", "linear"))
