"""Adam in pure float16: its eps of 1e-8 rounds to 0, and a gradient of 0 gives 0 / 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(2, 1, bias=False).half()
    optimizer = torch.optim.Adam(linear.parameters(), foreach=False)

    def step(x):
        optimizer.zero_grad()
        loss = linear(x).float().square().mean()
        loss.backward()
        optimizer.step()  # BAD
        return loss

    return program(step, torch.tensor([[1.0, 0.0]]).half(), model=linear, optimizer=optimizer)


def in_jax():
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adam(1e-3)
    params = {"w": jnp.ones(2, dtype=jnp.float16)}
    state = tx.init(params)

    def step(params, state, x):
        loss, grads = jax.value_and_grad(lambda p: (x @ p["w"]).astype(jnp.float32) ** 2)(params)
        updates, state = tx.update(grads, state, params)  # BAD
        return optax.apply_updates(params, updates), state, loss

    return program(step, params, state, jnp.array([1.0, 0.0], dtype=jnp.float16))


CASE = Case(cause="optimizer_state", operation=("div", "addcdiv"))
