"""Soft actor-critic on a one-step tracking task with actions in [-2, 2]."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

OBS, HID, MAX_ACTION = 3, 32, 2.0


def mlp_init(key, sizes):
    ks = jax.random.split(key, len(sizes) - 1)
    return [(jax.random.normal(k, (i, o)) / np.sqrt(i), jnp.zeros(o)) for k, i, o in zip(ks, sizes[:-1], sizes[1:])]


def mlp(p, x):
    for w, b in p[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ p[-1][0] + p[-1][1]


def policy(p, obs, key):
    out = mlp(p, obs)
    mu, log_std = 0.1 * out[..., 0], jnp.clip(out[..., 1] - 2.5, -5.0, 1.0)
    noise = jax.random.normal(key, mu.shape)
    u = mu + jnp.exp(log_std) * noise
    action = MAX_ACTION * jnp.tanh(u)
    logp = -0.5 * noise ** 2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    logp = logp - jnp.log(1.0 - action ** 2 + 1e-6)
    return action, logp


def q_value(p, obs, act):
    return mlp(p, jnp.concatenate([obs, act[..., None]], -1))[..., 0]


def critic_loss(qs, obs, act, rew):
    return sum(jnp.mean((q_value(q, obs, act) - rew) ** 2) for q in qs)


def actor_loss(pi, qs, log_alpha, obs, key):
    act, logp = policy(pi, obs, key)
    q = jnp.minimum(*[q_value(p, obs, act) for p in qs])
    return jnp.mean(jnp.exp(log_alpha) * logp - q), logp


def reward(obs, act):
    return -(act - 1.6 * np.sin(obs[:, 0] + obs[:, 1])) ** 2


opt_pi, opt_q, opt_a = optax.adam(2e-3), optax.adam(3e-3), optax.adam(1e-3)


@jax.jit
def update(carry, obs, act, rew, key):
    pi, qs, la, s_pi, s_q, s_a = carry
    lq, gq = jax.value_and_grad(critic_loss)(qs, obs, act, rew)
    u, s_q = opt_q.update(gq, s_q)
    qs = optax.apply_updates(qs, u)
    (lp, logp), gp = jax.value_and_grad(actor_loss, has_aux=True)(pi, qs, la, obs, key)
    u, s_pi = opt_pi.update(gp, s_pi)
    pi = optax.apply_updates(pi, u)
    ga = jax.grad(lambda a: -jnp.mean(a * jax.lax.stop_gradient(logp - 1.0)))(la)
    u, s_a = opt_a.update(ga, s_a)
    la = optax.apply_updates(la, u)
    return (pi, qs, la, s_pi, s_q, s_a), lq, lp


k0, k1, k2, key = jax.random.split(jax.random.PRNGKey(0), 4)
pi = mlp_init(k0, [OBS, HID, HID, 2])
qs = (mlp_init(k1, [OBS + 1, HID, HID, 1]), mlp_init(k2, [OBS + 1, HID, HID, 1]))
la = jnp.float32(-3.0)
carry = (pi, qs, la, opt_pi.init(pi), opt_q.init(qs), opt_a.init(la))
rng = np.random.default_rng(0)
buf_obs = rng.standard_normal((4000, OBS)).astype(np.float32)
buf_act = rng.uniform(-2, 2, 4000).astype(np.float32)
buf_rew = reward(buf_obs, buf_act).astype(np.float32)
for it in range(300):
    key, k = jax.random.split(key)
    i = rng.integers(0, 4000, 64)
    carry, lq, lp = update(carry, buf_obs[i], buf_act[i], buf_rew[i], k)
    if it % 10 == 0:
        print(f"{it:4d} critic {float(lq):8.4f} actor {float(lp):8.4f} alpha {float(jnp.exp(carry[2])):.4f}")
