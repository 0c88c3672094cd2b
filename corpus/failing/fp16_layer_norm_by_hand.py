"""A layer norm in float16: the square of a deviation of 1000 overflows."""

from corpus.case import Case, program


def in_torch():
    import torch

    gain = torch.ones(2, dtype=torch.float16, requires_grad=True)

    def loss(x):
        centred = x - x.mean(-1, keepdim=True)
        squares = centred * centred  # BAD
        var = squares.mean(-1, keepdim=True)
        return (gain * centred * torch.rsqrt(var + 1e-5)).float().sum() + (var * 0).float().sum()

    return program(loss, torch.tensor([[1000.0, -1000.0]], dtype=torch.float16))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(gain, x):
        centred = x - x.mean(-1, keepdims=True)
        squares = centred * centred  # BAD
        var = squares.mean(-1, keepdims=True)
        normed = gain * centred * jax.lax.rsqrt(var + jnp.float16(1e-5))
        return normed.astype(jnp.float32).sum() + (var * 0).astype(jnp.float32).sum()

    return program(loss, jnp.ones(2, dtype=jnp.float16), jnp.array([[1000.0, -1000.0]], dtype=jnp.float16))


CASE = Case(cause="low_precision_overflow", operation="mul")
