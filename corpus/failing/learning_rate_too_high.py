"""A learning rate of 1e38 times a gradient of 100 is inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=1e38)

    def step(x):
        optimizer.zero_grad()
        loss = (w * x).sum()
        loss.backward()
        optimizer.step()  # BAD
        return loss

    return program(step, torch.tensor([1.0, 100.0]), optimizer=optimizer)


def in_jax():
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.sgd(1e38)
    params = {"w": jnp.ones(2)}
    state = tx.init(params)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: (p["w"] * x).sum())(params)
        updates, state = tx.update(grads, state, params)  # BAD
        return optax.apply_updates(params, updates), state, loss

    return program(step, params, state, jnp.array([1.0, 100.0]))


CASE = Case(cause=("overflow", "optimizer_state"), operation=("add", "mul", "sub"))
