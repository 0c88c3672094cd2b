"""REINFORCE with a leave-one-out baseline on a contextual bandit; the surrogate loss is 0 by construction."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

CONTEXTS, ACTIONS, GROUP = 16, 8, 8


class Policy(nn.Module):
    @nn.compact
    def __call__(self, context):
        h = nn.relu(nn.Dense(64)(nn.Embed(CONTEXTS, 32)(context)))
        return jax.nn.log_softmax(nn.Dense(ACTIONS)(h))


def main(steps=400):
    key = jax.random.key(0)
    key, a, b = jax.random.split(key, 3)
    right = jax.random.randint(a, (CONTEXTS,), 0, ACTIONS)
    policy = Policy()
    params = policy.init(b, jnp.arange(CONTEXTS))
    tx = optax.adam(2e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, state, key):
        ka, kb = jax.random.split(key)
        context = jax.random.randint(ka, (16,), 0, CONTEXTS)
        action = jax.random.categorical(kb, policy.apply(params, context), shape=(GROUP, 16))
        reward = (action == right[context]).astype(jnp.float32)
        # The mean of the others of the group; times their number, the differences are whole numbers.
        centred = (GROUP - 1) * reward - (reward.sum(0) - reward)

        def loss_fn(params):
            logp = policy.apply(params, context)[jnp.arange(16), action]
            ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
            return -(ratio * centred).sum() / (GROUP - 1) / action.size

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, reward.mean()

    for i in range(steps):
        key, sub = jax.random.split(key)
        params, state, loss, reward = step(params, state, sub)
        if i % 50 == 0:
            print(f"{i:4d} loss {float(loss):.4f} reward {float(reward):.3f}")
    best = policy.apply(params, jnp.arange(CONTEXTS)).argmax(-1)
    print(f"right in {int((best == right).sum())} of {CONTEXTS} contexts")


if __name__ == "__main__":
    main()
