import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn


class Regressor(nn.Module):
    widths: tuple = (64, 64)

    @nn.compact
    def __call__(self, x):
        for w in self.widths:
            x = nn.swish(nn.Dense(w)(x))
        return nn.Dense(1)(x)


def friedman(n, seed):
    r = np.random.default_rng(seed)
    x = r.random((n, 6), dtype=np.float32)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, y.astype(np.float32)


def mse(params, model, x, y):
    pred = model.apply(params, x)
    return jnp.mean(jnp.square(pred - y))


def r2(pred, y):
    pred = np.asarray(pred).ravel()
    return 1.0 - ((pred - y) ** 2).mean() / y.var()


def train(model, x, y, *, lr, epochs, batch_size, seed=0):
    key = jax.random.PRNGKey(seed)
    params = model.init(key, x[:1])
    tx = optax.adam(lr)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, xb, yb):
        loss, grads = jax.value_and_grad(mse)(params, model, xb, yb)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    for epoch in range(epochs):
        key, sub = jax.random.split(key)
        order = np.asarray(jax.random.permutation(sub, len(x)))
        total = 0.0
        for lo in range(0, len(x), batch_size):
            sel = order[lo:lo + batch_size]
            params, opt_state, loss = step(params, opt_state, x[sel], y[sel])
            total += float(loss) * len(sel)
        if epoch % 3 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch:2d}  mse {total / len(x):.4f}")
    return params


x, y = friedman(1024, 0)
xv, yv = friedman(512, 1)
mu, sd = y.mean(), y.std()
model = Regressor()
params = train(model, x, (y - mu) / sd, lr=3e-3, epochs=18, batch_size=64)
print(f"validation R2 {r2(model.apply(params, xv), (yv - mu) / sd):.3f}")
