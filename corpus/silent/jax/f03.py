import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits

CHANNELS = [1, 16, 16, 24, 24, 24, 32, 32, 32]
STRIDES = [1, 2, 1, 1, 1, 2, 1, 1]


def kaiming(key, shape):
    fan_in = shape[0]
    return math.sqrt(2.0 / fan_in) * jax.random.normal(key, shape)


def init_net(key):
    params = {"conv": [], "out": None}
    for cin, cout in zip(CHANNELS[:-1], CHANNELS[1:]):
        key, sub = jax.random.split(key)
        params["conv"].append({"w": kaiming(sub, (3, 3, cin, cout)), "b": jnp.zeros(cout)})
    key, sub = jax.random.split(key)
    params["out"] = {
        "w": jax.random.normal(sub, (CHANNELS[-1], 10)) / math.sqrt(CHANNELS[-1]),
        "b": jnp.zeros(10),
    }
    return params


def conv(x, layer, stride):
    y = lax.conv_general_dilated(
        x, layer["w"], (stride, stride), "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + layer["b"]


def forward(params, x):
    h = x
    for layer, s in zip(params["conv"], STRIDES):
        h = jax.nn.relu(conv(h, layer, s))
    h = h.mean(axis=(1, 2))
    return h @ params["out"]["w"] + params["out"]["b"]


def nll(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(forward(params, x), y).mean()


def main(steps=150, batch=64, lr=2e-2):
    digits = load_digits()
    x = digits.images[..., None].astype(np.float32) / 16.0
    x = (x - x.mean()) / x.std()
    y = digits.target
    params = init_net(jax.random.PRNGKey(0))
    tx = optax.sgd(lr, momentum=0.9)
    tx = optax.chain(optax.clip_by_global_norm(5.0), tx)
    state = tx.init(params)

    @jax.jit
    def step(params, state, xb, yb):
        loss, g = jax.value_and_grad(nll)(params, xb, yb)
        up, state = tx.update(g, state, params)
        return optax.apply_updates(params, up), state, loss

    evaluate = jax.jit(lambda p: jnp.mean(forward(p, x[1500:]).argmax(-1) == y[1500:]))
    rng = np.random.default_rng(1)
    for i in range(steps):
        idx = rng.integers(0, 1500, batch)
        params, state, loss = step(params, state, x[idx], y[idx])
        if i % 25 == 0 or i == steps - 1:
            print(f"iter {i} loss {float(loss):.4f}")
    print("test accuracy", float(evaluate(params)))


if __name__ == "__main__":
    main()
