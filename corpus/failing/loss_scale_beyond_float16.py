"""A loss scale of 65536 in float16, which is inf there; only the gradient shows it."""

from corpus.case import Case, program


def in_torch():
    import torch

    scale = torch.tensor(2.0**16, dtype=torch.float16)

    def loss(w, x):
        scores = torch.log_softmax((x @ w).half(), dim=1)
        return -scores[:, 0].mean() * scale  # BAD

    return program(loss, torch.ones(2, 2, requires_grad=True), torch.ones(3, 2))


def in_jax():
    import jax
    import jax.numpy as jnp

    scale = jnp.asarray(2.0**15, dtype=jnp.float16) * 2

    def scaled(w, x):
        scores = jax.nn.log_softmax((x @ w).astype(jnp.float16))
        loss = -scores[:, 0].mean()
        return loss * scale, loss  # BAD

    def step(w, x):
        gradient, loss = jax.grad(scaled, has_aux=True)(w, x)
        return w - gradient, loss

    return program(step, jnp.ones((2, 2)), jnp.ones((3, 2)))


CASE = Case(cause=("overflow", "batch"), operation=("mul", "constant", "input"))
