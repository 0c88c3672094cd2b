import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        h = nn.leaky_relu(nn.Dense(64)(z), 0.2)
        h = nn.leaky_relu(nn.Dense(64)(h), 0.2)
        return nn.Dense(2)(h)


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.leaky_relu(nn.Dense(64)(x), 0.2)
        h = nn.leaky_relu(nn.Dense(64)(h), 0.2)
        return nn.Dense(1)(h)[:, 0]


def ring(rng, n):
    k = rng.integers(0, 8, n) * (2 * np.pi / 8)
    pts = 2.0 * np.stack([np.cos(k), np.sin(k)], -1) + 0.1 * rng.normal(size=(n, 2))
    return pts.astype(np.float32)


def create(module, key, sample, lr):
    return TrainState.create(apply_fn=module.apply, params=module.init(key, sample),
                             tx=optax.adam(lr, b1=0.5))


def score_fakes(disc_apply, d_params, gen_apply, g_params, z):
    fake = jax.lax.stop_gradient(gen_apply(g_params, z))
    return disc_apply(d_params, fake)


@jax.jit
def d_step(g, d, real, z):
    def f(p):
        r = d.apply_fn(p, real)
        s = score_fakes(d.apply_fn, p, g.apply_fn, g.params, z)
        return nn.softplus(-r).mean() + nn.softplus(s).mean()
    loss, grads = jax.value_and_grad(f)(d.params)
    return d.apply_gradients(grads=grads), loss


@jax.jit
def g_step(g, d, z):
    def f(p):
        s = score_fakes(d.apply_fn, d.params, g.apply_fn, p, z)
        return nn.softplus(-s).mean()
    loss, grads = jax.value_and_grad(f)(g.params)
    return g.apply_gradients(grads=grads), loss


def main(steps=400, batch=128, zdim=8):
    rng = np.random.default_rng(0)
    kg, kd = jax.random.split(jax.random.PRNGKey(0))
    g = create(Generator(), kg, jnp.zeros((1, zdim)), 2e-3)
    d = create(Critic(), kd, jnp.zeros((1, 2)), 1e-3)
    for i in range(steps):
        z = rng.normal(size=(2, batch, zdim)).astype(np.float32)
        d, dl = d_step(g, d, ring(rng, batch), z[0])
        g, gl = g_step(g, d, z[1])
        if i % 50 == 0 or i == steps - 1:
            radius = jnp.linalg.norm(g.apply_fn(g.params, z[1]), axis=-1)
            print(f"{i:3d} d {float(dl):.3f} g {float(gl):.3f} radius {float(radius.mean()):.2f} +- {float(radius.std()):.2f}")


if __name__ == "__main__":
    main()
