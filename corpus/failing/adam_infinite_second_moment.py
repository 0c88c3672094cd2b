"""Adam's second moment is inf after a gradient of 1e30: the weights never move again, nothing is NaN."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(linear.parameters())
    linear(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg_sq"].fill_(float("inf"))

    def step(x):
        optimizer.zero_grad()
        loss = linear(x).square().mean()
        loss.backward()
        optimizer.step()  # BAD
        return loss

    return program(step, torch.ones(1, 2), model=linear, optimizer=optimizer)


def in_jax():
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adam(1e-3)
    params = {"w": jnp.ones(2)}
    adam, *rest = tx.init(params)
    state = (adam._replace(nu={"w": jnp.full(2, jnp.inf)}), *rest)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: (x @ p["w"]) ** 2)(params)
        updates, state = tx.update(grads, state, params)  # BAD
        return optax.apply_updates(params, updates), state, loss

    return program(step, params, state, jnp.ones(2))


CASE = Case(cause="optimizer_state", operation="", fails="stuck")
