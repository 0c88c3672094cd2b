import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


def real_data(rng, n):
    t = rng.uniform(0, 2 * np.pi, n)
    pts = np.stack([2.0 * np.cos(t) + 1.0, np.sin(t) - 0.5], axis=1)
    return (pts + 0.1 * rng.standard_normal((n, 2))).astype(np.float32)


def mlp(n_in, n_out, key, act):
    return eqx.nn.MLP(n_in, n_out, width_size=64, depth=2, activation=act, key=key)


def d_loss_fn(disc, gen, real, z):
    fake = jax.lax.stop_gradient(jax.vmap(gen)(z))
    on_real = jax.vmap(disc)(real)
    on_fake = jax.vmap(disc)(fake)
    slope = jax.vmap(jax.grad(lambda p: disc(p).sum()))(real)
    penalty = jnp.mean(jnp.sum(slope ** 2, axis=-1))
    return jnp.mean(jax.nn.softplus(-on_real) + jax.nn.softplus(on_fake)) + 0.25 * penalty


def g_loss_fn(gen, disc, z):
    return jnp.mean(jax.nn.softplus(-jax.vmap(disc)(jax.vmap(gen)(z))))


g_tx = optax.adam(1e-3, b1=0.0, b2=0.9)
d_tx = optax.adam(2e-3, b1=0.0, b2=0.9)


@eqx.filter_jit
def update(gen, disc, g_state, d_state, real, z):
    d_loss, grads = eqx.filter_value_and_grad(d_loss_fn)(disc, gen, real, z)
    upd, d_state = d_tx.update(grads, d_state)
    disc = eqx.apply_updates(disc, upd)
    g_loss, grads = eqx.filter_value_and_grad(g_loss_fn)(gen, disc, z)
    upd, g_state = g_tx.update(grads, g_state)
    gen = eqx.apply_updates(gen, upd)
    return gen, disc, g_state, d_state, g_loss, d_loss


def sliced_distance(a, b, rng, n_proj=50):
    v = rng.standard_normal((2, n_proj))
    v /= np.linalg.norm(v, axis=0)
    return np.mean(np.abs(np.sort(a @ v, axis=0) - np.sort(b @ v, axis=0)))


def main():
    kg, kd = jax.random.split(jax.random.PRNGKey(2))
    gen = mlp(4, 2, kg, jax.nn.relu)
    disc = mlp(2, 1, kd, lambda x: jax.nn.leaky_relu(x, 0.2))
    g_state = g_tx.init(eqx.filter(gen, eqx.is_array))
    d_state = d_tx.init(eqx.filter(disc, eqx.is_array))
    rng = np.random.default_rng(0)

    def score():
        z = rng.standard_normal((1000, 4)).astype(np.float32)
        return sliced_distance(np.asarray(jax.vmap(gen)(z)), real_data(rng, 1000), rng)

    print("distance at start", score())
    for step in range(400):
        z = rng.standard_normal((128, 4)).astype(np.float32)
        gen, disc, g_state, d_state, g_loss, d_loss = update(
            gen, disc, g_state, d_state, real_data(rng, 128), z)
        if step % 50 == 0:
            print(f"step {step:3d} g {float(g_loss):.3f} d {float(d_loss):.3f}")
    print("distance at end", score())


main()
