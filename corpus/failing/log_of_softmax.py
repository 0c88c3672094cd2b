"""Log of softmax instead of log_softmax: a class that is 200 below the best one has probability 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(2, 3, bias=False)
    linear.weight.data = torch.tensor([[200.0, 0.0], [0.0, 0.0], [0.0, 1.0]])

    def loss(x, y):
        p = torch.softmax(linear(x), dim=-1)
        logp = torch.log(p)  # BAD
        return -logp[torch.arange(len(y)), y].mean()

    return program(loss, torch.tensor([[1.0, 0.5]]), torch.tensor([1]), model=linear)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x, y):
        p = jax.nn.softmax(x @ w, axis=-1)
        logp = jnp.log(p)  # BAD
        return -logp[jnp.arange(len(y)), y].mean()

    w = jnp.array([[200.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    return program(loss, w, jnp.array([[1.0, 0.5]]), jnp.array([1]))


CASE = Case(cause="domain", operation="log")
