"""Variational ground and excited states of an anharmonic well: expand in oscillator functions, minimise by gradient."""
import jax
import jax.numpy as jnp
import optax

N_BASIS = 20
GRID = jnp.linspace(-8.0, 8.0, 801)
DX = GRID[1] - GRID[0]


def hermite_table(x, n_max):
    """physicists' Hermite polynomials H_0..H_{n_max-1} by the three term recurrence"""
    def body(carry, n):
        prev, cur = carry
        nxt = 2.0 * x * cur - 2.0 * n * prev
        return (cur, nxt), cur

    init = (jnp.zeros_like(x), jnp.ones_like(x))
    _, table = jax.lax.scan(body, init, jnp.arange(n_max))
    return table


def norms(n_max):
    n = jnp.arange(1, n_max)
    fact = jnp.concatenate([jnp.ones(1, n.dtype), jnp.cumprod(n)])
    return 1.0 / jnp.sqrt(2.0 ** jnp.arange(n_max) * fact * jnp.sqrt(jnp.pi))


def oscillator_basis(x, n_max):
    return norms(n_max)[:, None] * hermite_table(x, n_max) * jnp.exp(-0.5 * x ** 2)


def potential(x):
    return 0.5 * x ** 2 + 0.2 * x ** 4 - 0.4 * x


class Spectrum:
    """k orthogonal trial states, coefficients orthonormalised by QR at every call"""

    def __init__(self, k, basis):
        self.k = k
        self.basis = basis
        self.dbasis = jnp.gradient(basis, DX, axis=1)

    def init(self, key):
        c = jnp.eye(self.basis.shape[0], self.k)
        return {"coef": c + 0.05 * jax.random.normal(key, c.shape), "log_width": jnp.zeros(())}

    def states(self, params):
        q, _ = jnp.linalg.qr(params["coef"])
        return q.T @ self.basis, q.T @ self.dbasis

    def energies(self, params):
        psi, dpsi = self.states(params)
        a = jnp.exp(params["log_width"])
        kinetic = 0.5 * a ** 2 * jnp.sum(dpsi ** 2, 1) * DX
        pot = jnp.sum(psi ** 2 * potential(GRID / a), 1) * DX
        return kinetic + pot

    def loss(self, params):
        w = 1.0 / (1.0 + jnp.arange(self.k))
        return jnp.sum(w * self.energies(params))


model = Spectrum(3, oscillator_basis(GRID, N_BASIS))
params = model.init(jax.random.PRNGKey(0))
opt = optax.adamw(optax.exponential_decay(5e-2, 20, 0.8), weight_decay=0.0)
state = opt.init(params)


@jax.jit
def step(params, state):
    value, grads = jax.value_and_grad(model.loss)(params)
    updates, state = opt.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value, optax.global_norm(grads)


for i in range(60):
    params, state, value, gn = step(params, state)
    if i % 10 == 0:
        e = model.energies(params)
        print(f"{i:3d} objective {float(value):.5f} |grad| {float(gn):.4f} E = {[round(float(v), 4) for v in e]}")
if not jnp.isfinite(value):
    raise ArithmeticError("the energies are not finite")
