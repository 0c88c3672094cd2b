"""A feature is inf: a division by zero in the pipeline."""

from corpus.case import Case, program


def in_torch():
    import torch

    torch.manual_seed(0)
    linear = torch.nn.Linear(2, 1)

    def loss(batch):
        hidden = linear(batch["x"])  # BAD
        return (hidden.squeeze(-1) - batch["y"]).abs().mean()

    batch = {"x": torch.tensor([[1.0, float("inf")], [0.0, 1.0]]), "y": torch.zeros(2)}
    return program(loss, batch, model=linear)


def in_jax():
    import jax.numpy as jnp

    def loss(w, batch):
        hidden = batch["x"] @ w  # BAD
        return jnp.abs(hidden - batch["y"]).mean()

    batch = {"x": jnp.array([[1.0, jnp.inf], [0.0, 1.0]]), "y": jnp.zeros(2)}
    return program(loss, jnp.ones(2), batch)


CASE = Case(cause="batch", operation="input")
