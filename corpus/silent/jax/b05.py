"""Tiny GAN on a tilted 2-D Gaussian; generator and critic have an optimizer each."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

MEAN = np.array([2.0, -1.5])
CHOL = np.array([[0.8, 0.0], [0.5, 0.3]])


def mlp_init(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [(jax.random.normal(k, (i, o)) * np.sqrt(2 / i), jnp.zeros(o))
            for k, i, o in zip(keys, sizes[:-1], sizes[1:])]


def mlp(params, x):
    for w, b in params[:-1]:
        x = jax.nn.leaky_relu(x @ w + b, 0.2)
    w, b = params[-1]
    return x @ w + b


def d_loss(d, g, real, z):
    fake = mlp(g, z)
    return jax.nn.softplus(-mlp(d, real)).mean() + jax.nn.softplus(mlp(d, fake)).mean()


def g_loss(g, d, z):
    return jax.nn.softplus(-mlp(d, mlp(g, z))).mean()


opt_g = optax.adam(3e-3, b1=0.5)
opt_d = optax.adam(6e-3, b1=0.5)


@jax.jit
def play(g, d, sg, sd, real, key):
    kd, kg = jax.random.split(key)
    ld, gd = jax.value_and_grad(d_loss)(d, g, real, jax.random.normal(kd, (len(real), 4)))
    ud, sd = opt_d.update(gd, sd)
    d = optax.apply_updates(d, ud)
    lg, gg = jax.value_and_grad(g_loss)(g, d, jax.random.normal(kg, (len(real), 4)))
    ug, sg = opt_g.update(gg, sg)
    return optax.apply_updates(g, ug), d, sg, sd, ld, lg


def moments_gap(samples):
    gap = np.abs(samples.mean(0) - MEAN).sum() + np.abs(np.cov(samples.T) - CHOL @ CHOL.T).sum()
    return float(gap)


def main():
    rng = np.random.default_rng(0)
    key = jax.random.key(0)
    kg, kd, ke, key = jax.random.split(key, 4)
    g, d = mlp_init(kg, (4, 32, 32, 2)), mlp_init(kd, (2, 32, 32, 1))
    sg, sd = opt_g.init(g), opt_d.init(d)
    z_eval = jax.random.normal(ke, (2000, 4))
    print("gap before", round(moments_gap(np.asarray(mlp(g, z_eval))), 3))
    for i in range(300):
        real = jnp.asarray(rng.normal(size=(256, 2)) @ CHOL.T + MEAN, jnp.float32)
        key, sub = jax.random.split(key)
        g, d, sg, sd, ld, lg = play(g, d, sg, sd, real, sub)
        if i % 30 == 0:
            print(f"{i:4d} D {ld:.3f} G {lg:.3f} gap {moments_gap(np.asarray(mlp(g, z_eval))):.3f}")
    print("gap after", round(moments_gap(np.asarray(mlp(g, z_eval))), 3))


main()
