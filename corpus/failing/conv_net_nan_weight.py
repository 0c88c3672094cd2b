"""The second convolution of a small network has a weight that is inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Conv2d(2, 2, 3))
    net[2].weight.data[1, 0, 0, 0] = float("inf")

    def loss(x):
        return net(x).square().mean()  # BAD

    return program(loss, torch.ones(1, 1, 6, 6), model=net)


def in_jax():
    import jax
    import jax.numpy as jnp

    def conv(x, kernel):
        return jax.lax.conv(x, kernel, (1, 1), "VALID")

    def loss(params, x):
        x = jax.nn.relu(conv(x, params[0]))
        kernel = params[1] * 1.0  # BAD
        return (conv(x, kernel) ** 2).mean()

    kernels = (jnp.ones((2, 1, 3, 3)), jnp.ones((2, 2, 3, 3)).at[1, 0, 0, 0].set(jnp.inf))
    return program(loss, kernels, jnp.ones((1, 1, 6, 6)))


CASE = Case(cause="parameters", operation="parameter")
