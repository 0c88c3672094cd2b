"""REINFORCE on a contextual bandit: 6 contexts features, 5 arms, reward 1 for the right arm."""
import jax
import jax.numpy as jnp
import optax

N_CTX, N_ARMS, BATCH = 6, 5, 128
W_TRUE = jax.random.normal(jax.random.PRNGKey(123), (N_CTX, N_ARMS))


def init_policy(key):
    k1, k2 = jax.random.split(key)
    return {
        "l1": {"w": jax.random.normal(k1, (N_CTX, 32)) / jnp.sqrt(N_CTX), "b": jnp.zeros(32)},
        "l2": {"w": 0.1 * jax.random.normal(k2, (32, N_ARMS)), "b": jnp.zeros(N_ARMS)},
    }


def policy(p, ctx):
    h = jnp.tanh(ctx @ p["l1"]["w"] + p["l1"]["b"])
    return h @ p["l2"]["w"] + p["l2"]["b"]


def play(key, p):
    kc, ka = jax.random.split(key)
    ctx = jax.random.normal(kc, (BATCH, N_CTX))
    arms = jax.random.categorical(ka, policy(p, ctx))
    reward = (arms == jnp.argmax(ctx @ W_TRUE, -1)).astype(jnp.float32)
    return ctx, arms, reward


def surrogate(p, ctx, arms, advantage):
    logp = jax.nn.log_softmax(policy(p, ctx))
    chosen = jnp.take_along_axis(logp, arms[:, None], axis=1)[:, 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=1)
    return jnp.mean(chosen * advantage) - 0.01 * jnp.mean(entropy)


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


@jax.jit
def iterate(key, p, opt_state, baseline):
    ctx, arms, reward = play(key, p)
    loss, g = jax.value_and_grad(surrogate)(p, ctx, arms, reward - baseline)
    upd, opt_state = optimizer.update(g, opt_state, p)
    baseline = 0.9 * baseline + 0.1 * reward.mean()
    return optax.apply_updates(p, upd), opt_state, baseline, loss, reward.mean()


def main():
    key = jax.random.PRNGKey(0)
    p = init_policy(key)
    opt_state = optimizer.init(p)
    baseline = jnp.float32(0.2)
    for it in range(250):
        key, sub = jax.random.split(key)
        p, opt_state, baseline, loss, r = iterate(sub, p, opt_state, baseline)
        if it % 50 == 0 or it == 249:
            print(f"iter {it:3d}  loss {float(loss):+.4f}  reward {float(baseline):.3f}")


main()
