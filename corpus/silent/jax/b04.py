# Remember the cue shown at the first step of a noisy sequence (vanilla RNN, lax.scan).
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

T, CUES, HID = 40, 6, 64


def batch(rng, n):
    cue = rng.integers(0, CUES, n)
    x = 0.1 * rng.normal(size=(T, n, CUES))
    x[0] += np.eye(CUES)[cue]
    return jnp.asarray(x, jnp.float32), jnp.asarray(cue)


def init_params(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "wx": jax.random.normal(k1, (CUES, HID)) / np.sqrt(CUES),
        "wh": 0.01 * jax.random.normal(k2, (HID, HID)),
        "bh": jnp.zeros(HID),
        "wo": jax.random.normal(k3, (HID, CUES)) / np.sqrt(HID),
        "bo": jnp.zeros(CUES),
    }


def rnn(params, xs):
    def cell(h, x):
        h = jnp.tanh(x @ params["wx"] + h @ params["wh"] + params["bh"])
        return h, None

    h0 = jnp.zeros((xs.shape[1], HID))
    h, _ = jax.lax.scan(cell, h0, xs)
    return h @ params["wo"] + params["bo"]


def loss_fn(params, xs, y):
    logits = rnn(params, xs)
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return ce, (logits.argmax(-1) == y).mean()


optimizer = optax.adam(1e-3)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(params, opt_state, xs, y):
    (loss, acc), g = jax.value_and_grad(loss_fn, has_aux=True)(params, xs, y)
    upd, opt_state = optimizer.update(g, opt_state)
    return optax.apply_updates(params, upd), opt_state, loss, acc


rng = np.random.default_rng(3)
params = init_params(jax.random.PRNGKey(3))
opt_state = optimizer.init(params)
for i in range(250):
    xs, y = batch(rng, 64)
    params, opt_state, loss, acc = step(params, opt_state, xs, y)
    if i % 25 == 24:
        print(i + 1, "loss", round(float(loss), 4), "acc", round(float(acc), 3))
xs, y = batch(rng, 1000)
loss, acc = loss_fn(params, xs, y)
print("test loss", float(loss), "test acc", float(acc))
