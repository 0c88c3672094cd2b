"""A running variance below 0, from averaging checkpoints with negative weights."""

from corpus.case import Case, program


def in_torch():
    import torch

    norm = torch.nn.BatchNorm1d(2).eval()
    norm.running_var[0] = -1.0

    def loss(x):
        return norm(x).square().mean()  # BAD

    return program(loss, torch.ones(3, 2), model=norm)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(variables, x):
        mean, var = variables["batch_stats"]
        inverse = jax.lax.rsqrt(var + 1e-5)  # BAD
        return ((variables["gain"] * (x - mean) * inverse) ** 2).mean()

    stats = (jnp.zeros(2), jnp.array([-1.0, 1.0]))
    return program(loss, {"gain": jnp.ones(2), "batch_stats": stats}, jnp.ones((3, 2)))


CASE = Case(cause=("domain", "parameters"), operation={"torch": "batch_norm", "jax": "rsqrt"})
