"""A hand-written trust ratio: the norm of the parameters divided by the norm of a zero gradient."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.nn.Parameter(torch.ones(2))

    def step(x):
        loss = (w * x).sum()
        (gradient,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            ratio = w.norm() / gradient.norm()  # BAD
            w.sub_(0.1 * ratio * gradient)
        return loss.detach()

    return program(step, torch.zeros(2))


def in_jax():
    import jax
    import jax.numpy as jnp

    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: (w * x).sum())(w)
        ratio = jnp.linalg.norm(w) / jnp.linalg.norm(gradient)  # BAD
        return w - 0.1 * ratio * gradient, loss

    return program(step, jnp.ones(2), jnp.zeros(2))


CASE = Case(cause=("domain", "optimizer_state"), operation="div")
