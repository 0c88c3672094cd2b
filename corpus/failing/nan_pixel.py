"""One number of one image is NaN."""

from corpus.case import Case, program


def in_torch():
    import torch

    torch.manual_seed(0)
    conv = torch.nn.Conv2d(1, 2, 3)

    def loss(images):
        features = conv(images)  # BAD
        return features.square().mean()

    images = torch.ones(2, 1, 5, 5)
    images[1, 0, 2, 2] = float("nan")
    return program(loss, images, model=conv)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(kernel, images):
        features = jax.lax.conv(images, kernel, (1, 1), "VALID")  # BAD
        return (features**2).mean()

    return program(loss, jnp.ones((2, 1, 3, 3)), jnp.ones((2, 1, 5, 5)).at[1, 0, 2, 2].set(jnp.nan))


CASE = Case(cause="batch", operation="input")
