"""An einsum in float16 whose sums pass 65504."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.full((64, 4), 40.0, dtype=torch.float16, requires_grad=True)

    def loss(x):
        y = torch.einsum("bd,dk->bk", x, w)  # BAD
        return y.float().logsumexp(-1).mean()

    return program(loss, torch.full((2, 64), 40.0, dtype=torch.float16))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        y = jnp.einsum("bd,dk->bk", x, w)  # BAD
        return jax.nn.logsumexp(y.astype(jnp.float32), axis=-1).mean()

    return program(
        loss, jnp.full((64, 4), 40.0, dtype=jnp.float16), jnp.full((2, 64), 40.0, dtype=jnp.float16)
    )


CASE = Case(cause="low_precision_overflow", operation=("matmul", "einsum"))
