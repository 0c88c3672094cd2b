"""The logarithm of silence is -inf before the model sees it; subtracting its mean gives -inf - -inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    gain = torch.tensor(1.0, requires_grad=True)

    def loss(mel):
        centred = mel - mel.mean()  # BAD
        return (gain * centred).square().mean()

    return program(loss, torch.tensor([-1.0, float("-inf"), -2.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(gain, mel):
        centred = mel - mel.mean()  # BAD
        return ((gain * centred) ** 2).mean()

    return program(loss, jnp.array(1.0), jnp.array([-1.0, -jnp.inf, -2.0]))


CASE = Case(cause=("batch", "mask"), operation=("input", "sub"))
