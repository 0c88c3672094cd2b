"""A triplet loss: the distance of an anchor to a positive that is the same point."""

from corpus.case import Case, program


def in_torch():
    import torch

    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)

    def loss(anchor, positive, negative):
        a, p, n = net(anchor), net(positive), net(negative)
        near = torch.sqrt(((a - p) ** 2).sum(-1))  # BAD
        far = torch.sqrt(((a - n) ** 2).sum(-1))
        return torch.relu(near - far + 5.0).mean()

    return program(loss, torch.ones(1, 3), torch.ones(1, 3), torch.zeros(1, 3), model=net)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, anchor, positive, negative):
        a, p, n = anchor @ w, positive @ w, negative @ w
        near = jnp.sqrt(((a - p) ** 2).sum(-1))  # BAD
        far = jnp.sqrt(((a - n) ** 2).sum(-1))
        return jax.nn.relu(near - far + 5.0).mean()

    return program(loss, jnp.ones((3, 2)), jnp.ones((1, 3)), jnp.ones((1, 3)), jnp.zeros((1, 3)))


CASE = Case(cause="boundary_derivative", operation="sqrt", primitive="div")
