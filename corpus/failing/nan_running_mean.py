"""The running mean of a batch norm is NaN since a bad batch."""

from corpus.case import Case, program


def in_torch():
    import torch

    norm = torch.nn.BatchNorm1d(2).eval()
    norm.running_mean[0] = float("nan")

    def loss(x):
        return norm(x).square().mean()  # BAD

    return program(loss, torch.ones(3, 2), model=norm)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(variables, x):
        mean, var = variables["batch_stats"]
        centred = x - mean  # BAD
        return ((variables["gain"] * centred * jax.lax.rsqrt(var + 1e-5)) ** 2).mean()

    stats = (jnp.array([jnp.nan, 0.0]), jnp.ones(2))
    return program(loss, {"gain": jnp.ones(2), "batch_stats": stats}, jnp.ones((3, 2)))


CASE = Case(cause="parameters", operation={"torch": "buffer", "jax": ("parameter", "buffer")})
