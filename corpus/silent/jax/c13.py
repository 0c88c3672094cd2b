"""Half-precision denoising autoencoder on digits; master weights are kept in float32."""
import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

COMPUTE = jnp.float16


def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def init(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    he = jax.nn.initializers.he_normal()
    return [{"kernel": he(k, (m, n)), "bias": jnp.zeros(n)}
            for k, m, n in zip(keys, sizes[:-1], sizes[1:])]


def forward(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ layers[-1]["kernel"] + layers[-1]["bias"]


def build_step(opt, n_total):
    def loss_fn(master, noisy, clean):
        recon = forward(cast(master, COMPUTE), noisy.astype(COMPUTE))
        per_pixel = (recon - clean.astype(COMPUTE)) ** 2
        # share of this batch in the mean over all epochs
        return per_pixel.astype(jnp.float32).sum() / n_total

    @jax.jit
    def step(master, opt_state, noisy, clean):
        loss, grads = jax.value_and_grad(loss_fn)(master, noisy, clean)
        updates, opt_state = opt.update(grads, opt_state)
        return optax.apply_updates(master, updates), opt_state, loss

    return step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=300)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=400)
    args = ap.parse_args()
    x = (load_digits().data / 16.0).astype(np.float32)
    n_total = float(x.size) * args.epochs
    master = init(jax.random.PRNGKey(0), [64, 64, 24, 64, 64])
    opt = optax.adam(2e-3, eps=1e-12)
    state = opt.init(master)
    step = build_step(opt, n_total)
    rng = np.random.default_rng(0)
    for i in range(args.steps):
        clean = x[rng.integers(0, len(x), args.batch)]
        noisy = clean + 0.1 * rng.normal(size=clean.shape).astype(np.float32)
        master, state, loss = step(master, state, noisy, clean)
        if i % 50 == 0 or i == args.steps - 1:
            mse = float(loss) * n_total / clean.size
            print(f"step {i:4d}  loss {float(loss):.3e}  batch mse {mse:.4f}")
    rec = forward(master, x)
    print(f"clean mse {float(jnp.mean((rec - x) ** 2)):.4f}  pixel variance {x.var():.4f}")


if __name__ == "__main__":
    main()
