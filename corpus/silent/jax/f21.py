"""Two-tower rating model."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

USERS, ITEMS, RANK = 200, 150, 4


class TwoTower(nn.Module):
    dim: int = 16

    @nn.compact
    def __call__(self, u, i):
        pu = nn.Embed(USERS, self.dim, name="user", embedding_init=nn.initializers.normal(0.3))(u)
        qi = nn.Embed(ITEMS, self.dim, name="item", embedding_init=nn.initializers.normal(0.3))(i)
        h = jnp.concatenate([pu * qi, pu, qi], -1)
        h = nn.relu(nn.Dense(32, name="mix")(h))
        return nn.Dense(1, name="out")(h)[:, 0]


def ratings(seed=0, n=12000):
    r = np.random.default_rng(seed)
    a, b = r.normal(size=(USERS, RANK)), r.normal(size=(ITEMS, RANK))
    u, i = r.integers(0, USERS, n), r.integers(0, ITEMS, n)
    y = (a[u] * b[i]).sum(-1) / np.sqrt(RANK) + 0.4 * r.normal(size=USERS)[u]
    y = y + 0.1 * r.normal(size=n)
    return u, i, ((y - y.mean()) / y.std()).astype(np.float32)


def is_embedding(path, _):
    return path[1].key in ("user", "item")


def build_tx(params):
    tables = jax.tree_util.tree_map_with_path(is_embedding, params)
    dense = jax.tree.map(lambda m: not m, tables)
    return optax.chain(
        optax.masked(optax.add_decayed_weights(1e-4), dense),
        optax.masked(optax.adam(5e-3), dense),
    )


class Trainer:
    def __init__(self, model, batch=512):
        self.model, self.batch = model, batch
        self.params = model.init(jax.random.PRNGKey(0), jnp.zeros(1, int), jnp.zeros(1, int))
        self.tx = build_tx(self.params)
        self.state = self.tx.init(self.params)
        self._step = jax.jit(self._make_step())

    def _make_step(self):
        def step(params, state, u, i, y):
            f = lambda p: jnp.mean((self.model.apply(p, u, i) - y) ** 2)
            loss, grads = jax.value_and_grad(f)(params)
            updates, state = self.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss
        return step

    def fit(self, data, steps, seed=1):
        u, i, y = data
        r = np.random.default_rng(seed)
        for t in range(steps):
            j = r.integers(0, len(y), self.batch)
            self.params, self.state, loss = self._step(self.params, self.state, u[j], i[j], y[j])
            if t % 50 == 0 or t == steps - 1:
                print(f"{t:4d} mse {float(loss):.4f}")


if __name__ == "__main__":
    Trainer(TwoTower()).fit(ratings(), 400)
