"""BYOL on digits: an online network predicts the projections of a slowly moving target."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for width in (16, 32):
            x = nn.Conv(width, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2)) if width == 16 else x
        return nn.Dense(64)(x.reshape(len(x), -1))


class Projector(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, h, train):
        h = nn.Dense(self.hidden)(h)
        h = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(h))
        return nn.Dense(32)(h)


class Online(nn.Module):
    def setup(self):
        self.encoder, self.projector, self.predictor = Encoder(), Projector(128), Projector(64)

    def __call__(self, x, train=True):
        z = self.projector(self.encoder(x, train), train)
        return z, self.predictor(z, train)

    def features(self, x):
        return self.encoder(x, False)


def augment(key, x):
    a, b, c, d = jax.random.split(key, 4)
    x = jnp.roll(x, jax.random.randint(a, (2,), -1, 2), (1, 2))
    x = x * (jax.random.uniform(b, (len(x), 8, 8, 1)) > 0.15)
    x = x * (0.8 + 0.4 * jax.random.uniform(c, (len(x), 1, 1, 1)))
    return x + 0.05 * jax.random.normal(d, x.shape)


def regression(p, z):
    return 2 - 2 * optax.cosine_similarity(p, jax.lax.stop_gradient(z), epsilon=1e-6).mean()


def main(steps=200, tau=0.98):
    d = load_digits()
    x, y = jnp.asarray(d.images, jnp.float32)[..., None] / 16, d.target
    model, key = Online(), jax.random.key(0)
    variables = model.init(key, x[:8])
    params, stats = variables["params"], variables["batch_stats"]
    target = params
    tx = optax.adam(2e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, stats, target, state, key, x):
        ka, kb = jax.random.split(key)
        views = augment(ka, x), augment(kb, x)

        def forward(params, x, stats):
            out, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
            return out, new["batch_stats"]

        def loss_fn(params):
            ((_, pa), new), ((_, pb), _) = (forward(params, v, stats) for v in views)
            ((za, _), _), ((zb, _), _) = (forward(target, v, stats) for v in views)
            return regression(pa, zb) + regression(pb, za), new

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(params, updates)
        return params, stats, optax.incremental_update(params, target, 1 - tau), state, loss

    for i in range(steps):
        key, ka, kb = jax.random.split(key, 3)
        pick = jax.random.randint(ka, (128,), 0, 1200)
        params, stats, target, state, loss = step(params, stats, target, state, kb, x[pick])
        if i % 50 == 0:
            print(f"{i:4d} loss {float(loss):.4f}")
    h = np.asarray(model.apply({"params": params, "batch_stats": stats}, x, method="features"))
    probe = LogisticRegression(max_iter=500).fit(h[:1200], y[:1200])
    print(f"linear probe {probe.score(h[1200:], y[1200:]):.3f}")


if __name__ == "__main__":
    main()
