import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import make_friedman1
from sklearn.preprocessing import StandardScaler


class Regressor(eqx.Module):
    layers: list
    out: eqx.nn.Linear

    def __init__(self, n_in, widths, key):
        keys = jax.random.split(key, len(widths) + 1)
        self.layers = []
        for k, w in zip(keys, widths):
            self.layers.append(eqx.nn.Linear(n_in, w, key=k))
            n_in = w
        self.out = eqx.nn.Linear(n_in, 1, key=keys[-1])

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.silu(layer(x))
        return self.out(x)


class Loader:
    def __init__(self, *arrays, batch_size, seed=0):
        self.arrays = arrays
        self.batch_size = batch_size
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        order = self.rng.permutation(len(self.arrays[0]))
        for i in range(0, len(order) - self.batch_size + 1, self.batch_size):
            sel = order[i:i + self.batch_size]
            yield tuple(a[sel] for a in self.arrays)


def mse(model, x, y):
    pred = jax.vmap(model)(x)
    return jnp.mean(jnp.square(pred - y))


def fit(model, loader, epochs, lr):
    optim = optax.adamw(lr, weight_decay=1e-4)
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt_state, x, y):
        loss, grads = eqx.filter_value_and_grad(mse)(model, x, y)
        updates, opt_state = optim.update(
            grads, opt_state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), opt_state, loss

    for epoch in range(epochs):
        losses = []
        for x, y in loader:
            model, opt_state, loss = step(model, opt_state, x, y)
            losses.append(float(loss))
        if epoch % 3 == 0:
            print(f"epoch {epoch:2d}: train loss {np.mean(losses):.4f}")
    return model


def main():
    x, y = make_friedman1(n_samples=1500, n_features=10, noise=0.3, random_state=0)
    x = StandardScaler().fit_transform(x).astype(np.float32)
    y = ((y - y.mean()) / y.std()).astype(np.float32)
    x_tr, y_tr, x_te, y_te = x[:1200], y[:1200], x[1200:], y[1200:]

    model = Regressor(10, [64, 64], jax.random.PRNGKey(4))
    model = fit(model, Loader(x_tr, y_tr, batch_size=64), epochs=20, lr=3e-3)

    pred = np.asarray(jax.vmap(model)(jnp.asarray(x_te))).ravel()
    r2 = 1 - np.sum((pred - y_te) ** 2) / np.sum((y_te - y_te.mean()) ** 2)
    print(f"test R2 {r2:.3f}  prediction std {pred.std():.3f}")


if __name__ == "__main__":
    main()
