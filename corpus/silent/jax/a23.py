"""Half-precision denoiser with float32 master weights: convolutions written with lax."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

CH, SIZE, BATCH, PIXEL_WEIGHT = 8, 20, 16, 1e-4


def conv(x, p):
    y = jax.lax.conv_general_dilated(x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + p["b"]


def denoise(params, x):
    h = jax.nn.relu(conv(x, params["enter"]))
    h = h + jax.nn.relu(conv(h, params["middle"]))
    return conv(h, params["leave"])


def init(key):
    shapes = {"enter": (1, CH), "middle": (CH, CH), "leave": (CH, 1)}
    keys = jax.random.split(key, 3)
    return {name: {"w": jax.random.normal(k, (3, 3, *s)) * np.sqrt(1.0 / (9 * s[0])), "b": jnp.zeros(s[1])}
            for k, (name, s) in zip(keys, shapes.items())}


def to_half(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float16), tree)


def loss_fn(half, noisy, clean):
    out = denoise(half, noisy)
    return PIXEL_WEIGHT * jnp.mean((out - clean) ** 2)


def make_batch(rng):
    g = np.linspace(0, 1, SIZE)
    fx, fy, ph = rng.uniform(2, 12, (3, BATCH, 1, 1))
    clean = 0.5 * np.sin(fx * g[None, None, :] + fy * g[None, :, None] + ph)[..., None]
    return (clean + 0.25 * rng.normal(size=clean.shape)).astype("float16"), clean.astype("float16")


tx = optax.adam(3e-3)
master = init(jax.random.PRNGKey(0))
opt = tx.init(master)


@jax.jit
def step(master, opt, noisy, clean):
    loss, grads = jax.value_and_grad(loss_fn)(to_half(master), noisy, clean)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, opt = tx.update(grads, opt, master)
    return optax.apply_updates(master, updates), opt, loss.astype(jnp.float32) / PIXEL_WEIGHT


rng = np.random.default_rng(0)
for i in range(120):
    master, opt, mse = step(master, opt, *make_batch(rng))
    if i % 10 == 0 or i == 119:
        print(f"{i:3d} pixel mse {float(mse):.5f}")
