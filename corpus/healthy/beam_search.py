"""Beam scores begin at -inf except for the first beam."""

from corpus.case import program


def in_torch():
    import torch

    def loss(logits):
        scores = torch.full((2,), float("-inf"))
        scores = torch.cat([torch.zeros(1), scores[1:]])
        for row in logits:
            joint = scores[:, None] + torch.log_softmax(row, dim=-1)
            scores = joint.flatten().topk(2).values
        return -scores[0]

    return program(loss, torch.tensor([[0.1, 0.7, 0.2], [0.4, 0.1, 0.3]], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logits):
        def step(scores, row):
            joint = scores[:, None] + jax.nn.log_softmax(row)
            return jax.lax.top_k(joint.ravel(), 2)[0], None

        scores, _ = jax.lax.scan(step, jnp.array([0.0, -jnp.inf]), logits)
        return -scores[0]

    return program(loss, jnp.array([[0.1, 0.7, 0.2], [0.4, 0.1, 0.3]]))
