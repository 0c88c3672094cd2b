"""The failure is two modules deep; the path to it is part of the answer."""

from corpus.case import Case, program


def in_torch():
    import torch

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.weight * x / x.amax(-1, keepdim=True)  # BAD

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = Scale()

        def forward(self, x):
            return torch.relu(self.scale(x)) * torch.tensor([0.0, 1.0])

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = torch.nn.ModuleList([Block(), Block()])

        def forward(self, x):
            x = self.encoder[0](x) * torch.tensor([1.0, 0.0])
            return self.encoder[1](x)

    net = Net()
    return program(lambda x: net(x).sum(), torch.tensor([[2.0, 1.0]]), model=net)


def in_jax():
    import jax
    import jax.numpy as jnp

    def scale(w, x):
        with jax.named_scope("scale"):
            return w * x / x.max(-1, keepdims=True)  # BAD

    def loss(params, x):
        with jax.named_scope("encoder.0"):
            x = jax.nn.relu(scale(params[0], x)) * jnp.array([0.0, 1.0])
        x = x * jnp.array([1.0, 0.0])
        with jax.named_scope("encoder.1"):
            x = jax.nn.relu(scale(params[1], x)) * jnp.array([0.0, 1.0])
        return x.sum()

    return program(loss, (jnp.ones(2), jnp.ones(2)), jnp.array([[2.0, 1.0]]))


CASE = Case(cause="domain", operation="div", module="encoder.1")
