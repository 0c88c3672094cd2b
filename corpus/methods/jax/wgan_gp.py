"""A Wasserstein GAN with a gradient penalty, on eight Gaussians in a ring."""
import equinox as eqx
import jax
import jax.numpy as jnp
import optax


def ring(key, n):
    a, b = jax.random.split(key)
    angle = jax.random.randint(a, (n,), 0, 8) * (2 * jnp.pi / 8)
    return 2 * jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1) + 0.1 * jax.random.normal(b, (n, 2))


def mlp(inputs, outputs, key):
    return eqx.nn.MLP(inputs, outputs, 96, 2, activation=lambda x: jax.nn.leaky_relu(x, 0.2), key=key)


def make(generator, key, n):
    return jax.vmap(generator)(jax.random.normal(key, (n, 8)))


def critic_loss(critic, real, fake, key):
    a = jax.random.uniform(key, (len(real), 1))
    slopes = jax.vmap(jax.grad(lambda x: critic(x)[0]))(a * real + (1 - a) * fake)
    penalty = jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)
    return jax.vmap(critic)(fake).mean() - jax.vmap(critic)(real).mean() + 2.0 * penalty


def generator_loss(generator, critic, key, n):
    return -jax.vmap(critic)(make(generator, key, n)).mean()


def energy_distance(x, y):
    def mean_distance(a, b):
        return jnp.sqrt(((a[:, None] - b[None]) ** 2).sum(-1)).mean()

    return float(2 * mean_distance(x, y) - mean_distance(x, x) - mean_distance(y, y))


def main(steps=500, critics=4, batch=128):
    a, b, c, key = jax.random.split(jax.random.key(0), 4)
    generator, critic = mlp(8, 2, a), mlp(2, 1, b)
    tx_g, tx_c = optax.adam(1e-3, b1=0.0, b2=0.9), optax.adam(1e-3, b1=0.0, b2=0.9)
    state_g, state_c = (tx.init(eqx.filter(m, eqx.is_array)) for tx, m in ((tx_g, generator), (tx_c, critic)))
    before = energy_distance(make(generator, c, 1000), ring(c, 1000))

    @eqx.filter_jit
    def step_critic(critic, state, generator, key):
        k1, k2, k3 = jax.random.split(key, 3)
        fake = make(generator, k1, batch)
        loss, grads = eqx.filter_value_and_grad(critic_loss)(critic, ring(k2, batch), fake, k3)
        updates, state = tx_c.update(grads, state)
        return eqx.apply_updates(critic, updates), state, loss

    @eqx.filter_jit
    def step_generator(generator, state, critic, key):
        loss, grads = eqx.filter_value_and_grad(generator_loss)(generator, critic, key, batch)
        updates, state = tx_g.update(grads, state)
        return eqx.apply_updates(generator, updates), state, loss

    for i in range(steps):
        for _ in range(critics):
            key, sub = jax.random.split(key)
            critic, state_c, loss_c = step_critic(critic, state_c, generator, sub)
        key, sub = jax.random.split(key)
        generator, state_g, loss_g = step_generator(generator, state_g, critic, sub)
        if i % 50 == 0:
            print(f"{i:4d} critic {float(loss_c):+.4f} generator {float(loss_g):+.4f}")
    after = energy_distance(make(generator, c, 1000), ring(key, 1000))
    print(f"energy distance {before:.4f} at first, {after:.4f} at the end")


if __name__ == "__main__":
    main()
