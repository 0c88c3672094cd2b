"""Expected discounted future load of a 1-d process, learned by bootstrapping from a slow copy."""
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

GAMMA, N_STATES = 0.9, 12


def process(n, seed):
    rng = np.random.default_rng(seed)
    s = rng.integers(0, N_STATES)
    states, loads = [], []
    for _ in range(n + 1):
        states.append(s)
        loads.append(np.sin(s) + 0.5 + 0.1 * rng.normal())
        s = (s + rng.choice([1, 2, -1], p=[0.6, 0.2, 0.2])) % N_STATES
    return np.array(states), np.array(loads, np.float32)


def true_values():
    P = np.zeros((N_STATES, N_STATES))
    for s in range(N_STATES):
        for d, p in ((1, 0.6), (2, 0.2), (-1, 0.2)):
            P[s, (s + d) % N_STATES] += p
    return np.linalg.solve(np.eye(N_STATES) - GAMMA * P, np.sin(np.arange(N_STATES)) + 0.5)


def features(s):
    ang = 2 * jnp.pi * s / N_STATES
    return jnp.stack([jnp.cos(ang), jnp.sin(ang), jnp.cos(2 * ang), jnp.sin(2 * ang),
                      jnp.cos(3 * ang), jnp.sin(3 * ang)], -1)


def mlp(p, s):
    h = jnp.tanh(features(s) @ p["w1"] + p["b1"])
    return (h @ p["w2"] + p["b2"])[..., 0]


class Learner:
    def __init__(self, seed, lr=5e-3, tau=0.1):
        k1, k2 = jax.random.split(jax.random.PRNGKey(seed))
        self.params = {"w1": jax.random.normal(k1, (6, 64)) * 0.5, "b1": jnp.zeros(64),
                       "w2": jax.random.normal(k2, (64, 1)) * 0.1, "b2": jnp.zeros(1)}
        self.target = self.params
        self.tau = tau
        self.opt = optax.adam(lr)
        self.opt_state = self.opt.init(self.params)

    @partial(jax.jit, static_argnums=0)
    def _step(self, params, opt_state, s, r, s_next):
        def loss_fn(p):
            y = r + GAMMA * mlp(self.target, s_next)
            return jnp.mean((mlp(p, s) - jax.lax.stop_gradient(y)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = self.opt.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    def partial_fit(self, s, r, s_next):
        self.params, self.opt_state, loss = self._step(self.params, self.opt_state, s, r, s_next)
        self.target = optax.incremental_update(self.params, self.target, self.tau)
        return float(loss)


states, loads = process(6000, 0)
learner = Learner(0)
rng = np.random.default_rng(1)
for it in range(400):
    idx = rng.integers(0, 6000, 256)
    loss = learner.partial_fit(jnp.array(states[idx]), jnp.array(loads[idx]), jnp.array(states[idx + 1]))
    if it % 50 == 0:
        print(it, "td loss", round(loss, 5))
v = np.asarray(mlp(learner.params, jnp.arange(N_STATES)))
print("FINAL", float(np.mean((v - true_values()) ** 2)))
