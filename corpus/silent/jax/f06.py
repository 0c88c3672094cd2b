"""Disease progression regression."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import StandardScaler


class Regressor(eqx.Module):
    layers: list
    norm: eqx.nn.LayerNorm

    def __init__(self, n_in, width, key):
        ks = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Linear(n_in, width, key=ks[0]),
            eqx.nn.Linear(width, width, key=ks[1]),
            eqx.nn.Linear(width, 1, key=ks[2]),
        ]
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, x):
        h = jax.nn.silu(self.layers[0](x))
        h = self.norm(h + jax.nn.silu(self.layers[1](h)))
        return self.layers[2](h)


class Loader:
    def __init__(self, x, y, batch_size, seed):
        self.x, self.y, self.bs = x, y, batch_size
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        order = self.rng.permutation(len(self.x))
        for s in range(0, len(order) - self.bs + 1, self.bs):
            j = order[s:s + self.bs]
            yield self.x[j], self.y[j]


def huber_objective(model, x, y):
    pred = jax.vmap(model)(x)
    return optax.huber_loss(pred - y, delta=2.0).mean()


@eqx.filter_jit
def explained(model, x, y):
    pred = jax.vmap(model)(x).reshape(-1)
    return 1.0 - jnp.sum((pred - y) ** 2) / jnp.sum((y - y.mean()) ** 2), pred.std()


def main():
    data = load_diabetes()
    xs = StandardScaler().fit_transform(data.data).astype(np.float32)
    ys = StandardScaler().fit_transform(data.target[:, None]).astype(np.float32)[:, 0]
    loader = Loader(xs, ys, 48, seed=0)
    model = Regressor(xs.shape[1], 48, jax.random.PRNGKey(1))
    tx = optax.adamw(2e-3, weight_decay=1e-2)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, x, y):
        loss, grads = eqx.filter_value_and_grad(huber_objective)(model, x, y)
        up, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, up), state, loss

    for epoch in range(30):
        losses = []
        for xb, yb in loader:
            model, state, loss = step(model, state, xb, yb)
            losses.append(float(loss))
        if epoch % 5 == 4:
            r2, spread = explained(model, xs, ys)
            print(f"epoch {epoch + 1:2d} loss {np.mean(losses):.4f} r2 {float(r2):.3f} pred std {float(spread):.3f}")


if __name__ == "__main__":
    main()
