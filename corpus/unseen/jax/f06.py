# Deep hedging of a short call under stochastic volatility. Paths come from a lax.scan Euler scheme.
import jax
import jax.numpy as jnp
import optax
from jax import random

S0, STRIKE, T, N_STEPS = 1.0, 1.0, 30 / 365, 30
DT = T / N_STEPS


class HestonMarket:
    def __init__(self, kappa=1.5, theta=0.9, sigma=2.2, rho=-0.7, v0=0.9):
        self.kappa, self.theta, self.sigma, self.rho, self.v0 = kappa, theta, sigma, rho, v0

    def paths(self, key, n):
        z = random.normal(key, (N_STEPS, 2, n))

        def euler(carry, eps):
            s, v = carry
            dw1 = eps[0] * jnp.sqrt(DT)
            dw2 = self.rho * dw1 + jnp.sqrt(1 - self.rho ** 2) * eps[1] * jnp.sqrt(DT)
            vp = jnp.maximum(v, 0.0)
            s_new = s + s * jnp.sqrt(vp) * dw1
            v_new = v + self.kappa * (self.theta - v) * DT + self.sigma * jnp.sqrt(v) * dw2
            return (s_new, v_new), (s_new, vp)

        start = (jnp.full((n,), S0), jnp.full((n,), self.v0))
        _, (s, v) = jax.lax.scan(euler, start, z)
        s = jnp.concatenate([start[0][None], s])
        v = jnp.concatenate([start[1][None], v])
        return s, v


def init_mlp(key, sizes):
    layers = []
    for k, a, b in zip(random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:]):
        layers.append((random.normal(k, (a, b)) * jnp.sqrt(2.0 / a), jnp.zeros(b)))
    return layers


def mlp(layers, x):
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = layers[-1]
    return jax.nn.sigmoid(x @ w + b)[..., 0]


def pnl(layers, s, v, cost=1e-4):
    def trade(prev, inp):
        s_t, v_t, t, s_next = inp
        feats = jnp.stack([jnp.log(s_t / STRIKE), jnp.sqrt(v_t + 1e-6), jnp.full_like(s_t, 1 - t), prev], -1)
        h = mlp(layers, feats)
        gain = h * (s_next - s_t) - cost * jnp.abs(h - prev) * s_t
        return h, gain

    times = jnp.arange(N_STEPS) / N_STEPS
    _, gains = jax.lax.scan(trade, jnp.zeros(s.shape[1]), (s[:-1], v[:-1], times, s[1:]))
    payoff = jnp.maximum(s[-1] - STRIKE, 0.0)
    return gains.sum(0) - payoff


def entropic_risk(x, a=8.0):
    return jax.nn.logsumexp(-a * x) / a - jnp.log(x.shape[0]) / a


market = HestonMarket()
key, k0 = random.split(random.PRNGKey(42))
layers = init_mlp(k0, [4, 24, 24, 1])
tx = optax.adam(4e-3)
opt_state = tx.init(layers)


@jax.jit
def step(layers, opt_state, key):
    s, v = market.paths(key, 8)
    risk, g = jax.value_and_grad(lambda l: entropic_risk(pnl(l, s, v)))(layers)
    upd, opt_state = tx.update(g, opt_state)
    return optax.apply_updates(layers, upd), opt_state, risk, v.min()


history = []
for it in range(60):
    key, k = random.split(key)
    layers, opt_state, risk, vmin = step(layers, opt_state, k)
    history.append(float(risk))
    if it % 6 == 0:
        print(f"{it:3d} entropic risk {float(risk):.4f}   lowest variance {float(vmin):.4f}")
print("price of the hedge (mean of the last 10):", sum(history[-10:]) / 10)
