"""eps = 0 and a gradient whose square is below the smallest float32: m / 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([w], eps=0.0)

    def step(x):
        optimizer.zero_grad()
        loss = (w * x).sum()
        loss.backward()
        optimizer.step()  # BAD
        return loss

    return program(step, torch.tensor([1.0, 1e-30]), optimizer=optimizer)


def in_jax():
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adam(1e-3, eps=0.0)
    params = {"w": jnp.ones(2)}
    state = tx.init(params)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: (p["w"] * x).sum())(params)
        updates, state = tx.update(grads, state, params)  # BAD
        return optax.apply_updates(params, updates), state, loss

    return program(step, params, state, jnp.array([1.0, 1e-30]))


CASE = Case(cause="optimizer_state", operation=("div", "addcdiv"))
