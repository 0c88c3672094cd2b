"""Rewards standardised by their sample deviation, in a batch with one item: 0 / 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logp, reward):
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)  # BAD
        return -(logp * advantage).mean()

    return program(loss, torch.tensor([-0.7], requires_grad=True), torch.tensor([2.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(logp, reward):
        advantage = (reward - reward.mean()) / (reward.std(ddof=1) + 1e-8)  # BAD
        return -(logp * advantage).mean()

    return program(loss, jnp.array([-0.7]), jnp.array([2.0]))


CASE = Case(cause="domain", operation=("std", "var"), primitive={"jax": "div"})
