import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


def mlp_init(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [(jax.random.normal(k, (a, b)) * np.sqrt(2 / a), jnp.zeros(b)) for k, a, b in zip(keys, sizes[:-1], sizes[1:])]


def mlp(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


class DigitBandit:
    def __init__(self, seed):
        x, y = load_digits(return_X_y=True)
        self.x = ((x - x.mean()) / x.std()).astype(np.float32)
        self.y = y
        self.rng = np.random.default_rng(seed)

    def contexts(self, n):
        i = self.rng.integers(0, len(self.x), n)
        return self.x[i], i

    def pull(self, idx, actions):
        return (self.y[idx] == actions).astype(np.float32)


def surrogate(params, x, actions, advantage):
    logp = jax.nn.log_softmax(mlp(params, x))
    chosen = jnp.take_along_axis(logp, actions[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1).mean()
    return -(chosen * advantage).mean() - 0.005 * entropy


@jax.jit
def act(params, key, x):
    return jax.random.categorical(key, mlp(params, x))


def main(steps=400, batch=256):
    env = DigitBandit(0)
    key = jax.random.PRNGKey(0)
    key, sub = jax.random.split(key)
    policy = mlp_init(sub, [64, 96, 10])
    tx = optax.adam(3e-3)
    state = tx.init(policy)

    @jax.jit
    def improve(policy, state, x, actions, advantage):
        loss, g = jax.value_and_grad(surrogate)(policy, x, actions, advantage)
        u, state = tx.update(g, state)
        return optax.apply_updates(policy, u), state, loss

    baseline = 0.1
    recent = []
    for i in range(steps):
        x, idx = env.contexts(batch)
        key, sub = jax.random.split(key)
        actions = np.asarray(act(policy, sub, x))
        reward = env.pull(idx, actions)
        policy, state, loss = improve(policy, state, x, actions, reward - baseline)
        baseline = 0.95 * baseline + 0.05 * float(reward.mean())
        recent.append(reward.mean())
        if i % 50 == 0 or i == steps - 1:
            print(f"round {i:3d} surrogate {float(loss):+.4f} reward {np.mean(recent[-20:]):.3f}")


if __name__ == "__main__":
    main()
