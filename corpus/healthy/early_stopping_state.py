"""A state that carries inf on purpose (the best loss so far) comes out of a training step."""

from corpus.case import program


def in_torch():
    import torch

    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)
    best = {"loss": torch.tensor(float("inf"))}

    def step(x):
        optimizer.zero_grad()
        loss = (w * x).square().sum()
        loss.backward()
        optimizer.step()
        best["new"] = torch.minimum(best["loss"], loss.detach())
        return loss

    return program(step, torch.ones(2), optimizer=optimizer)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x, best):
        value = ((w * x) ** 2).sum()
        return value, jnp.minimum(best, value)

    return program(loss, jnp.ones(2), jnp.ones(2), jnp.array(jnp.inf), has_aux=True)
