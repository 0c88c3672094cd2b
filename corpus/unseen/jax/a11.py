import functools
import jax
import jax.numpy as jnp
from jax import lax

EPS = 0.1
ITERS = 40


def cost_matrix(x, y):
    diff = x[:, None, :] - y[None, :, :]
    return jnp.linalg.norm(diff, axis=-1)


def sinkhorn(x, y):
    C = cost_matrix(x, y)
    n, m = C.shape
    loga, logb = -jnp.log(n), -jnp.log(m)

    def body(_, fg):
        f, g = fg
        f = -EPS * jax.nn.logsumexp((g[None, :] - C) / EPS + logb, axis=1)
        g = -EPS * jax.nn.logsumexp((f[:, None] - C) / EPS + loga, axis=0)
        return f, g

    f, g = lax.fori_loop(0, ITERS, body, (jnp.zeros(n), jnp.zeros(m)))
    return f.mean() + g.mean()


def sinkhorn_divergence(x, y):
    return sinkhorn(x, y) - 0.5 * sinkhorn(x, x) - 0.5 * sinkhorn(y, y)


def generator(theta, z):
    h = jnp.tanh(z @ theta["w0"] + theta["b0"])
    return h @ theta["w1"] + theta["b1"]


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(theta, second, z, y, t):
    value, grads = jax.value_and_grad(lambda th: sinkhorn_divergence(generator(th, z), y))(theta)
    second = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, second, grads)
    corr = 1.0 - 0.99 ** t
    theta = jax.tree.map(lambda p, g, s: p - 0.01 * g / (jnp.sqrt(s / corr) + 1e-6), theta, grads, second)
    return theta, second, value


def target_samples(key, n):
    k1, k2 = jax.random.split(key)
    ang = jax.random.uniform(k1, (n,)) * 2 * jnp.pi
    ring = jnp.stack([jnp.cos(ang), jnp.sin(ang)], -1)
    return 2.0 * ring + 0.05 * jax.random.normal(k2, (n, 2))


key = jax.random.PRNGKey(123)
k0, k1, key = jax.random.split(key, 3)
theta = {
    "w0": jax.random.normal(k0, (4, 32)) * 0.5,
    "b0": jnp.zeros(32),
    "w1": jax.random.normal(k1, (32, 2)) * 0.2,
    "b1": jnp.zeros(2),
}
second = jax.tree.map(jnp.zeros_like, theta)
for t in range(1, 61):
    key, kz, ky = jax.random.split(key, 3)
    z = jax.random.normal(kz, (64, 4))
    theta, second, value = train_step(theta, second, z, target_samples(ky, 64), t)
    if t % 5 == 1:
        print("step", t, "sinkhorn divergence", value)
