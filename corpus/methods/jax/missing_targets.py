"""Regression on several targets, of which a third is missing: NaN in the table, masked in the loss."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


def table(n=3000, seed=0):
    r = np.random.default_rng(seed)
    x = r.normal(size=(n, 10))
    w = r.normal(size=(10, 4)) / np.sqrt(10)
    y = np.tanh(x @ w) + 0.3 * (x[:, :4] * x[:, 4:8]) + 0.05 * r.normal(size=(n, 4))
    y[r.random(y.shape) < 0.33] = np.nan
    x[r.random(x.shape) < 0.05] = np.nan
    return x.astype(np.float32), y.astype(np.float32)


class Net(eqx.Module):
    body: eqx.nn.MLP

    def __init__(self, key):
        self.body = eqx.nn.MLP(20, 4, 96, 2, activation=jax.nn.silu, key=key)

    def __call__(self, x):
        known = ~jnp.isnan(x)
        return self.body(jnp.concatenate([jnp.where(known, x, 0.0), known.astype(jnp.float32)]))


def masked_mse(net, x, y):
    known = ~jnp.isnan(y)
    error = jnp.where(known, jax.vmap(net)(x) - jnp.where(known, y, 0.0), 0.0)
    return jnp.sum(error**2) / jnp.maximum(known.sum(), 1)


def main(epochs=25, batch=64):
    x, y = table()
    y = (y - np.nanmean(y[:2400], 0)) / np.nanstd(y[:2400], 0)
    net = Net(jax.random.key(0))
    steps = epochs * (2400 // batch)
    tx = optax.adamw(optax.cosine_onecycle_schedule(steps, 5e-3), weight_decay=0.01)
    state = tx.init(eqx.filter(net, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(net, state, x, y):
        loss, grads = eqx.filter_value_and_grad(masked_mse)(net, x, y)
        updates, state = tx.update(grads, state, eqx.filter(net, eqx.is_inexact_array))
        return eqx.apply_updates(net, updates), state, loss

    r = np.random.default_rng(1)
    for epoch in range(epochs):
        order = r.permutation(2400)
        total = 0.0
        for i in range(0, 2400 - batch + 1, batch):
            pick = order[i : i + batch]
            net, state, loss = step(net, state, x[pick], y[pick])
            total += float(loss)
        if epoch % 5 == 0:
            print(f"epoch {epoch:2d} loss {total / (2400 // batch):.4f}")
    pred, true = np.asarray(jax.vmap(net)(x[2400:])), y[2400:]
    r2 = 1 - np.nanvar(pred - true, 0) / np.nanvar(true, 0)
    print("r2", np.round(r2, 3))


if __name__ == "__main__":
    main()
