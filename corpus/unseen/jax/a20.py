"""Next-value prediction for barometer windows with per-window (reversible) normalisation."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

WIN = 32


def station(rng, n, level, unit):
    walk = np.cumsum(0.02 * rng.standard_normal((n, WIN + 1)), axis=1)
    wave = 0.05 * np.sin(np.linspace(0, 6, WIN + 1))[None] * rng.uniform(0.5, 1.5, (n, 1))
    return unit * (level + walk + wave)


rng = np.random.default_rng(21)
windows = np.concatenate([
    station(rng, 200, 0.9, 1.0),
    station(rng, 120, 1.2, 1.0),
    station(rng, 160, 1013.2, 1.0),
]).astype(np.float32)


def moments(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    mean_sq = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return mean, mean_sq - jnp.square(mean)


def net(params, x):
    h = jax.nn.gelu(x @ params["w0"] + params["b0"])
    h = h + jax.nn.gelu(h @ params["w1"] + params["b1"])
    return h @ params["w2"]


def predict(params, x):
    mean, var = moments(x)
    inv = jax.lax.rsqrt(var + 1e-6)
    z = (x - mean) * inv
    out = net(params, params["gain"] * z + params["bias"])
    return out, mean[:, 0], inv[:, 0]


def loss_fn(params, batch):
    x, target = batch[:, :-1], batch[:, -1]
    out, mean, inv = predict(params, x)
    return jnp.mean(jnp.abs(out - (target - mean) * inv))


@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


k = jax.random.split(jax.random.PRNGKey(0), 3)
params = {
    "gain": jnp.ones(WIN), "bias": jnp.zeros(WIN),
    "w0": jax.random.normal(k[0], (WIN, 48)) / np.sqrt(WIN), "b0": jnp.zeros(48),
    "w1": jax.random.normal(k[1], (48, 48)) / np.sqrt(48), "b1": jnp.zeros(48),
    "w2": jax.random.normal(k[2], (48,)) / np.sqrt(48),
}
tx = optax.lion(3e-4)
opt_state = tx.init(params)
for epoch in range(3):
    for i in range(0, len(windows), 16):
        params, opt_state, loss = train_step(params, opt_state, windows[i:i + 16])
        if (i // 16) % 6 == 0:
            print(f"epoch {epoch} batch {i // 16:2d} loss {loss:.4f}")
