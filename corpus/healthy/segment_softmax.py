"""A softmax per group: the maximum of each group starts at -inf, empty groups keep it and are not read."""

from corpus.case import program


def in_torch():
    import torch

    group = torch.tensor([0, 0, 2])

    def loss(x):
        top = torch.full((3,), float("-inf")).scatter_reduce(0, group, x.detach(), "amax")
        e = torch.exp(x - top[group])
        total = torch.zeros(3).index_add(0, group, e)
        return (e / total[group])[0]

    return program(loss, torch.tensor([1.0, 2.0, 3.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    group = jnp.array([0, 0, 2])

    def loss(x):
        top = jax.ops.segment_max(jax.lax.stop_gradient(x), group, num_segments=3)
        e = jnp.exp(x - top[group])
        total = jax.ops.segment_sum(e, group, num_segments=3)
        return (e / total[group])[0]

    return program(loss, jnp.array([1.0, 2.0, 3.0]))
