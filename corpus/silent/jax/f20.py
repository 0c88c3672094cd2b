"""Advantage actor-critic with a slow target critic on a small corridor world."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

SIZE, HORIZON, ENVS, GAMMA = 7, 24, 32, 0.95


def mlp_init(key, sizes, out_scale):
    ps = []
    for n, (a, b) in enumerate(zip(sizes[:-1], sizes[1:])):
        key, k = jax.random.split(key)
        s = out_scale if n == len(sizes) - 2 else 1.0
        ps.append((s * jax.random.normal(k, (a, b)) / jnp.sqrt(a), jnp.zeros(b)))
    return ps


def mlp(ps, x):
    for w, b in ps[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = ps[-1]
    return x @ w + b


def observe(pos, goal):
    return jnp.concatenate([(pos - 3.0) / 3.0, (goal - 3.0) / 3.0, (goal - pos) / 6.0], -1)


MOVES = jnp.array([[0, 1], [0, -1], [1, 0], [-1, 0]])


def rollout(actor, key):
    k0, k1, k2 = jax.random.split(key, 3)
    pos = jax.random.randint(k0, (ENVS, 2), 0, SIZE)
    goal = jax.random.randint(k1, (ENVS, 2), 0, SIZE)

    def tick(carry, k):
        pos, goal = carry
        ka, kg = jax.random.split(k)
        obs = observe(pos, goal)
        act = jax.random.categorical(ka, mlp(actor, obs))
        pos = jnp.clip(pos + MOVES[act], 0, SIZE - 1)
        hit = jnp.all(pos == goal, -1)
        fresh = jax.random.randint(kg, goal.shape, 0, SIZE)
        goal = jnp.where(hit[:, None], fresh, goal)
        return (pos, goal), (obs, act, hit.astype(jnp.float32) - 0.02, observe(pos, goal))

    return lax.scan(tick, (pos, goal), jax.random.split(k2, HORIZON))[1]


def losses(nets, target, traj):
    obs, act, rew, nxt = traj
    value = mlp(nets["critic"], obs)[..., 0]
    boot = rew + GAMMA * mlp(target, nxt)[..., 0]
    adv = lax.stop_gradient(boot - value)
    logp = jax.nn.log_softmax(mlp(nets["actor"], obs))
    chosen = jnp.take_along_axis(logp, act[..., None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1).mean()
    pg = -jnp.mean(chosen * (adv - adv.mean()) / (adv.std() + 1e-6))
    return pg + 0.5 * jnp.mean((value - lax.stop_gradient(boot)) ** 2) - 1e-2 * entropy, rew


def main(steps=300):
    ka, kc, key = jax.random.split(jax.random.PRNGKey(0), 3)
    nets = {"actor": mlp_init(ka, (6, 64, 64, 4), 0.01), "critic": mlp_init(kc, (6, 64, 64, 1), 1.0)}
    target = nets["critic"]
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(4e-3))
    state = tx.init(nets)

    @jax.jit
    def step(nets, target, state, key):
        traj = rollout(nets["actor"], key)
        (loss, rew), g = jax.value_and_grad(losses, has_aux=True)(nets, target, traj)
        up, state = tx.update(g, state)
        nets = optax.apply_updates(nets, up)
        return nets, optax.incremental_update(nets["critic"], target, 0.1), state, loss, rew.sum(0).mean()

    for i in range(steps):
        key, sub = jax.random.split(key)
        nets, target, state, loss, ret = step(nets, target, state, sub)
        if i % 30 == 0 or i == steps - 1:
            print(f"{i:3d} loss {float(loss):+.4f} return {float(ret):.2f}")


if __name__ == "__main__":
    main()
