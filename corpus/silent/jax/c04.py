"""Toy GAN: generator learns a 2-D correlated Gaussian."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

BATCH = 128
TARGET_MEAN = jnp.array([1.5, -1.0])
TARGET_CHOL = jnp.array([[0.8, 0.0], [0.4, 0.5]])


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z):
        z = nn.leaky_relu(nn.Dense(32)(z), 0.2)
        z = nn.leaky_relu(nn.Dense(32)(z), 0.2)
        return nn.Dense(2)(z)


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.leaky_relu(nn.Dense(32)(x), 0.2)
        x = nn.leaky_relu(nn.Dense(32)(x), 0.2)
        return nn.Dense(1)(x)[:, 0]


def real_batch(key):
    return TARGET_MEAN + jax.random.normal(key, (BATCH, 2)) @ TARGET_CHOL.T


bce = optax.sigmoid_binary_cross_entropy


@jax.jit
def train_step(gs, ds, key):
    kr, kz1, kz2 = jax.random.split(key, 3)
    real = real_batch(kr)

    def d_loss(dp):
        fake = gs.apply_fn({"params": gs.params}, jax.random.normal(kz1, (BATCH, 4)))
        lr = ds.apply_fn({"params": dp}, real)
        lf = ds.apply_fn({"params": dp}, fake)
        return bce(lr, jnp.ones(BATCH)).mean() + bce(lf, jnp.zeros(BATCH)).mean()

    def d_loss_r1(dp):
        score = lambda x: ds.apply_fn({"params": dp}, x[None])[0]
        r1 = jnp.mean(jnp.sum(jax.vmap(jax.grad(score))(real) ** 2, -1))
        return d_loss(dp) + 0.5 * r1

    ld, gd = jax.value_and_grad(d_loss_r1)(ds.params)
    ds = ds.apply_gradients(grads=gd)

    def g_loss(gp):
        fake = gs.apply_fn({"params": gp}, jax.random.normal(kz2, (BATCH, 4)))
        return bce(ds.apply_fn({"params": ds.params}, fake), jnp.ones(BATCH)).mean()

    lg, gg = jax.value_and_grad(g_loss)(gs.params)
    gs = gs.apply_gradients(grads=gg)
    return gs, ds, ld, lg


def main():
    key = jax.random.PRNGKey(3)
    kg, kd, key = jax.random.split(key, 3)
    G, D = Generator(), Discriminator()
    gs = TrainState.create(apply_fn=G.apply, params=G.init(kg, jnp.ones((1, 4)))["params"],
                           tx=optax.adam(2e-3, b1=0.5))
    ds = TrainState.create(apply_fn=D.apply, params=D.init(kd, jnp.ones((1, 2)))["params"],
                           tx=optax.adam(2e-3, b1=0.5))
    for i in range(300):
        key, sub = jax.random.split(key)
        gs, ds, ld, lg = train_step(gs, ds, sub)
        if i % 50 == 0 or i == 299:
            s = G.apply({"params": gs.params}, jax.random.normal(jax.random.PRNGKey(9), (1000, 4)))
            print(f"it {i:4d} D {ld:.3f} G {lg:.3f} mean {s.mean(0)} std {s.std(0)}")
    dist = jnp.linalg.norm(s.mean(0) - TARGET_MEAN)
    print("distance of means", float(dist))


main()
