"""A hand-written backward pass of a square root divides by the root, which is 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    class Root(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.sqrt()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad / (2.0 * y)  # BAD

    def loss(x):
        return Root.apply(x).sum()

    return program(loss, torch.tensor([4.0, 0.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def root(x):
        return jnp.sqrt(x)

    def forward(x):
        y = jnp.sqrt(x)
        return y, y

    def backward(y, grad):
        return (grad / (2.0 * y),)  # BAD

    root.defvjp(forward, backward)

    def loss(x):
        return root(x).sum()

    return program(loss, jnp.array([4.0, 0.0]))


CASE = Case(cause=("domain", "boundary_derivative"), operation="div")
