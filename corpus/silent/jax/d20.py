"""REINFORCE with a batch baseline on a small cart-pole written in JAX."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

HORIZON, EPISODES, UPDATES, GAMMA = 120, 64, 150, 0.98


class Policy(nn.Module):
    @nn.compact
    def __call__(self, s):
        h = nn.tanh(nn.Dense(32)(s))
        return nn.Dense(2, kernel_init=nn.initializers.normal(0.01))(h)


def physics(s, a):
    x, v, th, w = s
    force = jnp.where(a == 1, 10.0, -10.0)
    tmp = (force + 0.05 * w ** 2 * jnp.sin(th)) / 1.1
    wacc = (9.8 * jnp.sin(th) - jnp.cos(th) * tmp) / (0.5 * (4 / 3 - 0.1 * jnp.cos(th) ** 2 / 1.1))
    acc = tmp - 0.05 * wacc * jnp.cos(th) / 1.1
    return s + 0.02 * jnp.array([v, acc, w, wacc])


policy = Policy()


def rollout(params, key):
    k0, k1 = jax.random.split(key)
    s0 = jax.random.uniform(k0, (4,), minval=-0.05, maxval=0.05)

    def env_step(carry, k):
        s, alive = carry
        a = jax.random.categorical(k, policy.apply(params, s))
        nxt = physics(s, a)
        ok = alive & (jnp.abs(nxt[0]) < 2.4) & (jnp.abs(nxt[2]) < 0.21)
        s_next = jnp.where(ok, nxt, s)
        return (s_next, ok), (s, a, alive.astype(jnp.float32))

    _, (states, actions, mask) = jax.lax.scan(env_step, (s0, jnp.array(True)), jax.random.split(k1, HORIZON))
    return states, actions, mask


def returns_to_go(mask):
    def back(g, r):
        g = r + GAMMA * g
        return g, g

    _, out = jax.lax.scan(back, 0.0, mask, reverse=True)
    return out


def surrogate(params, states, actions, adv, mask):
    logp = jax.nn.log_softmax(policy.apply(params, states))
    chosen = jnp.take_along_axis(logp, actions[..., None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    return -jnp.sum((chosen * adv + 0.001 * entropy) * mask) / mask.sum()


tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))


@jax.jit
def update(params, opt_state, key):
    states, actions, mask = jax.vmap(rollout, (None, 0))(params, jax.random.split(key, EPISODES))
    g = jax.vmap(returns_to_go)(mask)
    mean = jnp.sum(g * mask) / mask.sum()
    std = jnp.sqrt(jnp.sum((g - mean) ** 2 * mask) / mask.sum()) + 1e-6
    loss, grads = jax.value_and_grad(surrogate)(params, states, actions, (g - mean) / std, mask)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss, mask.sum(1).mean()


def main():
    key = jax.random.PRNGKey(0)
    params = policy.init(key, jnp.zeros(4))
    opt_state = tx.init(params)
    for i in range(UPDATES):
        key, sub = jax.random.split(key)
        params, opt_state, loss, length = update(params, opt_state, sub)
        if i % 15 == 0 or i == UPDATES - 1:
            print(f"update {i:3d}  loss {float(loss):+.4f}  episode length {float(length):.1f}")


main()
