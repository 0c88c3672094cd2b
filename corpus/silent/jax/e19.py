import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

LOSS_SCALE = 2.0 ** 11
WIDTH = 16


def conv(x, w, b):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + b


def init(key):
    chans = [1, WIDTH, WIDTH, 1]
    params = []
    for k, (a, b) in zip(jax.random.split(key, 3), zip(chans[:-1], chans[1:])):
        params.append({"w": jax.random.normal(k, (3, 3, a, b)) * np.sqrt(2.0 / (9 * a)), "b": jnp.zeros(b)})
    params[-1]["w"] *= 0.3
    return params


def denoise(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(conv(x, layer["w"], layer["b"]))
    return conv(x, params[-1]["w"], params[-1]["b"])


def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def unscale(tree):
    return jax.tree.map(lambda a: a / LOSS_SCALE, tree)


def scaled_loss(half_params, noisy, clean):
    out = denoise(half_params, noisy.astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean((out - clean) ** 2) * LOSS_SCALE


def half_value_and_grad(master, noisy, clean):
    scaled = jax.value_and_grad(scaled_loss)(cast(master, jnp.float16), noisy, clean)
    return unscale(scaled)


tx = optax.sgd(0.005, momentum=0.9, nesterov=True)


@jax.jit
def train_step(master, opt_state, noisy, clean):
    loss, grads = half_value_and_grad(master, noisy, clean)
    grads = cast(unscale(grads), jnp.float32)
    updates, opt_state = tx.update(grads, opt_state, master)
    return optax.apply_updates(master, updates), opt_state, loss


def main():
    rng = np.random.default_rng(0)
    data = load_digits().images.astype(np.float32)[..., None]
    data = (data - data.mean()) / data.std()
    params = init(jax.random.PRNGKey(0))
    opt_state = tx.init(params)
    for step in range(250):
        clean = data[rng.integers(0, len(data), 64)]
        noisy = clean + 0.5 * rng.standard_normal(clean.shape).astype(np.float32)
        params, opt_state, loss = train_step(params, opt_state, noisy, clean)
        if step % 25 == 0 or step == 249:
            print(f"step {step:4d}  mse {float(loss):.4f}")


main()
