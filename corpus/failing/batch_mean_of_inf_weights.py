"""A sample weight is inf, in a nested batch."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(2, 1)

    def loss(batch):
        error = linear(batch["x"]).squeeze(-1) - batch["y"]
        return (batch["meta"]["weight"] * error.square()).mean()  # BAD

    batch = {
        "x": torch.ones(2, 2),
        "y": torch.zeros(2),
        "meta": {"weight": torch.tensor([1.0, float("inf")])},
    }
    return program(loss, batch, model=linear)


def in_jax():
    import jax.numpy as jnp

    def loss(w, batch):
        error = batch["x"] @ w - batch["y"]
        return (batch["meta"]["weight"] * error**2).mean()  # BAD

    batch = {"x": jnp.ones((2, 2)), "y": jnp.zeros(2), "meta": {"weight": jnp.array([1.0, jnp.inf])}}
    return program(loss, jnp.ones(2), batch)


CASE = Case(cause="batch", operation="input")
