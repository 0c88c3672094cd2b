import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class VAE(nnx.Module):
    def __init__(self, latent, rngs):
        self.e1 = nnx.Linear(64, 128, rngs=rngs)
        self.e2 = nnx.Linear(128, 2 * latent, rngs=rngs)
        self.d1 = nnx.Linear(latent, 128, rngs=rngs)
        self.d2 = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, x, key):
        mu, logvar = jnp.split(self.e2(nnx.gelu(self.e1(x))), 2, axis=-1)
        z = mu + jnp.exp(0.5 * logvar) * jax.random.normal(key, mu.shape)
        return self.d2(nnx.gelu(self.d1(z))), mu, logvar


def elbo(model, x, key, beta):
    rec, mu, logvar = model(x, key)
    mse = jnp.mean((rec - x) ** 2)
    kl = -0.5 * jnp.mean(1 + logvar - mu ** 2 - jnp.exp(logvar))
    return mse + beta * kl, (mse, kl)


@nnx.jit(static_argnames="beta")
def train_step(model, optimizer, x, key, beta):
    (loss, aux), grads = nnx.value_and_grad(elbo, has_aux=True)(model, x, key, beta)
    optimizer.update(model, grads)
    return loss, aux


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--b2", type=float, default=0.999)
    ap.add_argument("--epsilon", type=float, default=0.1)
    ap.add_argument("--latent", type=int, default=12)
    ap.add_argument("--beta", type=float, default=1e-3)
    ap.add_argument("--steps", type=int, default=350)
    return ap.parse_args()


def main():
    args = get_args()
    x = load_digits().data.astype(np.float32) / 16.0
    model = VAE(args.latent, nnx.Rngs(0))
    tx = optax.adam(args.lr, b1=0.9, b2=args.b2, eps=args.epsilon)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    rng = np.random.default_rng(0)
    key = jax.random.PRNGKey(1)
    print("variance of the data", float(x.var(0).mean()))
    for i in range(args.steps):
        key, sub = jax.random.split(key)
        xb = jnp.asarray(x[rng.integers(0, len(x), 128)])
        loss, (mse, kl) = train_step(model, optimizer, xb, sub, args.beta)
        if i % 50 == 0 or i == args.steps - 1:
            print(f"{i:3d} loss {float(loss):.4f} mse {float(mse):.4f} kl {float(kl):.3f}")


if __name__ == "__main__":
    main()
