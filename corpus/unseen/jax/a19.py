import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import optax
from jax import lax


def matern52(params, a, b):
    d = jnp.sqrt((a[:, None] - b[None, :]) ** 2 + 1e-10) / jnp.exp(params["ls"])
    s = jnp.sqrt(5.0) * d
    return jnp.exp(params["amp"]) * (1 + s + s ** 2 / 3) * jnp.exp(-s)


def find_jitter(K):
    K = lax.stop_gradient(K)
    eye = jnp.eye(K.shape[0])
    factor = lambda j: jnp.linalg.cholesky(K + j * eye)

    def bad(carry):
        j, L = carry
        return ~jnp.all(jnp.isfinite(L)) & (j < 1.0)

    def grow(carry):
        j = jnp.maximum(carry[0] * 10.0, 1e-7)
        return j, factor(j)

    j, _ = lax.while_loop(bad, grow, (jnp.float32(0.0), factor(0.0)))
    return 10.0 * j


def neg_log_marginal(params, x, y):
    K = matern52(params, x, x)
    jitter = find_jitter(K)
    K = K + (jitter + jnp.exp(params["noise"])) * jnp.eye(len(x))
    L = jnp.linalg.cholesky(K)
    a = jsl.cho_solve((L, True), y)
    return (0.5 * y @ a + jnp.sum(jnp.log(jnp.diagonal(L)))) / len(x), jitter


rng = np.random.default_rng(0)
x = np.repeat(np.linspace(0, 5, 25), 2)
y = np.sin(x) * 2 + 0.1 * rng.standard_normal(50)
x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
params = {"ls": jnp.float32(0.0), "amp": jnp.float32(0.0), "noise": jnp.float32(-2.0)}
tx = optax.adam(0.05)
st = tx.init(params)


@jax.jit
def step(params, st):
    (v, jit), g = jax.value_and_grad(neg_log_marginal, has_aux=True)(params, x, y)
    u, st = tx.update(g, st)
    return optax.apply_updates(params, u), st, v, jit


for i in range(120):
    params, st, v, jit = step(params, st)
    if i % 15 == 0:
        print(f"{i:3d} nlml/n {float(v):.4f} jitter {float(jit):.1e}")
print({k: float(v) for k, v in params.items()})
