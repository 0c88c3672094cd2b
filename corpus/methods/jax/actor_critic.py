"""An actor of independent bits and a critic that reads its probabilities; it ends at the full reward of 1.0."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Agent(nn.Module):
    bits: int = 6
    hidden: int = 64

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(self.hidden)(x))
        h = nn.relu(nn.Dense(self.hidden)(h))
        p = nn.sigmoid(nn.Dense(self.bits)(h))
        c = nn.relu(nn.Dense(self.hidden)(jnp.concatenate([x, p], -1)))
        return p, nn.Dense(1)(c)[:, 0]


def reward(x, action, rule):
    """The part of the bits that are right; which are, depends on the signs of the input."""
    return (action == (x @ rule > 0)).astype(jnp.float32).mean(-1)


def main(steps=800):
    key = jax.random.key(0)
    a, b, c, key = jax.random.split(key, 4)
    rule, states = jax.random.normal(a, (8, 6)), jnp.sign(jax.random.normal(b, (64, 8)))
    agent = Agent()
    params = agent.init(c, states)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    state = tx.init(params)

    @jax.jit
    def step(params, state, key):
        ka, kb = jax.random.split(key)
        x = states[jax.random.randint(ka, (256,), 0, len(states))]
        action = jax.random.bernoulli(kb, agent.apply(params, x)[0])
        r = reward(x, action, rule)

        def loss_fn(params):
            p, value = agent.apply(params, x)
            p = jnp.clip(p, 1e-6, 1 - 1e-6)
            advantage = jax.lax.stop_gradient(r - value)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-2)
            logp = jnp.where(action, jnp.log(p), jnp.log(1 - p)).sum(-1)
            return -(advantage * logp).mean() + 0.5 * jnp.mean((value - r) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, r.mean()

    for i in range(steps):
        key, sub = jax.random.split(key)
        params, state, loss, r = step(params, state, sub)
        if i % 100 == 0:
            print(f"{i:4d} loss {float(loss):+.4f} reward {float(r):.3f}")
    p, _ = agent.apply(params, states)
    print(f"final reward {float(reward(states, p > 0.5, rule).mean()):.3f}")


if __name__ == "__main__":
    main()
