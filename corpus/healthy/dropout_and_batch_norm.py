"""Dropout and batch norm in training mode: random numbers, and statistics that the step changes."""

from corpus.case import program


def in_torch():
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(),
        torch.nn.Linear(8, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return program(step, torch.randn(6, 4), model=model, optimizer=optimizer)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x, key):
        hidden = x @ w
        hidden = (hidden - hidden.mean(0)) * jax.lax.rsqrt(hidden.var(0) + 1e-5)
        keep = jax.random.bernoulli(key, 0.5, hidden.shape)
        return (jnp.where(keep, 2.0 * jax.nn.relu(hidden), 0.0) ** 2).mean()

    x = jnp.sin(jnp.arange(24.0)).reshape(6, 4)
    return program(loss, jnp.cos(jnp.arange(32.0)).reshape(4, 8), x, jax.random.key(0))
