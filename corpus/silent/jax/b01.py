"""Surrogate model for plate deflection. Displacements are in metres, the net works in millimetres."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

MM = 1e-3
WIDTHS = (4, 96, 96, 3)


def make_data(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (n, 4)).astype(np.float32)
    y = np.stack([np.sin(2 * x[:, 0]) * x[:, 1],
                  np.cos(3 * x[:, 2]) - 0.5 * x[:, 3],
                  x[:, 0] * x[:, 3] + 0.3 * x[:, 1]], axis=1)
    return x, (y * MM).astype(np.float32)


def init(key):
    out = []
    for a, b in zip(WIDTHS[:-1], WIDTHS[1:]):
        key, sub = jax.random.split(key)
        out.append({"w": jax.random.normal(sub, (a, b)) * (1.0 / a) ** 0.5, "b": jnp.zeros(b)})
    return out


def forward(params, x):
    half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    h = x.astype(jnp.float16)
    for layer in half[:-1]:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    h = h @ half[-1]["w"] + half[-1]["b"]
    return (h * jnp.float16(MM)).astype(jnp.float32)


def mse(params, x, y):
    return jnp.mean((forward(params, x) - y) ** 2)


tx = optax.adam(3e-3, eps=1e-12)


@jax.jit
def update(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(mse)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main():
    x, y = make_data(4096, 0)
    xv, yv = make_data(1024, 1)
    params = init(jax.random.key(0))
    opt_state = tx.init(params)
    rng = np.random.default_rng(2)
    for step in range(250):
        idx = rng.integers(0, len(x), 256)
        params, opt_state, loss = update(params, opt_state, x[idx], y[idx])
        if step % 25 == 0:
            print(f"step {step:4d}  mse {float(loss) / MM**2:.4f} mm^2")
    print(f"validation mse {float(mse(params, xv, yv)) / MM**2:.4f} mm^2 (variance {np.var(yv) / MM**2:.4f})")


if __name__ == "__main__":
    main()
