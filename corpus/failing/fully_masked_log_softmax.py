"""log_softmax of a row of actions, none of which is allowed."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(scores, allowed):
        scores = torch.where(allowed, scores, torch.tensor(float("-inf")))
        logp = torch.log_softmax(scores, dim=-1)  # BAD
        return -logp[:, 0].mean()

    scores = torch.ones(2, 3, requires_grad=True)
    return program(loss, scores, torch.tensor([[True, True, False], [False, False, False]]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scores, allowed):
        scores = jnp.where(allowed, scores, -jnp.inf)
        logp = jax.nn.log_softmax(scores, axis=-1)  # BAD
        return -logp[:, 0].mean()

    allowed = jnp.array([[True, True, False], [False, False, False]])
    return program(loss, jnp.ones((2, 3)), allowed)


CASE = Case(cause="mask", operation="log_softmax", primitive={"jax": "sub"})
