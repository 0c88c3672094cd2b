"""Perturbed scores: -inf marks what has been drawn already."""

from corpus.case import program


def in_torch():
    import torch

    def loss(scores, noise):
        total, open_ = torch.tensor(0.0), torch.zeros(4)
        for _ in range(2):
            logits = scores + open_
            total = total + torch.logsumexp(logits, 0)
            pick = (logits.detach() + noise).argmax()
            open_ = open_.index_fill(0, pick[None], float("-inf"))
        return total

    return program(
        loss, torch.tensor([0.1, 0.2, 0.3, 0.4], requires_grad=True), torch.tensor([0.5, 0.1, 0.9, 0.2])
    )


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scores, noise):
        total, open_ = 0.0, jnp.zeros(4)
        for _ in range(2):
            logits = scores + open_
            total = total + jax.nn.logsumexp(logits)
            open_ = open_.at[jnp.argmax(logits + noise)].set(-jnp.inf)
        return total

    return program(loss, jnp.array([0.1, 0.2, 0.3, 0.4]), jnp.array([0.5, 0.1, 0.9, 0.2]))
