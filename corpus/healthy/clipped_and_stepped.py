"""Clipping by a norm whose limit is inf, then a step: the norm is only measured."""

from corpus.case import program


def in_torch():
    import torch

    torch.manual_seed(0)
    linear = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(linear.parameters(), foreach=True)

    def step(x):
        optimizer.zero_grad()
        loss = linear(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(linear.parameters(), float("inf"))
        optimizer.step()
        return loss

    return program(step, torch.ones(2, 2), model=linear, optimizer=optimizer)


def in_jax():
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.chain(optax.clip_by_global_norm(jnp.inf), optax.adamw(1e-3))
    params = {"w": jnp.ones(2)}

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return program(step, params, tx.init(params), jnp.ones((2, 2)))
