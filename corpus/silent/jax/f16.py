"""Fitting a hidden Markov model with gradient descent."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

STATES, SYMBOLS, LENGTH = 4, 10, 120


def simulate(seed, n):
    r = np.random.default_rng(seed)
    trans = 0.85 * np.eye(STATES) + 0.15 / STATES
    emit = r.dirichlet(0.3 * np.ones(SYMBOLS), STATES)
    obs = np.zeros((n, LENGTH), int)
    for i in range(n):
        s = r.integers(STATES)
        for t in range(LENGTH):
            obs[i, t] = r.choice(SYMBOLS, p=emit[s])
            s = r.choice(STATES, p=trans[s])
    return obs


def init_params(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "start": 0.1 * jax.random.normal(k1, (STATES,)),
        "trans": 0.5 * jax.random.normal(k2, (STATES, STATES)) + 1.5 * jnp.eye(STATES),
        "emit": 0.5 * jax.random.normal(k3, (STATES, SYMBOLS)),
    }


def sequence_log_prob(params, obs):
    pi = jax.nn.softmax(params["start"])
    a = jax.nn.softmax(params["trans"], axis=-1)
    b = jax.nn.softmax(params["emit"], axis=-1)

    def forward(carry, o):
        alpha, logz = carry
        alpha = (alpha @ a) * b[:, o]
        return (alpha, logz), None

    alpha = pi * b[:, obs[0]]
    (alpha, logz), _ = lax.scan(forward, (alpha, 0.0), obs[1:])
    return logz + jnp.log(alpha.sum() + 1e-30)


def nll_per_symbol(params, batch):
    return -jax.vmap(sequence_log_prob, (None, 0))(params, batch).mean() / LENGTH


def fit(obs, steps=300, batch=32, lr=3e-2):
    params = init_params(jax.random.PRNGKey(0))
    tx = optax.adam(lr)
    state = tx.init(params)

    @jax.jit
    def step(params, state, xb):
        loss, grads = jax.value_and_grad(nll_per_symbol)(params, xb)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    r = np.random.default_rng(9)
    for i in range(steps):
        xb = jnp.asarray(obs[r.integers(0, len(obs), batch)])
        params, state, loss = step(params, state, xb)
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:3d} nll/symbol {float(loss):.4f}")
    return params


if __name__ == "__main__":
    data = simulate(0, 200)
    freq = np.bincount(data.ravel(), minlength=SYMBOLS) / data.size
    print("unigram entropy", -np.sum(freq * np.log(freq + 1e-12)))
    fitted = fit(data)
    print(np.round(np.asarray(jax.nn.softmax(fitted["trans"], -1)), 2))
