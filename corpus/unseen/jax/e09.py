# RBF network for house prices; widths start at the median distance between the centres
import numpy as np
import jax
import jax.numpy as jnp
import equinox as eqx
import optax


def fake_houses(n=600, seed=0):
    """rooms, age, distance to coast (km), latitude, population of the block"""
    r = np.random.default_rng(seed)
    rooms = r.normal(5.4, 1.1, n)
    age = r.uniform(1, 52, n)
    coast = r.gamma(2.0, 12.0, n)
    lat = r.uniform(32.5, 41.9, n)
    pop = r.lognormal(4.6, 0.5, n)
    price = 0.4 * rooms - 0.01 * age + 2.0 * np.exp(-coast / 20) - 0.002 * pop + 0.2 * r.normal(size=n)
    return np.stack([rooms, age, coast, lat, pop], 1).astype(np.float32), price.astype(np.float32)


def inv_softplus(x):
    return jnp.log(jnp.exp(x) - 1.0)


def pick_centres(x, k, rng):
    """k-means++ style seeding"""
    chosen = [int(rng.integers(len(x)))]
    for _ in range(k - 1):
        d2 = np.min(((x[:, None] - x[chosen][None]) ** 2).sum(-1), axis=1)
        chosen.append(int(rng.choice(len(x), p=d2 / d2.sum())))
    return x[chosen]


class RBFNet(eqx.Module):
    centres: jax.Array
    raw_width: jax.Array
    weight: jax.Array
    linear: eqx.nn.Linear
    offset: jax.Array

    def __init__(self, x, y, k, key, rng):
        c = pick_centres(x, k, rng)
        dist = np.sqrt(((c[:, None] - c[None]) ** 2).sum(-1))
        width = np.array([np.median(np.delete(row, i)) for i, row in enumerate(dist)])
        print("initial widths", width.round(1)[:8], "...")
        self.centres = jnp.asarray(c)
        self.raw_width = inv_softplus(jnp.asarray(width, dtype=jnp.float32))
        a, b = jax.random.split(key)
        self.weight = 0.1 * jax.random.normal(a, (k,))
        self.linear = eqx.nn.Linear(x.shape[1], 1, use_bias=False, key=b)
        self.offset = jnp.asarray(y.mean())

    def __call__(self, x):
        width = jax.nn.softplus(self.raw_width)
        d2 = jnp.sum((x - self.centres) ** 2, axis=-1)
        phi = jnp.exp(-0.5 * d2 / width ** 2)
        return phi @ self.weight + 1e-3 * self.linear(x)[0] + self.offset


@eqx.filter_value_and_grad
def mse(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fit(model, x, y, epochs=6, bs=60, lr=2e-2, wd=1e-4):
    params, static = eqx.partition(model, eqx.is_inexact_array)
    momentum = jax.tree.map(jnp.zeros_like, params)

    @eqx.filter_jit
    def sgd(params, momentum, xb, yb):
        loss, g = mse(eqx.combine(params, static), xb, yb)
        momentum = jax.tree.map(lambda m, gi, p: 0.8 * m + gi + wd * p, momentum, g, params)
        params = jax.tree.map(lambda p, m: p - lr * m, params, momentum)
        return params, momentum, loss

    rng = np.random.default_rng(1)
    for ep in range(epochs):
        perm, total = rng.permutation(len(y)), 0.0
        for i in range(0, len(y), bs):
            j = perm[i:i + bs]
            params, momentum, loss = sgd(params, momentum, x[j], y[j])
            total += float(loss)
        print(f"epoch {ep} train mse {total / (len(y) // bs):.4f}")
        if not np.isfinite(total):
            raise RuntimeError("training diverged")
    return eqx.combine(params, static)


x, y = fake_houses()
net = RBFNet(x, y, 16, jax.random.PRNGKey(0), np.random.default_rng(3))
net = fit(net, x, y)
print("final r2", 1 - float(jnp.mean((jax.vmap(net)(x) - y) ** 2)) / y.var())
