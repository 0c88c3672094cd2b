import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


def two_moons(rng, n):
    t = np.pi * rng.random(n)
    up = rng.random(n) < 0.5
    x = np.where(up, np.cos(t), 1 - np.cos(t))
    y = np.where(up, np.sin(t), 0.5 - np.sin(t))
    pts = np.stack([x - 0.5, y - 0.25], -1) + 0.05 * rng.normal(size=(n, 2))
    return (1.5 * pts).astype(np.float32)


def net(i, o, key):
    return eqx.nn.MLP(i, o, 96, 3, activation=lambda v: jax.nn.leaky_relu(v, 0.1), key=key)


def critic_loss(critic, gen, real, z, key):
    fake = jax.lax.stop_gradient(jax.vmap(gen)(z))
    eps = jax.random.uniform(key, (len(real), 1))
    mix = eps * real + (1 - eps) * fake
    f = lambda v: critic(v)[0]
    slope = jnp.sqrt(jnp.sum(jax.vmap(jax.grad(f))(mix) ** 2, -1) + 1e-12)
    gap = jax.vmap(f)(fake).mean() - jax.vmap(f)(real).mean()
    return gap + 2.0 * jnp.mean((slope - 1) ** 2), gap


def gen_loss(gen, critic, z):
    return -jax.vmap(critic)(jax.vmap(gen)(z)).mean()


def energy_distance(a, b):
    d = lambda u, v: np.linalg.norm(u[:, None] - v[None], axis=-1).mean()
    return 2 * d(a, b) - d(a, a) - d(b, b)


def main(rounds=350, n_critic=4, batch=128, zdim=4):
    rng = np.random.default_rng(0)
    kg, kc, key = jax.random.split(jax.random.PRNGKey(0), 3)
    gen, critic = net(zdim, 2, kg), net(2, 1, kc)
    tg, tc = optax.adam(5e-4, b1=0.0, b2=0.9), optax.adam(1e-3, b1=0.0, b2=0.9)
    sg = tg.init(eqx.filter(gen, eqx.is_inexact_array))
    sc = tc.init(eqx.filter(critic, eqx.is_inexact_array))

    @eqx.filter_jit
    def train_critic(critic, sc, gen, real, z, key):
        (_, gap), g = eqx.filter_value_and_grad(critic_loss, has_aux=True)(critic, gen, real, z, key)
        up, sc = tc.update(g, sc)
        return eqx.apply_updates(critic, up), sc, gap

    @eqx.filter_jit
    def train_gen(gen, sg, critic, z):
        loss, g = eqx.filter_value_and_grad(gen_loss)(gen, critic, z)
        up, sg = tg.update(g, sg)
        return eqx.apply_updates(gen, up), sg, loss

    noise = lambda: rng.normal(size=(batch, zdim)).astype(np.float32)
    for r in range(rounds):
        for _ in range(n_critic):
            key, sub = jax.random.split(key)
            critic, sc, gap = train_critic(critic, sc, gen, two_moons(rng, batch), noise(), sub)
        gen, sg, gl = train_gen(gen, sg, critic, noise())
        if r % 50 == 0 or r == rounds - 1:
            fake = np.asarray(jax.vmap(gen)(rng.normal(size=(512, zdim)).astype(np.float32)))
            print(f"{r:3d} gap {float(gap):+.3f} g {float(gl):+.3f} energy {energy_distance(fake, two_moons(rng, 512)):.4f}")


if __name__ == "__main__":
    main()
