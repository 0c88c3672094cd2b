"""A function with its own backward pass takes the logarithm of 0 in the forward one."""

from corpus.case import Case, program


def in_torch():
    import torch

    class SafeLog(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.log(x)  # BAD

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad / x.clamp(min=1e-6)

    def loss(x):
        return SafeLog.apply(x).sum()

    return program(loss, torch.tensor([1.0, 0.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def safe_log(x):
        return jnp.log(x)

    def forward(x):
        return jnp.log(x), x  # BAD

    def backward(x, grad):
        return (grad / jnp.maximum(x, 1e-6),)

    safe_log.defvjp(forward, backward)

    def loss(x):
        return safe_log(x).sum()

    return program(loss, jnp.array([1.0, 0.0]))


CASE = Case(cause="domain", operation="log")
