"""Distances start at inf and are relaxed; nodes that cannot be reached stay at inf and are left out."""

from corpus.case import program


def in_torch():
    import torch

    edges = [(0, 1), (1, 2)]

    def loss(cost):
        distance = [torch.tensor(0.0)] + [torch.tensor(float("inf"))] * 3
        for _ in range(2):
            for i, (a, b) in enumerate(edges):
                distance[b] = torch.minimum(distance[b], distance[a] + cost[i])
        stacked = torch.stack(distance)
        return stacked[torch.isfinite(stacked)].sum()

    return program(loss, torch.tensor([1.0, 2.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(cost):
        def relax(distance, _):
            distance = distance.at[1].min(distance[0] + cost[0])
            return distance.at[2].min(distance[1] + cost[1]), None

        start = jnp.array([0.0, jnp.inf, jnp.inf, jnp.inf])
        distance, _ = jax.lax.scan(relax, start, None, length=2)
        return distance[:3].sum()

    return program(loss, jnp.array([1.0, 2.0]))
