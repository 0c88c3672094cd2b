# REINFORCE with a running baseline on a contextual bandit.
import jax
import jax.numpy as jnp
import optax

N_CTX, N_ARM, BATCH = 8, 5, 64
W_TRUE = jax.random.normal(jax.random.PRNGKey(42), (N_CTX, N_ARM))


def policy(theta, ctx):
    h = jnp.tanh(ctx @ theta["w1"] + theta["b1"])
    return h @ theta["w2"] + theta["b2"]


def surrogate(theta, ctx, arm, advantage):
    logp = jax.nn.log_softmax(policy(theta, ctx))
    chosen = jnp.take_along_axis(logp, arm[:, None], axis=1)[:, 0]
    entropy = -(jnp.exp(logp) * logp).sum(1).mean()
    return -(chosen * jax.lax.stop_gradient(advantage)).mean() - 0.01 * entropy


def make_step(tx):
    @jax.jit
    def step(theta, state, baseline, key):
        kc, ka, kr = jax.random.split(key, 3)
        ctx = jax.random.normal(kc, (BATCH, N_CTX))
        arm = jax.random.categorical(ka, policy(theta, ctx))
        mean = ctx @ W_TRUE
        reward = jnp.take_along_axis(mean, arm[:, None], 1)[:, 0] + jax.random.normal(kr, (BATCH,))
        loss, g = jax.value_and_grad(surrogate)(theta, ctx, arm, reward - baseline)
        up, state = tx.update(g, state)
        baseline = 0.9 * baseline + 0.1 * reward.mean()
        best = (arm == mean.argmax(1)).mean()
        return optax.apply_updates(theta, up), state, baseline, loss, reward.mean(), best

    return step


def main():
    k1, k2 = jax.random.split(jax.random.PRNGKey(0))
    theta = {"w1": jax.random.normal(k1, (N_CTX, 64)) / N_CTX ** 0.5, "b1": jnp.zeros(64),
             "w2": 0.1 * jax.random.normal(k2, (64, N_ARM)), "b2": jnp.zeros(N_ARM)}
    tx = optax.adam(1e-2)
    state, baseline, step = tx.init(theta), jnp.zeros(()), make_step(tx)
    for i in range(300):
        theta, state, baseline, loss, r, best = step(theta, state, baseline, jax.random.PRNGKey(1000 + i))
        if i % 20 == 0 or i == 299:
            print(f"round {i:3d} loss {float(loss):+.3f} reward {float(r):+.3f} best arm {float(best):.2f}")


main()
