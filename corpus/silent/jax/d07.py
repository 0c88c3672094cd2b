import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


def random_geometric_graph(rng, n=400, radius=0.12, feat=12):
    pos = rng.random((n, 2))
    dist = np.linalg.norm(pos[:, None] - pos[None, :], axis=-1)
    adj = (dist < radius).astype(np.float32)
    x = rng.standard_normal((n, feat)).astype(np.float32)
    return adj, x


def diffuse_targets(rng, a, x):
    h = np.tanh(2.0 * a @ x @ rng.standard_normal((x.shape[1], 6)))
    y = a @ h @ rng.standard_normal(6)
    y = y + 0.05 * y.std() * rng.standard_normal(len(y))
    return ((y - y.mean()) / y.std()).astype(np.float32)


def normalize(adj):
    d = 1.0 / np.sqrt(adj.sum(1))
    return adj * d[:, None] * d[None, :]


class GCN(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, a, x):
        x = nn.relu(a @ nn.Dense(self.hidden)(x))
        x = nn.relu(a @ nn.Dense(self.hidden)(x) + nn.Dense(self.hidden)(x))
        return nn.Dense(1)(x)[:, 0]


def make_optimizer(lr, weight_decay):
    return optax.chain(
        optax.adam(lr),
        optax.add_decayed_weights(weight_decay),
    )


def main(steps=300, lr=3e-3, weight_decay=1e-2):
    rng = np.random.default_rng(21)
    adj, x = random_geometric_graph(rng)
    a = normalize(adj)
    y = diffuse_targets(rng, a, x)
    train = rng.random(len(y)) < 0.7
    model = GCN(hidden=48)
    params = model.init(jax.random.PRNGKey(0), a, x)
    tx = make_optimizer(lr, weight_decay)
    state = tx.init(params)

    def loss_fn(params):
        err = (model.apply(params, a, x) - y) ** 2
        return jnp.sum(err * train) / train.sum(), jnp.sum(err * ~train) / (~train).sum()

    @jax.jit
    def step(params, state):
        (loss, val), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, val

    for i in range(steps):
        params, state, loss, val = step(params, state)
        if i % 25 == 0 or i == steps - 1:
            print(f"epoch {i:3d} | loss {float(loss):.4f} | val mse {float(val):.4f}")


if __name__ == "__main__":
    main()
