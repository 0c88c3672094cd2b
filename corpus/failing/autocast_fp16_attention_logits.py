"""Attention logits under float16 autocast: large queries times large keys."""

from corpus.case import Case, program


def in_torch():
    import torch

    projection = torch.nn.Linear(8, 8, bias=False)
    projection.weight.data = 10.0 * torch.eye(8)

    def loss(x):
        with torch.autocast("cpu", dtype=torch.float16):
            q, k = projection(x), projection(x)
            scores = q @ k.transpose(-1, -2)  # BAD
            p = torch.softmax(scores / 8**0.5, dim=-1)
        return p.square().mean()

    return program(loss, torch.full((2, 8), 30.0), model=projection)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        x = x.astype(jnp.float16)
        q, k = x @ w.astype(jnp.float16), x @ w.astype(jnp.float16)
        scores = q @ k.T  # BAD
        p = jax.nn.softmax(scores / 8**0.5, axis=-1)
        return (p.astype(jnp.float32) ** 2).mean()

    return program(loss, 10.0 * jnp.eye(8), jnp.full((2, 8), 30.0))


CASE = Case(cause="low_precision_overflow", operation="matmul")
