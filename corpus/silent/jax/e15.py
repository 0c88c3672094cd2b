import jax
import jax.numpy as jnp
import numpy as np
import optax

N_USERS, N_ITEMS, RANK, DIM = 400, 300, 4, 16


def build_ratings(seed=0):
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((N_USERS, RANK))
    v = rng.standard_normal((N_ITEMS, RANK))
    scores = u @ v.T / np.sqrt(RANK) + 0.3 * rng.standard_normal((N_USERS, 1))
    pairs = np.argwhere(rng.random(scores.shape) < 0.4)
    values = scores[pairs[:, 0], pairs[:, 1]].astype(np.float32)
    order = rng.permutation(len(pairs))
    return pairs[order], values[order]


def init_params(key):
    ku, ki = jax.random.split(key)
    return {
        "user": 0.3 * jax.random.normal(ku, (N_USERS, DIM)),
        "item": 0.3 * jax.random.normal(ki, (N_ITEMS, DIM)),
        "user_bias": jnp.zeros(N_USERS),
        "item_bias": jnp.zeros(N_ITEMS),
    }


def predict(p, pairs):
    u, i = pairs[:, 0], pairs[:, 1]
    return jnp.sum(p["user"][u] * p["item"][i], axis=-1) + p["user_bias"][u] + p["item_bias"][i]


def mse(p, pairs, values):
    return jnp.mean((predict(p, pairs) - values) ** 2)


class Loader:
    def __init__(self, pairs, values, batch_size, seed):
        self.pairs, self.values, self.batch_size = pairs, values, batch_size
        self.rng = np.random.default_rng(seed)

    def __iter__(self):
        order = self.rng.permutation(len(self.pairs))
        for s in range(0, len(order) - self.batch_size + 1, self.batch_size):
            i = order[s:s + self.batch_size]
            yield self.pairs[i], self.values[i]


def main():
    pairs, values = build_ratings()
    n = int(0.9 * len(pairs))
    loader = Loader(pairs[:n], values[:n], batch_size=4096, seed=1)
    params = init_params(jax.random.PRNGKey(0))
    tx = optax.adamw(1e-2, 0.9, 0.999, 0.01)
    state = tx.init(params)

    @jax.jit
    def step(params, state, pb, vb):
        loss, g = jax.value_and_grad(mse)(params, pb, vb)
        upd, state = tx.update(g, state, params)
        return optax.apply_updates(params, upd), state, loss

    it = 0
    for epoch in range(30):
        for pb, vb in loader:
            params, state, loss = step(params, state, pb, vb)
            it += 1
        if epoch % 5 == 0 or epoch == 29:
            print(f"epoch {epoch} step {it} loss {float(loss):.4f} valid {float(mse(params, pairs[n:], values[n:])):.4f}")


if __name__ == "__main__":
    main()
