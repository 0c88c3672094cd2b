"""Fit the noise levels of a constant-acceleration Kalman filter to radar tracks by maximum likelihood."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

DT = 0.1
F = jnp.array([[1.0, DT, 0.5 * DT ** 2], [0.0, 1.0, DT], [0.0, 0.0, 1.0]])
H = jnp.array([[1.0, 0.0, 0.0]])
G = jnp.array([[DT ** 3 / 6], [DT ** 2 / 2], [DT]])


def simulate(seed, n_tracks=6, n=60):
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n_tracks):
        x = np.array([rng.normal() * 50, rng.normal() * 5, 0.0])
        zs = []
        for _ in range(n):
            x = np.asarray(F) @ x + np.asarray(G)[:, 0] * rng.normal() * 0.8
            zs.append(x[0] + 0.01 * rng.normal())
        out.append(zs)
    return jnp.asarray(np.array(out, np.float32))


def predict(x, P, q):
    return F @ x, F @ P @ F.T + q * (G @ G.T)


def correct(x, P, z, r):
    S = (H @ P @ H.T)[0, 0] + r
    K = (P @ H.T)[:, 0] / S
    innov = z - (H @ x)[0]
    x = x + K * innov
    P = (jnp.eye(3) - jnp.outer(K, H[0])) @ P
    ll = -0.5 * (jnp.log(2 * jnp.pi * S) + innov ** 2 / S)
    return x, P, ll


def track_loglik(params, zs):
    q, r = jnp.exp(params["log_q"]), jnp.exp(params["log_r"])

    def body(carry, z):
        x, P = predict(*carry, q)
        x, P, ll = correct(x, P, z, r)
        return (x, P), ll

    x0 = jnp.zeros(3)
    P0 = jnp.diag(jnp.array([1e6, 1e6, 1e6]))
    _, lls = jax.lax.scan(body, (x0, P0), zs)
    return lls.sum()


def objective(params, tracks):
    return -jnp.mean(jax.vmap(lambda zs: track_loglik(params, zs))(tracks)) / tracks.shape[1]


tracks = simulate(1)
params = {"log_q": jnp.array(2.0), "log_r": jnp.array(4.0)}
opt = optax.adam(0.25)
opt_state = opt.init(params)
step_fn = jax.jit(jax.value_and_grad(objective))
for step in range(60):
    val, g = step_fn(params, tracks)
    upd, opt_state = opt.update(g, opt_state)
    params = optax.apply_updates(params, upd)
    if step % 5 == 0:
        q, r = float(jnp.exp(params["log_q"])), float(jnp.exp(params["log_r"]))
        print(f"step {step:2d} nll {float(val):9.4f} q {q:8.4f} r {r:10.6f}")
print("sensor sd estimate:", float(jnp.exp(0.5 * params["log_r"])))
