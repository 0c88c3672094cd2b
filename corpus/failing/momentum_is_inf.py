"""SGD's momentum buffer holds an inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    w.sum().backward()
    optimizer.step()
    optimizer.state[w]["momentum_buffer"][1] = float("inf")

    def step(x):
        optimizer.zero_grad()
        loss = (w * x).sum()
        loss.backward()
        optimizer.step()  # BAD
        return loss

    return program(step, torch.ones(2), optimizer=optimizer)


def in_jax():
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.sgd(0.1, momentum=0.9)
    params = jnp.ones(2)
    trace, *rest = tx.init(params)
    state = (trace._replace(trace=jnp.array([0.0, jnp.inf])), *rest)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda w: (w * x).sum())(params)
        updates, state = tx.update(grads, state)  # BAD
        return optax.apply_updates(params, updates), state, loss

    return program(step, params, state, jnp.ones(2))


CASE = Case(cause="optimizer_state", operation="state")
