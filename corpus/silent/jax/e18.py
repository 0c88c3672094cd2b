import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax


def real_samples(key, n):
    k1, k2 = jr.split(key)
    side = jnp.where(jr.bernoulli(k1, 0.5, (n, 1)), 1.0, -1.0)
    return jnp.concatenate([1.5 * side, -0.8 * side], 1) + 0.35 * jr.normal(k2, (n, 2))


class Nets(eqx.Module):
    gen: eqx.nn.MLP
    disc: eqx.nn.MLP

    def __init__(self, key):
        kg, kd = jr.split(key)
        self.gen = eqx.nn.MLP(4, 2, 48, 2, key=kg)
        self.disc = eqx.nn.MLP(2, "scalar", 48, 2, activation=lambda v: jax.nn.leaky_relu(v, 0.2), key=kd)


def disc_loss(disc, fake, real):
    f, r = jax.vmap(disc)(fake), jax.vmap(disc)(real)
    penalty = jnp.mean(jax.vmap(lambda z: jnp.sum(jax.grad(disc)(z) ** 2))(real))
    return jnp.mean(jax.nn.softplus(f)) + jnp.mean(jax.nn.softplus(-r)) + 0.05 * penalty


def gen_loss(gen, disc, noise):
    return jnp.mean(jax.nn.softplus(-jax.vmap(disc)(jax.vmap(gen)(noise))))


g_tx = optax.adam(1e-3, b1=0.5)
d_tx = optax.adam(2e-3, b1=0.5)


@eqx.filter_jit
def step(gen, disc, g_state, d_state, key, n=128):
    k1, k2, k3 = jr.split(key, 3)
    fake = jax.lax.stop_gradient(jax.vmap(gen)(jr.normal(k1, (n, 4))))
    dl, dg = eqx.filter_value_and_grad(disc_loss)(disc, fake, real_samples(k2, n))
    upd, d_state = d_tx.update(dg, d_state)
    disc = eqx.apply_updates(disc, upd)
    gl, gg = eqx.filter_value_and_grad(gen_loss)(gen, disc, jr.normal(k3, (n, 4)))
    upd, g_state = g_tx.update(gg, g_state)
    gen = eqx.apply_updates(gen, upd)
    return gen, disc, g_state, d_state, gl, dl


def main():
    key = jr.PRNGKey(0)
    key, sub = jr.split(key)
    nets = Nets(sub)
    gen, disc = nets.gen, nets.disc
    g_state = g_tx.init(eqx.filter(gen, eqx.is_array))
    d_state = d_tx.init(eqx.filter(disc, eqx.is_array))
    for i in range(400):
        key, sub = jr.split(key)
        gen, disc, g_state, d_state, gl, dl = step(gen, disc, g_state, d_state, sub)
        if i % 50 == 0 or i == 399:
            print(f"{i:3d} gen {float(gl):.3f} disc {float(dl):.3f}")
    k1, k2 = jr.split(key)
    fake = np.asarray(jax.vmap(gen)(jr.normal(k1, (2000, 4))))
    real = np.asarray(real_samples(k2, 2000))
    print("real mean", real.mean(0).round(2), "std", real.std(0).round(2), "share right", (real[:, 0] > 0).mean())
    print("fake mean", fake.mean(0).round(2), "std", fake.std(0).round(2), "share right", (fake[:, 0] > 0).mean())


if __name__ == "__main__":
    main()
