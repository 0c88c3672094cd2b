"""GP regression: type-II maximum likelihood of kernel hyperparameters."""
import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import optax


def rbf(params, a, b):
    ls = jnp.exp(params["log_ls"])
    amp = jnp.exp(2 * params["log_amp"])
    d2 = (a[:, None] - b[None, :]) ** 2
    return amp * jnp.exp(-0.5 * d2 / ls ** 2)


def nlml(params, x, y):
    n = x.shape[0]
    noise = jnp.exp(2 * params["log_noise"])
    K = rbf(params, x, x) + noise * jnp.eye(n)
    L = jnp.linalg.cholesky(K)
    alpha = jsl.cho_solve((L, True), y)
    return 0.5 * y @ alpha + jnp.sum(jnp.log(jnp.diagonal(L))) + 0.5 * n * jnp.log(2 * jnp.pi)


def predict(params, x, y, xs):
    K = rbf(params, x, x) + jnp.exp(2 * params["log_noise"]) * jnp.eye(len(x))
    return rbf(params, xs, x) @ jsl.cho_solve(jsl.cho_factor(K, lower=True), y)


rng = np.random.default_rng(5)
x = np.sort(rng.uniform(0, 6, 60))
y = np.sin(1.3 * x) + 0.3 * x
x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y - y.mean(), jnp.float32)
params = {"log_ls": jnp.log(0.3), "log_amp": jnp.log(1.0), "log_noise": jnp.log(0.3)}
opt = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(0.05))
state = opt.init(params)


@jax.jit
def fit_step(params, state):
    val, grads = jax.value_and_grad(nlml)(params, x, y)
    updates, state = opt.update(grads, state)
    return optax.apply_updates(params, updates), state, val


xs = jnp.linspace(0.2, 5.8, 50)
for i in range(300):
    params, state, val = fit_step(params, state)
    if i % 15 == 0:
        rmse = jnp.sqrt(jnp.mean((predict(params, x, y, x) - y) ** 2))
        hp = {k: round(float(jnp.exp(v)), 5) for k, v in params.items()}
        print(i, "nlml", float(val), hp, "fit rmse", float(rmse))
print("prediction", predict(params, x, y, xs)[:5])
