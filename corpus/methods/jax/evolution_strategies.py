"""Evolution strategies: a policy for a cart and pole is trained by its returns alone, without a gradient."""
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree


def simulate(state, force, dt=0.02):
    x, v, angle, w = state
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * w**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    accel = push - 0.05 * turn * cos / 1.1
    return jnp.array([x + dt * v, v + dt * accel, angle + dt * w, w + dt * turn])


def policy(params, state):
    h = jnp.tanh(state @ params["w1"] + params["b1"])
    return 10 * jnp.tanh(h @ params["w2"])[0]


def episode(params, start, length=150):
    def tick(carry, _):
        state, alive = carry
        state = simulate(state, policy(params, state))
        alive = alive * ((jnp.abs(state[0]) < 2.4) & (jnp.abs(state[2]) < 0.21))
        return (jnp.clip(state, -5, 5), alive), alive

    return jax.lax.scan(tick, (start, 1.0), None, length=length)[1].sum()


def main(generations=60, pairs=24, sigma=0.1):
    key = jax.random.key(0)
    a, b, key = jax.random.split(key, 3)
    params = {"w1": jax.random.normal(a, (4, 16)) / 2, "b1": jnp.zeros(16), "w2": jax.random.normal(b, (16, 1)) / 4}
    tx = optax.adam(0.05)
    state = tx.init(params)

    @jax.jit
    def generation(params, state, key):
        ka, kb = jax.random.split(key)
        flat, unravel = ravel_pytree(params)
        noise = jax.random.normal(ka, (pairs, flat.size))
        starts = jax.random.uniform(kb, (8, 4), minval=-0.05, maxval=0.05)
        both = jnp.concatenate([flat + sigma * noise, flat - sigma * noise])
        scores = jax.vmap(lambda f: jax.vmap(lambda s: episode(unravel(f), s))(starts).mean())(both)
        ranks = scores.argsort().argsort() / (2 * pairs - 1) - 0.5
        ascent = (ranks[:pairs] - ranks[pairs:]) @ noise / (2 * pairs * sigma)
        updates, state = tx.update(unravel(-ascent), state)
        return optax.apply_updates(params, updates), state, scores

    for i in range(generations):
        key, sub = jax.random.split(key)
        params, state, scores = generation(params, state, sub)
        if i % 5 == 0:
            print(f"{i:3d} mean return {float(scores.mean()):.1f} best {float(scores.max()):.1f}")
    starts = jax.random.uniform(key, (64, 4), minval=-0.05, maxval=0.05)
    final = jax.vmap(lambda s: episode(params, s))(starts).mean()
    print(f"final return {float(final):.1f} of 150")


if __name__ == "__main__":
    main()
