"""The deviation of equal numbers is 0, its slope infinite.

torch's own std has a gradient of 0 in this case; the square root of its variance does not.
"""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        std = torch.var(x, dim=-1).sqrt()  # BAD
        return torch.relu(1.0 - std).mean()

    return program(loss, torch.tensor([[1.0, 2.0], [3.0, 3.0]], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x):
        std = jnp.std(x, axis=-1)  # BAD
        return jax.nn.relu(1.0 - std).mean()

    return program(loss, jnp.array([[1.0, 2.0], [3.0, 3.0]]))


CASE = Case(cause="boundary_derivative", operation={"torch": "sqrt", "jax": ("std", "sqrt")}, primitive="div")
